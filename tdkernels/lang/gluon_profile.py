"""Trace events of partitions of warps, for kernels in Gluon; see ``profile``."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.gluon_signals import _threads, partition_barrier
from tdkernels.lang.profile import KINDS, NO_PEER, PEER_SHIFT
from tdkernels.lang.targets import number_of


@gluon.jit
def mark_by_warps(trace, KIND: gl.constexpr, WARPS: gl.constexpr, peer=NO_PEER):
    """``profile.mark`` in a partition of WARPS warps, without repetitions.

    Several partitions may record events of one piece. Each kind comes from one of them.
    """
    if trace[0] is not None:
        partition_barrier()
        kind: gl.constexpr = number_of(KIND, KINDS)
        event_ptr = trace[0] + 2 + (trace[1].to(tl.int64) * gl.load(trace[0]) + kind) * 2
        # One block of assembly, so that no other code runs between the barrier and reading the clock.
        gl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .b32 multiprocessor; .reg .b64 now, where, what; mov.u64 now, %globaltimer;"
            " setp.eq.u32 first, $3, 0; mov.u32 multiprocessor, %smid; cvt.u64.u32 where, multiprocessor;"
            " shl.b64 where, where, 32; or.b64 what, where, $2; @first st.global.v2.b64 [$1], {now, what};"
            " mov.b32 $0, 0; }",
            "=r,l,l,r,~{memory}", [event_ptr, _event_word(kind, peer), _threads(WARPS)], dtype=gl.int32, is_pure=False,
            pack=1,
        )


@gluon.jit
def _event_word(kind: gl.constexpr, peer):
    """Return the word of an event without the multiprocessor."""
    return gl.to_tensor(kind).to(tl.int64) + ((2 + gl.to_tensor(peer)).to(tl.int64) << PEER_SHIFT)
