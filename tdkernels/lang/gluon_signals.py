"""Signals and work items for kernels in Gluon, whose partitions of warps signal and wait independently of each other.

The primitives of ``signals`` and ``work_queue`` that contain a barrier synchronize all threads of a program. These
synchronize the warps of one partition.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.context import STATE_TICKETS, _state, num_ranks, rank, symm_at
from tdkernels.lang.failure_record import failed
from tdkernels.lang.kernel import jit
from tdkernels.lang.memory import fence_before_tma_load
from tdkernels.lang.signals import _wait_each, _wide

FOUR_WARPS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _threads(WARPS: gl.constexpr):
    """Return the index of each thread of a partition."""
    return gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))


@jit
def partition_barrier():
    """Wait for all threads of the partition."""
    tl.debug_barrier()


@gluon.jit
def agreed_signal(signal):
    """Return the signal of a call, as ``signal_of``, with the same value in all threads. For a program of four warps.

    Call it before the warps are specialized, and pass the result to the partitions.
    """
    word = gl.allocate_shared_memory(gl.int64, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    word.store(gl.full([1], signal, gl.int64, FOUR_WARPS))
    partition_barrier()
    return gl.max(word.load(FOUR_WARPS), 0)


@gluon.jit
def notify_from_warp(ctx, signal_ptr, peer, value, CHECK_FAILED: gl.constexpr = False):
    """``notify`` in a partition of one warp, after the TMA stores of that warp.

    ``await_tma_stores`` comes first. ``value`` is not 0.
    """
    lane = gl.to_tensor(0)  # the one that stores, or none
    if CHECK_FAILED:
        lane = gl.where(failed(ctx), 32, lane)
    gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 t; bar.warp.sync 0xffffffff; mov.u32 t, %laneid; setp.eq.u32 first, t, $3;"
        " @first st.release.sys.global.b64 [$1], $2; mov.b32 $0, 0; }",
        "=r,l,l,r,~{memory}", [symm_at(ctx, signal_ptr, peer), _wide(value), lane], dtype=gl.int32, is_pure=False,
        pack=1,
    )


@gluon.jit
def count_ready_by_warp(first_ptr, count, expected):
    """Return how many signals from ``first_ptr`` on are ``expected``, up to the first that is not.

    For a partition of one warp, which may then load their data with TMA. It does not wait, and reads at most 32 of the
    ``count`` signals. ``wait_plan`` waits for the others.
    """
    ready = gl.inline_asm_elementwise(
        "{ .reg .pred there, same; .reg .b32 t; .reg .b64 at, seen; mov.u32 t, %laneid; mad.wide.u32 at, t, 8, $1;"
        " setp.lt.u32 there, t, $2; mov.b64 seen, 0; @there ld.acquire.sys.global.b64 seen, [at];"
        " setp.eq.and.s64 same, seen, $3, there; vote.sync.ballot.b32 t, same, 0xffffffff; not.b32 t, t;"
        " brev.b32 t, t; clz.b32 $0, t; bar.warp.sync 0xffffffff; }",
        "=r,l,r,l,~{memory}", [first_ptr, count, _wide(expected)], dtype=gl.int32, is_pure=False, pack=1,
    )
    fence_before_tma_load()
    return ready


@gluon.jit
def wait_each(ctx, signal_ptrs, expected, peers, there):
    """``wait_plan`` by each thread of a partition for its own word, if ``there``. It reads its word in any case.

    peers: the rank that sets the word
    """
    _wait_each(ctx, signal_ptrs, expected, peers, there)
    partition_barrier()  # each thread has acquired from one rank; after the barrier, all threads have from all ranks


@gluon.jit
def wait_for_ranks(ctx, first_ptr, stride, expected, WARPS: gl.constexpr = 2, WITH_OWN: gl.constexpr = True):
    """``wait_plan_all`` in a partition of WARPS warps, at least two."""
    peers = _threads(WARPS)
    is_peer = (peers < num_ranks(ctx)) & (WITH_OWN | (peers != rank(ctx)))
    # A thread without a peer reads a word of this rank: any value satisfies its wait.
    signal_ptrs = first_ptr + gl.where(is_peer, peers, rank(ctx)).to(gl.int64) * stride
    wait_each(ctx, signal_ptrs, expected, peers, is_peer)


@gluon.jit
def wait_for_rank(ctx, signal_ptr, expected, peer, WARPS: gl.constexpr = 2):
    """``wait_plan`` for a signal of one rank, in a partition of WARPS warps."""
    threads = _threads(WARPS)
    wait_each(ctx, signal_ptr + 0 * threads, expected, peer + 0 * threads, threads >= 0)


@gluon.jit
def is_last_arriver_of_warps(flag_ptr, count, WARPS: gl.constexpr):
    """``is_last_arriver`` among ``count`` partitions of WARPS warps, in programs of this rank."""
    partition_barrier()
    before = gl.inline_asm_elementwise(
        "{ .reg .pred first, last; .reg .b64 before; setp.eq.u32 first, $4, 0; mov.b64 before, -1;"
        " @first atom.acq_rel.gpu.global.add.u64 before, [$1], 1; add.s64 before, before, 1;"
        " setp.eq.and.s64 last, before, $2, first; @last st.relaxed.gpu.global.b64 [$1], $3;"
        " selp.b32 $0, 1, 0, last; }",
        "=r,l,l,l,r,~{memory}", [flag_ptr, _wide(count), _wide(0), _threads(WARPS)], dtype=gl.int32, is_pure=False,
        pack=1,
    )
    return gl.max(before, 0) > 0  # with a barrier: what thread 0 has acquired, the others may release


@gluon.jit
def notify_all_by_warps(ctx, signal_ptr, value, WARPS: gl.constexpr, first=0):
    """``notify_all`` with CHECK_FAILED, in a partition of WARPS warps. ``value`` is not 0.

    Each thread notifies one peer, from rank ``first`` on.
    """
    partition_barrier()
    peers = first + _threads(WARPS)
    is_peer = (peers < num_ranks(ctx)) & (peers != rank(ctx)) & (failed(ctx) == 0)
    signal_ptrs = symm_at(ctx, signal_ptr, gl.where(is_peer, peers, rank(ctx)))
    gl.inline_asm_elementwise(
        "{ .reg .pred goes; setp.ne.u32 goes, $3, 0; @goes st.release.sys.global.b64 [$1], $2; mov.b32 $0, 0; }",
        "=r,l,l,r,~{memory}", [signal_ptrs, _wide(value), is_peer.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def notify_by_warps(ctx, signal_ptr, stride, count, peer, value, WARPS: gl.constexpr):
    """``notify`` with CHECK_FAILED for ``count`` signals at a distance of ``stride``, in a partition of WARPS warps.

    ``count`` is at most the number of threads, and ``value`` is not 0.
    """
    partition_barrier()
    there = gl.where(failed(ctx), 0, count)
    gl.inline_asm_elementwise(
        "{ .reg .pred goes; .reg .b64 at; setp.lt.s32 goes, $5, $3; mad.wide.s32 at, $5, $4, $1;"
        " @goes st.release.sys.global.b64 [at], $2; mov.b32 $0, 0; }",
        "=r,l,l,r,r,r,~{memory}",
        [symm_at(ctx, signal_ptr, peer), _wide(value), there, 8 * stride, _threads(WARPS)], dtype=gl.int32,
        is_pure=False, pack=1,
    )


@gluon.jit
def add_release_by_warps(ptr, WARPS: gl.constexpr):
    """Add 1 to a 64-bit word of this GPU with release order, after all earlier stores of a partition of WARPS warps.

    For TMA stores, ``await_tma_stores`` comes first.
    """
    partition_barrier()
    gl.inline_asm_elementwise(
        "{ .reg .pred first; setp.eq.u32 first, $2, 0; @first red.release.gpu.global.add.u64 [$1], 1; mov.b32 $0, 0; }",
        "=r,l,r,~{memory}", [ptr, _threads(WARPS)], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def raise_by_warps(flag_ptr, value, WARPS: gl.constexpr):
    """Store ``value`` in a flag with release order at GPU scope, after the stores of a partition of WARPS warps."""
    partition_barrier()
    gl.inline_asm_elementwise(
        "{ .reg .pred first; setp.eq.u32 first, $3, 0; @first st.release.gpu.global.b64 [$1], $2; mov.b32 $0, 0; }",
        "=r,l,l,r,~{memory}", [flag_ptr, _wide(value), _threads(WARPS)], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def clear_by_warps(flag_ptr, WARPS: gl.constexpr):
    """Set a flag to 0 again (relaxed), in a partition of WARPS warps that has waited for it with ``wait_for_rank``."""
    gl.inline_asm_elementwise(
        "{ .reg .pred first; setp.eq.u32 first, $3, 0; @first st.relaxed.gpu.global.b64 [$1], $2; mov.b32 $0, 0; }",
        "=r,l,l,r,~{memory}", [flag_ptr, _wide(0), _threads(WARPS)], dtype=gl.int32, is_pure=False, pack=1,
    )


# ---- work items ----


@jit
def _counter(ctx, QUEUE: tl.constexpr):
    """Return the pointer to the counter of queue 0 or 1. Both are in one word, which ``finish`` resets."""
    return (_state(ctx) + STATE_TICKETS).to(tl.pointer_type(tl.int32)) + QUEUE


@gluon.jit
def request_number(counter_ptr):
    """Request the next number of an int32 counter, in a partition of one warp; ``item_of_warp`` returns it."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 first, t, 0; mov.b32 $0, 0;"
        " @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1; }",
        "=r,l,~{memory}", [counter_ptr], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def reset_after(counter_ptr, number, total):
    """Reset the counter of ``request_number`` if ``number`` is the last one of this launch, in a partition of one warp.

    Each program requests numbers until it gets one that is not below ``total``. So the last number of all programs is
    ``total`` + programs - 1, and none is requested after it.
    """
    is_last = number == total + gl.num_programs(0) - 1
    gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 first, t, 0;"
        " setp.ne.and.s32 first, $2, 0, first; @first st.relaxed.gpu.global.b32 [$1], 0; mov.b32 $0, 0; }",
        "=r,l,r,~{memory}", [counter_ptr, is_last.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def request_by_warp(ctx, QUEUE: gl.constexpr):
    """``fetch_work_item`` in a partition of one warp; ``item_of_warp`` returns the number."""
    return request_number(_counter(ctx, QUEUE))


@gluon.jit
def item_of_warp(answer):
    """Return the number that ``request_number`` or ``request_by_warp`` requested, in all lanes of the warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [answer], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def request_by_warps(ctx, QUEUE: gl.constexpr, WARPS: gl.constexpr = 2):
    """``fetch_work_item`` in a partition of WARPS warps; ``item_of_warps`` returns the number."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred first; setp.eq.u32 first, $2, 0; mov.b32 $0, 0;"
        " @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1; }",
        "=r,l,r,~{memory}", [_counter(ctx, QUEUE), _threads(WARPS)], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def item_of_warps(answer):
    """Return the number that ``request_by_warps`` requested, in all threads."""
    return gl.max(answer, 0)
