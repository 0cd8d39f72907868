"""Split-K for the tiles of the last wave: several programs multiply a range of K each, and one of them adds the sums.

Tiles are work items of a queue. If the last wave has few tiles, most SMs are idle in it. So K of these tiles is split
into equal ranges, each a work item: split 0 of all split tiles, then split 1, and so on. All but the last split of a
tile store their sums, in fp32, in memory of this GPU. The last split waits for them, adds them to its own in the order
of the splits, and passes on the tile. So results have the same bits in every run.

Progress (invariant 1): an item waits only for items with smaller numbers: for the other splits of its tile, and for
earlier items of its program. Programs that have started have fetched all of them, so the smallest item that is not
complete can always run.

Failures (invariant 5): if a wait gives up, the sums are not valid. So a tile with splits is signalled only if the group
has not failed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.context import flag_at, rank
from tdkernels.lang.gluon_profile import mark_by_warps
from tdkernels.lang.gluon_signals import clear_by_warps, raise_by_warps, wait_for_rank
from tdkernels.ops.common.specialized.layout import HALF_LAYOUT, HALF_M, HALF_N, HALF_SIZE


@gluon.jit
def split_of(item, steps, last_wave):
    """Return (tile, first step of K, number of steps, split) of a work item.

    split: 0 for a whole tile, 1 + number of its sums for a split that stores them, -1 - number of the split tile for
    the last split

    last_wave: (number of whole tiles, number of split tiles, splits of a tile)
    """
    whole_tiles, split_tiles, num_splits = last_wave
    split_tiles = gl.maximum(split_tiles, 1)
    number = item - whole_tiles
    index, tile = number // split_tiles, number % split_tiles
    first, end = steps * index // num_splits, steps * (index + 1) // num_splits
    is_whole = number < 0
    split = gl.where(index == num_splits - 1, -1 - tile, 1 + tile * (num_splits - 1) + index)
    return (
        gl.where(is_whole, item, whole_tiles + tile), gl.where(is_whole, 0, first),
        gl.where(is_whole, steps, end - first), gl.where(is_whole, 0, split),
    )


@gluon.jit
def piece_of(tile, split, first_piece):
    """Return the number of a work item in a trace, in which splits that store sums begin with ``first_piece``."""
    return gl.where(split > 0, first_piece + split - 1, tile)


@gluon.jit
def _pointers(ptr, number, WHICH: gl.constexpr):
    """Return the pointers to sums number ``number`` of HALF_M rows and HALF_N columns."""
    rows = gl.arange(0, HALF_M, layout=gl.SliceLayout(1, HALF_LAYOUT))
    columns = gl.arange(0, HALF_N, layout=gl.SliceLayout(0, HALF_LAYOUT))
    return ptr + (2 * number + WHICH).to(gl.int64) * (2 * HALF_SIZE) + rows[:, None] * HALF_N + columns[None, :]


@gluon.jit
def store_split(halves, split, splits, WHICH: gl.constexpr):
    """Store the sums of a split that is not the last one. split: 1 + their number

    splits: (pointer to the sums, ctx, number of the first flag, signal of the call, splits of a tile, trace buffer or
        None, number of the first piece)
    """
    ptr, ctx, first_flag, signal, _, trace_ptr, first_piece = splits
    pointers = _pointers(ptr, split - 1, WHICH)
    for side in gl.static_range(2):
        gl.store(pointers + side * HALF_SIZE, halves[side])
    raise_by_warps(flag_at(ctx, first_flag + 2 * (split - 1) + WHICH), signal, 4)  # waiter: ``add_splits``
    if WHICH == 0:
        mark_by_warps((trace_ptr, first_piece + split - 1), "ends", 4)


@gluon.jit
def add_splits(halves, split, splits, WHICH: gl.constexpr):
    """Return the sums of a last split plus those of the other splits. split: -1 - number of the split tile"""
    ptr, ctx, first_flag, signal, num_splits, _, _ = splits
    left, right = halves
    first = (-1 - split) * (num_splits - 1)
    for number in range(first, first + num_splits - 1):
        flag = flag_at(ctx, first_flag + 2 * number + WHICH)
        wait_for_rank(ctx, flag, signal, rank(ctx), 4)  # producer: ``store_split``
        clear_by_warps(flag, 4)
        pointers = _pointers(ptr, number, WHICH)
        left += gl.load(pointers)
        right += gl.load(pointers + HALF_SIZE)
    return left, right
