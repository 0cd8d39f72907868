"""Failure record of a rank: written by a wait that fails, read by the host and by later launches.

A group has three words on a device. The first is nonzero after a wait of the group has failed. The second is nonzero
after the launch of that wait has ended. The third holds the address of a word in host memory, which is set with the
record. A device has one word for all groups: it is set while the host has not reported a failed launch of any group.
The host reads the record, see ``symm.failure``.
"""

import triton.language as tl

from tdkernels.lang.context import CTX_DEVICE_FAILED, CTX_FAILED, CTX_ID, CTX_RECORD, MAX_THREADS
from tdkernels.lang.kernel import jit
from tdkernels.lang.memory import store_release
from tdkernels.lang.reduce import max_of
from tdkernels.lang.targets import target

# Kinds of failure, in the record's first word. The other words are the peer, the address of the signal, the expected
# value, the value seen, and the id of the workspace's context table.
RECORD_TIMEOUT = tl.constexpr(1)
RECORD_PLAN_TIMEOUT = tl.constexpr(2)
RECORD_PLAN_MISMATCH = tl.constexpr(3)
RECORD_PEER_FAILED = tl.constexpr(4)
RECORD_OVERLAP = tl.constexpr(5)
RECORD_VOID = tl.constexpr(6)


@jit
def failed_at(ctx):
    """Return the pointer to the group's failure word.

    It is nonzero if a wait of this rank has failed in any launch of the group. The next word is nonzero when that
    launch has ended.
    """
    return tl.load(ctx + CTX_FAILED).to(tl.pointer_type(tl.int64))


@jit
def device_failed_at(ctx):
    """Return the pointer to the device's failure word.

    It is nonzero after a launch of any group on this device has failed.
    """
    return tl.load(ctx + CTX_DEVICE_FAILED).to(tl.pointer_type(tl.int64))


@jit
def failed(ctx):
    """Return whether this rank has failed, so that its results must not be sent as valid data.

    It has failed after a wait of this group failed, or after a launch of any group on this device failed. Each thread
    reads the word for itself. Use it for masks, not for a branch with a barrier in it.
    """
    return (tl.load(failed_at(ctx), volatile=True) | tl.load(device_failed_at(ctx), volatile=True)) != 0


@jit
def failed_for_all(ctx):
    """Return ``failed`` with the same result in all threads, for a branch. Contains a barrier."""
    lanes = tl.full((MAX_THREADS,), 0, tl.int32)
    words = tl.load(failed_at(ctx) + lanes, volatile=True) | tl.load(device_failed_at(ctx) + lanes, volatile=True)
    return max_of((words != 0).to(tl.int32), 0) != 0


@jit
def end_wait(ctx):
    """Make later launches void if a wait of this launch has failed.

    Call it at the end of a launch that does not call ``finish``.
    """
    words = failed_at(ctx)
    # Only once per failure: after the host has reported it, it clears the device's word, and other groups go on.
    failed_now = (tl.load(words, volatile=True) != 0) & (tl.load(words + 1, volatile=True) == 0)
    tl.store(words + 1, tl.cast(1, tl.int64), mask=failed_now)
    tl.store(device_failed_at(ctx), tl.cast(1, tl.int64), mask=failed_now)


@jit
def record_if(ctx, condition, kind, peer, where, expected, seen):
    """Write the failure record if ``condition`` holds, and mark this rank as failed. The first program to do so wins.

    Args:
        condition: whether to record.
        kind: one of the ``RECORD_*`` constants.
        peer: the rank, int64.
        where: the address of the signal, int64.
        expected: the expected value, int64.
        seen: the value seen, int64.
    """
    failed_ptr = failed_at(ctx)
    record_ptr = tl.load(ctx + CTX_RECORD)
    table = tl.load(ctx + CTX_ID)
    if target() == "cuda":
        # Per thread, without a barrier: threads of a program may have read different values of the signal.
        tl.inline_asm_elementwise(
            """{
            .reg .pred p; .reg .b64 before, kind, host;
            setp.eq.s32 p, $1, 0;
            @p bra FINE;
            atom.acq_rel.gpu.global.cas.b64 before, [$2], 0, 1;
            setp.ne.s64 p, before, 0;
            @p bra FINE;
            st.relaxed.sys.global.b64 [$3+8], $5;
            st.relaxed.sys.global.b64 [$3+16], $6;
            st.relaxed.sys.global.b64 [$3+24], $7;
            st.relaxed.sys.global.b64 [$3+32], $8;
            st.relaxed.sys.global.b64 [$3+40], $9;
            cvt.s64.s32 kind, $4;
            st.release.sys.global.b64 [$3], kind;
            ld.global.b64 host, [$2+16];
            st.release.sys.global.b64 [host], 1;
            FINE:
            bar.warp.sync 0xffffffff;
            mov.b32 $0, 0;
            }""",
            "=r,r,l,l,r,l,l,l,l,l,~{memory}",
            [condition.to(tl.int32), failed_ptr, record_ptr, kind, peer, where, expected, seen, table],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    elif condition:
        before = tl.atomic_cas(
            failed_ptr, tl.full((), 0, tl.int64), tl.full((), 1, tl.int64), sem="acq_rel", scope="gpu"
        )
        if before == 0:
            words = record_ptr.to(tl.pointer_type(tl.int64))
            tl.store(words + 1, peer)
            tl.store(words + 2, where)
            tl.store(words + 3, expected)
            tl.store(words + 4, seen)
            tl.store(words + 5, table)
            store_release(words, tl.full((), 0, tl.int64) + kind, "sys")
            host = tl.load(failed_ptr + 2).to(tl.pointer_type(tl.int64))
            store_release(host, tl.full((), 1, tl.int64), "sys")
