"""Trace events of a kernel, for ``python -m tdkernels trace``. A kernel records them only if it gets a trace buffer.

The buffer consists of 64-bit words. The first of its two header words is NUM_KINDS + turns. Events of shape
[pieces, NUM_KINDS + turns, 2] follow. A piece is a work item. It has one slot for each kind of action, and ``turns``
more slots for actions that it repeats. An event consists of the time and a word with the multiprocessor, peer and kind
(``PEER_SHIFT``, ``MULTIPROCESSOR_SHIFT``). It lasts until the next event of its piece.
"""

import triton.language as tl

from tdkernels.lang.kernel import jit
from tdkernels.lang.memory import barrier, clock_ns
from tdkernels.lang.targets import number_of, target

# One string, so that it is part of the key of a compiled kernel. On a clock of low resolution, two events can have the
# same time. Then the one that is earlier in this list counts as the earlier event.
KINDS = tl.constexpr("starts waits copies multiplies joins stores pushes receives sums finishes ends")
NUM_KINDS = tl.constexpr(len(KINDS.value.split()))
NO_PEER = tl.constexpr(-1)
ALL_PEERS = tl.constexpr(-2)
PEER_SHIFT = tl.constexpr(8)  # the next byte holds peer + 2
MULTIPROCESSOR_SHIFT = tl.constexpr(32)  # signed; -1 if it is not known


@jit
def mark(trace, KIND: tl.constexpr, peer=NO_PEER, turn=NO_PEER):
    """Record the event that this program performs the action ``KIND`` from now on.

    All threads meet at a barrier, so that the previous action is complete. Then one thread stores the event. Without a
    trace buffer this generates no code.

    Args:
        trace: (buffer or None, number of the piece that the action belongs to).
        KIND: the action, one of ``KINDS``.
        peer: the rank for, from or to which the action is performed, NO_PEER or ALL_PEERS.
        turn: number of the repetition, for a piece that performs the action several times. Without it, only the last
            repetition is kept.
    """
    if trace[0] is not None:
        barrier()
        kind = number_of(KIND, KINDS)
        turn = tl.full((), 0, tl.int64) + turn
        place = tl.where(turn < 0, kind, NUM_KINDS + turn)
        piece = tl.full((), 0, tl.int64) + trace[1]
        event_ptr = trace[0] + 2 + (piece * tl.load(trace[0]) + place) * 2
        what = tl.full((), kind, tl.int64) + ((tl.full((), 2, tl.int64) + peer) << PEER_SHIFT)
        if target() == "cuda":
            # One block of assembly, so that no other code runs between the barrier and reading the clock.
            tl.inline_asm_elementwise(
                """{
                .reg .pred first; .reg .b32 thread, multiprocessor; .reg .b64 now, where, what;
                mov.u64 now, %globaltimer;
                mov.u32 thread, %tid.x;
                setp.eq.u32 first, thread, 0;
                mov.u32 multiprocessor, %smid;
                cvt.u64.u32 where, multiprocessor;
                shl.b64 where, where, 32;
                or.b64 what, where, $2;
                @first st.global.v2.b64 [$1], {now, what};
                mov.b32 $0, 0;
                }""",
                "=r,l,l,~{memory}",
                [event_ptr, what],
                tl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            now = clock_ns()
            tl.store(event_ptr, now)
            tl.store(event_ptr + 1, what + (_multiprocessor() << MULTIPROCESSOR_SHIFT))


@jit
def _multiprocessor():
    """Return the number of the compute unit that runs this program, or -1 if it is not known.

    On AMD's GPUs of several dies the number is ``die << 8 | unit``.
    """
    if target() == "hip":
        die_and_unit = tl.inline_asm_elementwise(
            "s_getreg_b32 $0, hwreg(HW_REG_XCC_ID, 0, 4)\ns_getreg_b32 $1, hwreg(HW_REG_HW_ID, 8, 8)",
            "=s,=s", [], dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )
        return (die_and_unit[0].to(tl.int64) << 8) + die_and_unit[1]
    else:
        return tl.full((), -1, tl.int64)
