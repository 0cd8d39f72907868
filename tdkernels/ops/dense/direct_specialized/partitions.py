"""The partitions that load operands and send tiles. Neither waits for another program.

With split-K a tile that is sent may depend on other programs, for which the partitions that multiply have waited. Work
items are then whole tiles and splits, otherwise the tiles. The number of the tile is passed on. With PAIRS a work item
may be a pair of halves of tiles of two owners, and twice the number is passed on, plus 1 for a pair.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tdkernels.lang.context import signal_at
from tdkernels.lang.gluon_profile import mark_by_warps
from tdkernels.lang.gluon_signals import item_of_warp, notify_from_warp, request_by_warp
from tdkernels.lang.memory import await_tma_stores
from tdkernels.ops.common.specialized.layout import (
    BLOCK_M,
    HALF_M,
    HALF_N,
    NO_HALVES,
    NO_ITEM,
    ONE_WARP,
    OUT_FREE,
    OUT_FULL,
    STAGES,
    read_item,
)
from tdkernels.ops.common.specialized.load import begin_item, end_items, load_steps
from tdkernels.ops.common.specialized.split_k import piece_of, split_of
from tdkernels.ops.common.specialized.store import store_half, store_part

# ---- load ----


@gluon.jit
def _place_of(
    item, num_items, problem, me, last_wave, RANKS: gl.constexpr, PLACE: gl.constexpr, SPLIT_K: gl.constexpr,
    PAIRS: gl.constexpr,
):
    """Return the place of a work item.

    (what is passed on, first rows in x of its halves, its first column, (first step of K, number of steps, split))
    """
    # A number beyond the items would divide by 0. Its place is not used.
    tile, first, count, split = gl.minimum(item, num_items - 1), 0, problem[2], 0
    if SPLIT_K:
        tile, first, count, split = split_of(tile, problem[2], last_wave)
    if PAIRS:
        tile, row, second, col = PLACE(tile, problem, me, RANKS)
    else:
        row, col = PLACE(tile, problem, me, RANKS)
        second = row + HALF_M
    return tile, row, second, col, (first, count, split)


@gluon.jit
def _load_steps(
    operands, memory, bars, block, second, turn, first, last, W_IS_KN: gl.constexpr, PAIRS: gl.constexpr
):
    """``load_steps`` for a whole tile, or with PAIRS for one whose second half begins with row ``second`` of x."""
    if PAIRS:
        turn = load_steps(operands, memory, bars, block, True, turn, first, last, NO_HALVES, W_IS_KN, second)
    else:
        turn = load_steps(operands, memory, bars, block, True, turn, first, last, NO_HALVES, W_IS_KN)
    return turn


@gluon.jit
def load_partition(
    ctx, operands, memory, bars, num_items, problem, me, last_wave, trace_ptr, first_piece, RANKS: gl.constexpr,
    W_IS_KN: gl.constexpr, PLACE: gl.constexpr, SPLIT_K: gl.constexpr, PAIRS: gl.constexpr = False,
):
    """Fetch work items, and load their operands.

    problem: what PLACE needs; number 2 is the number of steps of K
    last_wave: as for ``split_of``
    first_piece: number of the first split that stores sums, in a trace
    PLACE: function (tile, problem, rank, RANKS) -> (first row in x, first column)
    SPLIT_K: whether tiles are split along K
    PAIRS: whether PLACE is that of pairs, ``place_of_pair``

    The next item is requested 2 * STAGES steps before the end of the current one. Its place is computed STAGES steps
    before that end. Neither delays loads, because the tensor cores still have loaded steps to multiply.
    """
    turn = 0
    item = item_of_warp(request_by_warp(ctx, 0))
    tile, row, second, col, span = _place_of(item, num_items, problem, me, last_wave, RANKS, PLACE, SPLIT_K, PAIRS)
    while item < num_items:
        begin_item(memory, bars, tile, (row, col, second), turn, span=span if SPLIT_K else None)
        first, count, split = span
        number = tile // 2 if PAIRS else tile
        piece = piece_of(number, split, first_piece)
        mark_by_warps((trace_ptr, piece), "starts", 1)
        mark_by_warps((trace_ptr, piece), "multiplies", 1, (me + 1 + number % RANKS) % RANKS)
        block, end = (0, row, col, col + HALF_N, 0), first + count
        early, late = gl.maximum(end - 2 * STAGES, first), gl.maximum(end - STAGES, first)
        turn = _load_steps(operands, memory, bars, block, second, turn, first, early, W_IS_KN, PAIRS)
        answer = request_by_warp(ctx, 0)
        turn = _load_steps(operands, memory, bars, block, second, turn, early, late, W_IS_KN, PAIRS)
        item = item_of_warp(answer)
        after = second
        tile, row, second, col, span = _place_of(item, num_items, problem, me, last_wave, RANKS, PLACE, SPLIT_K, PAIRS)
        turn = _load_steps(operands, memory, bars, block, after, turn, late, end, W_IS_KN, PAIRS)
    end_items(memory, bars, turn)


# ---- send ----


@gluon.jit
def _send_half(descs, out, step, half, slot, side: gl.constexpr, is_pair, RANKS: gl.constexpr, PAIRS: gl.constexpr):
    """Start to send half of the columns of a tile to rank + 1 + ``step``, of a pair to that rank and the next one."""
    row, col = slot * BLOCK_M, side * HALF_N
    if PAIRS:
        for peer in gl.static_range(RANKS):
            if step == peer:
                store_part(descs[peer], out, 0, half, row, col)
                if is_pair == 0:
                    store_part(descs[peer], out, 1, half, row + HALF_M, col)
            if (is_pair != 0) & (step + 1 == peer):
                store_part(descs[peer], out, 1, half, row, col)
    else:
        for peer in gl.static_range(RANKS):
            if step == peer:
                store_half(descs[peer], out, half, row, col)


@gluon.jit
def send_partition(
    ctx, memory, bars, descs, per_source, half, signal, me, trace_ptr, RANKS: gl.constexpr, SPLIT_K: gl.constexpr,
    PAIRS: gl.constexpr = False,
):
    """Send each tile to its owner, wait until it has arrived, and set its signal there.

    Work item number ``item`` belongs to rank + 1 + ``item % RANKS``. Its slot and its signal there have the number
    ``rank * per_source + item // RANKS``.

    descs: the data of rank + 1, rank + 2, ..., rank, [halves, rows, BLOCK_N]
    """
    _, _, out, _, sent, _ = memory
    mbarrier.wait(bars.index(OUT_FULL), 0)
    code = read_item(sent.index(0), ONE_WARP)
    while code != NO_ITEM:
        item, is_pair = code, 0
        if PAIRS:
            item, is_pair = code // 2, code % 2
        slot = me * per_source + item // RANKS
        step = item % RANKS
        if step == RANKS - 1:
            mark_by_warps((trace_ptr, item), "stores", 1)
        else:
            mark_by_warps((trace_ptr, item), "pushes", 1, (me + 1 + step) % RANKS)
        for side in gl.static_range(2):
            if side > 0:
                mbarrier.wait(bars.index(OUT_FULL), side)
            _send_half(descs, out, step, half, slot, side, is_pair, RANKS, PAIRS)
            tma.store_wait(0)  # the half has been read
            mbarrier.arrive(bars.index(OUT_FREE), count=1)
        await_tma_stores()
        # waiter: the partition of the owner that adds the partials of this tile
        notify_from_warp(ctx, signal_at(ctx, half, slot), (me + 1 + step) % RANKS, signal, CHECK_FAILED=SPLIT_K)
        if PAIRS:
            if (is_pair != 0) & (step + 1 < RANKS):
                # waiter: the same on the next rank
                notify_from_warp(
                    ctx, signal_at(ctx, half, slot), (me + 2 + step) % RANKS, signal, CHECK_FAILED=SPLIT_K
                )
        mark_by_warps((trace_ptr, item), "ends", 1)
        mbarrier.wait(bars.index(OUT_FULL), 0)
        code = read_item(sent.index(0), ONE_WARP)
