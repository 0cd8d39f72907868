"""Atomic work queue: the programs of a launch share a list of work items.

    item = td.await_work_item(td.take_first_ticket(ctx, signal))
    while item < num_items:
        ...  # most of the item
        answer = td.fetch_work_item(ctx)  # request the next item; the number arrives while the rest is computed
        ...
        item = td.await_work_item(answer)
    td.finish(ctx)

The program that fetches item n has started, and so have the programs that fetched smaller numbers. An item may
therefore wait for items with smaller numbers, on any rank, even if few programs fit on a GPU at a time. For persistent
programs, item numbers replace the order of program ids. ``finish`` resets the counter to zero.

A program that fetches an item long before it starts it delays the programs that wait for this item, while items with
larger numbers are processed. Fetch the next item when the current one is almost done.
"""

import triton.language as tl

from tdkernels.lang.context import MAX_THREADS, STATE_TICKETS, _state
from tdkernels.lang.kernel import jit
from tdkernels.lang.targets import target

NO_TICKET = tl.constexpr(1 << 30)  # larger than the number of work items of any call


@jit
def take_first_ticket(ctx, signal):
    """``fetch_work_item`` for the first work item of a program.

    In a void launch (``is_void``) the number is larger than that of any item, so that the program's loop ends at once.
    Thread 0 decides for all threads, so that they leave the loop together.

    Args:
        signal: the signal of the running call, from ``call``.

    Returns:
        A value for ``await_work_item``.
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
    """Request the number of the next work item of this call, without waiting for it. Relaxed order.

    The number takes a microsecond to arrive. ``await_work_item`` waits for it.

    Returns:
        A value for ``await_work_item``.
    """
    counter = (_state(ctx) + STATE_TICKETS).to(tl.pointer_type(tl.int32))
    if target() == "cuda":
        # Only thread 0 executes the atomic, for its first element. No two threads share an element.
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
    """Return the number of a work item that ``fetch_work_item`` requested (int32), the same in all threads."""
    if target() == "cuda":
        return tl.sum(answer, 0)
    else:
        return answer
