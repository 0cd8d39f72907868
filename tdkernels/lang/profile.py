"""When a program did what: notes that a kernel leaves for ``python -m tdkernels trace``, and only for it.

The buffer is two words of 64 bits, of which the first is NUM_KINDS + turns, and [pieces, NUM_KINDS + turns, 2] more. A
piece of work has a place for each kind of thing that is done, and ``turns`` more for what is done several times; an
event is the time, and the multiprocessor, peer and kind (``PEER_SHIFT``, ``MULTIPROCESSOR_SHIFT``). An event lasts
until the next one of its piece.
"""

import triton.language as tl

from tdkernels.lang.kernel import jit
from tdkernels.lang.memory import clock_ns
from tdkernels.lang.targets import number_of, target

# One text, so that it is part of what a compiled kernel is known by. Of events at the same time, on a clock that ticks
# slowly, the earlier one in this list is taken for the earlier one.
KINDS = tl.constexpr("starts waits copies multiplies joins stores pushes receives sums finishes ends")
NUM_KINDS = tl.constexpr(len(KINDS.value.split()))
NO_PEER = tl.constexpr(-1)
ALL_PEERS = tl.constexpr(-2)
PEER_SHIFT = tl.constexpr(8)  # the byte above holds the peer + 2
MULTIPROCESSOR_SHIFT = tl.constexpr(32)  # signed; -1 where it is not known


@jit
def mark(trace, KIND: tl.constexpr, peer=NO_PEER, turn=NO_PEER):
    """Note that this program does from now on what ``KIND`` says, for, from or to ``peer``; without a trace, nothing.

    ``trace``: (the buffer or None, the number of the piece of work that this belongs to)
    ``turn``: the number of this time, where a piece does it several times; else the last time is what remains. All
    threads meet here, so that what comes before has been done; one notes it.
    """
    if trace[0] is not None:
        tl.debug_barrier()
        kind = number_of(KIND, KINDS)
        turn = tl.full((), 0, tl.int64) + turn
        place = tl.where(turn < 0, kind, NUM_KINDS + turn)
        piece = tl.full((), 0, tl.int64) + trace[1]
        event_ptr = trace[0] + 2 + (piece * tl.load(trace[0]) + place) * 2
        what = tl.full((), kind, tl.int64) + ((tl.full((), 2, tl.int64) + peer) << PEER_SHIFT)
        if target() == "cuda":
            # In one piece, so that nothing comes between the barrier and the look at the clock.
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
    """The number of the compute unit that this program runs on, as AMD's chips of many dies count them, or -1."""
    if target() == "hip":
        die_and_unit = tl.inline_asm_elementwise(
            "s_getreg_b32 $0, hwreg(HW_REG_XCC_ID, 0, 4)\ns_getreg_b32 $1, hwreg(HW_REG_HW_ID, 8, 8)",
            "=s,=s", [], dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )
        return (die_and_unit[0].to(tl.int64) << 8) + die_and_unit[1]
    else:
        return tl.full((), -1, tl.int64)
