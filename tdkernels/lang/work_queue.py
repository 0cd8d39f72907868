"""Tickets: how the programs of a launch share a list of work.

    piece = td.await_work_item(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        ...  # most of the piece
        answer = td.fetch_work_item(ctx)  # the next one, which is known by the time the rest is done
        ...
        piece = td.await_work_item(answer)
    td.finish(ctx)

Whoever takes number n has started, and so has whoever took a smaller one. So a piece of work may wait for those of
smaller numbers, on any rank, however few programs fit a GPU at a time: it is the order of program ids, for programs
that stay. ``finish`` puts the numbers back to zero.

A ticket that is taken long before it is used keeps others waiting for its piece, while pieces of higher numbers are
done: take it when little of the piece before is left.
"""

import triton.language as tl

from tdkernels.lang.context import MAX_THREADS, STATE_TICKETS, _state
from tdkernels.lang.kernel import jit
from tdkernels.lang.targets import target

NO_TICKET = tl.constexpr(1 << 30)  # beyond the number of pieces of every call


@jit
def take_first_ticket(ctx, signal):
    """``fetch_work_item`` for a program's first piece; in a void launch (``is_void``) the number is beyond all pieces.

    Thread 0 decides for all, so that they leave the loop together.
    """
    answer = fetch_work_item(ctx)
    if target() == "cuda":
        return tl.inline_asm_elementwise(
            """{
            .reg .pred p; .reg .b32 t;
            mov.u32 t, %tid.x;
            or.b32 t, t, $3;
            setp.eq.u32 p, t, 0;
            setp.eq.and.s64 p, $2, 0, p;
            selp.b32 $0, 0x40000000, $1, p;
            }""",
            "=r,r,l,r", [answer, signal, tl.arange(0, MAX_THREADS)], tl.int32, is_pure=False, pack=1,
        )
    else:
        return tl.where(signal == 0, NO_TICKET, answer)


@jit
def fetch_work_item(ctx):
    """Ask for the number of the next piece of work of this call; ``await_work_item`` what is returned is that number.

    The answer takes a microsecond to come; nobody waits for it here, but in ``await_work_item``.
    """
    counter = (_state(ctx) + STATE_TICKETS).to(tl.pointer_type(tl.int32))
    if target() == "cuda":
        # Thread 0 alone asks, for its first element; no two threads share one.
        return tl.inline_asm_elementwise(
            """{
            .reg .pred first; .reg .b32 t;
            mov.u32 t, %tid.x;
            or.b32 t, t, $2;
            setp.eq.u32 first, t, 0;
            mov.b32 $0, 0;
            @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
            }""",
            "=r,l,r,~{memory}", [counter, tl.arange(0, MAX_THREADS)], tl.int32, is_pure=False, pack=1,
        )
    else:
        return tl.atomic_add(counter, tl.full((), 1, tl.int32), sem="relaxed", scope="gpu")


@jit
def await_work_item(answer):
    """The number that ``fetch_work_item`` asked for (int32), the same in all threads."""
    if target() == "cuda":
        return tl.sum(answer, 0)
    else:
        return answer
