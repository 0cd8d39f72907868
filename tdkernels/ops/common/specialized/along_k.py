"""Divide tiles along K: several programs multiply a part of K each, and one of them adds the sums of the others.

Tiles are work items of a queue. If the last wave has few tiles, most SMs are idle in it. So these tiles are divided
into equal parts, each a work item: part 0 of all divided tiles, then part 1, and so on. All but the last part of a tile
store their sums, in fp32, in memory of this GPU. The last part waits for them, adds them to its own in the order of the
parts, and passes on the tile. So results have the same bits in every run.

Progress (invariant 1): the last part of a tile waits for parts with smaller numbers. So programs have fetched them, and
these parts wait for nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.context import flag_at, rank
from tdkernels.lang.gluon_profile import mark_by_warps
from tdkernels.lang.gluon_signals import clear_by_warps, raise_by_warps, wait_for_rank
from tdkernels.ops.common.specialized.layout import HALF_LAYOUT, HALF_M, HALF_N, HALF_SIZE


@gluon.jit
def part_of(item, steps, division):
    """Return (tile, first step of K, number of steps, part) of a work item.

    part: 0 for a whole tile, 1 + number of its sums for a part that stores them, -1 - number of the divided tile for
    the last part

    division: (number of whole tiles, of divided tiles, and of parts of each)
    """
    whole, count, parts = division
    count = gl.maximum(count, 1)
    number = item - whole
    part, tile = number // count, number % count
    first, end = steps * part // parts, steps * (part + 1) // parts
    is_whole = number < 0
    code = gl.where(part == parts - 1, -1 - tile, 1 + tile * (parts - 1) + part)
    return (
        gl.where(is_whole, item, whole + tile), gl.where(is_whole, 0, first), gl.where(is_whole, steps, end - first),
        gl.where(is_whole, 0, code),
    )


@gluon.jit
def piece_of(tile, part, first_piece):
    """Return the number of a work item in a trace, in which parts that store sums begin with ``first_piece``."""
    return gl.where(part > 0, first_piece + part - 1, tile)


@gluon.jit
def _pointers(ptr, number, WHICH: gl.constexpr):
    """Return the pointers to sums number ``number`` of HALF_M rows and HALF_N columns."""
    rows = gl.arange(0, HALF_M, layout=gl.SliceLayout(1, HALF_LAYOUT))
    columns = gl.arange(0, HALF_N, layout=gl.SliceLayout(0, HALF_LAYOUT))
    return ptr + (2 * number + WHICH).to(gl.int64) * (2 * HALF_SIZE) + rows[:, None] * HALF_N + columns[None, :]


@gluon.jit
def give(halves, part, divided, WHICH: gl.constexpr):
    """Store the sums of a part that is not the last one. part: 1 + their number

    divided: (pointer to the sums, ctx, number of the first flag, signal of the call, parts of a tile, trace buffer or
        None, number of the first piece)
    """
    ptr, ctx, first_flag, signal, _, trace_ptr, first_piece = divided
    pointers = _pointers(ptr, part - 1, WHICH)
    for side in gl.static_range(2):
        gl.store(pointers + side * HALF_SIZE, halves[side])
    raise_by_warps(flag_at(ctx, first_flag + 2 * (part - 1) + WHICH), signal, 4)  # waiter: ``take`` of the last part
    if WHICH == 0:
        mark_by_warps((trace_ptr, first_piece + part - 1), "ends", 4)


@gluon.jit
def take(halves, part, divided, WHICH: gl.constexpr):
    """Return the sums of a last part, with those of the other parts added. part: -1 - number of the divided tile"""
    ptr, ctx, first_flag, signal, parts, _, _ = divided
    left, right = halves
    first = (-1 - part) * (parts - 1)
    for number in range(first, first + parts - 1):
        flag = flag_at(ctx, first_flag + 2 * number + WHICH)
        wait_for_rank(ctx, flag, signal, rank(ctx), 4)  # producer: ``give`` of the part
        clear_by_warps(flag, 4)
        pointers = _pointers(ptr, number, WHICH)
        left += gl.load(pointers)
        right += gl.load(pointers + HALF_SIZE)
    return left, right
