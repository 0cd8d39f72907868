"""The partitions of ``ag_gemm_specialized_kernel`` that load and store tiles.

Work item number ``item`` is passed on as ``2 * item + is_half``. Arguments of several functions:

    order    (rank, ranks, tile rows of a shard, tile columns, group_m, chunk_tiles, num_whole): from tile ``num_whole``
             on, each half of a tile is a work item
    weights  (first tile column of the second weight, of the third one, columns of each of the three)
    across   (ranks, rows of a shard, of a chunk, chunks of a shard)

If ACROSS, a tile has BLOCK_M rows of all shards, one after the other. Then ``order`` has the first tile row with rows
of this rank instead of the rank, the number of tile rows instead of the number of ranks, and one tile row for each
"shard".
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tdkernels.lang.context import signal_at
from tdkernels.lang.gluon_profile import mark_by_warps
from tdkernels.lang.gluon_signals import count_ready_by_warp, item_of_warp, request_by_warp
from tdkernels.lang.signals import wait_plan
from tdkernels.ops.common.specialized.layout import (
    BLOCK_M,
    BLOCK_N,
    HALF_COLUMNS,
    HALF_N,
    NO_ITEM,
    ONE_WARP,
    OUT_FREE,
    OUT_FULL,
    STAGES,
    read_item,
)
from tdkernels.ops.common.specialized.load import begin_item, end_items, load_steps
from tdkernels.ops.common.specialized.store import store_half
from tdkernels.ops.dense.ag_gemm.kernel import selected, tile_by_arrival


@gluon.jit
def columns_of(which, weights):
    """Return the number of columns of the output of weight number ``which``."""
    _, _, n, n_2, n_3 = weights
    return gl.where(which == 2, n_3, gl.where(which == 1, n_2, n))


@gluon.jit
def _place_of(item, order, weights):
    """Return (shard, tile row, weight, its columns, first column in its output, whether it is whole) of a work item."""
    me, ranks, tiles_m, tiles_n, group_m, chunk_tiles, num_whole = order
    second, third = weights[0], weights[1]
    is_whole = item < num_whole
    halves = item + gl.minimum(item, num_whole)  # before this item
    source, pid_m, pid_n = tile_by_arrival(halves // 2, me, ranks, tiles_m, tiles_n, group_m, chunk_tiles)
    which = (pid_n >= second).to(gl.int32) + (pid_n >= third).to(gl.int32)
    pid_n -= gl.where(which == 2, third, gl.where(which == 1, second, 0))
    col = pid_n * BLOCK_N + halves % 2 * HALF_N
    n = columns_of(which, weights)
    # The second half of a tile at the edge may have no columns of the output.
    return source, pid_m, which, n, col, is_whole & (col + HALF_N < n)


@gluon.jit
def of_weight(which, choices):
    """Return the descriptor or pointer of weight number ``which``."""
    found = choices[0]
    for other in gl.static_range(1, 3):
        if choices[other] is not None:
            found = selected(choices[other], found, which == other)
    return found


# ---- load ----


@gluon.jit
def _await_slice(ctx, first_ptr, slice_id, signal, source, ready, slices, across, ACROSS: gl.constexpr):
    """Wait until a slice of K of the rows of a tile has arrived. The first ``ready`` ones are there."""
    if slice_id >= ready:
        if not ACROSS:
            wait_plan(ctx, first_ptr + slice_id, signal, source, FOR_TMA=True)  # producer: push_partition of the source
        else:
            first, last = _chunks_of(source, across)
            for chunk in range(first, last + 1):  # producer: push_partition of each of these shards
                word_ptr = first_ptr + (chunk - first) * slices + slice_id
                wait_plan(ctx, word_ptr, signal, chunk // across[3], FOR_TMA=True)


@gluon.jit
def _chunk_of_row(row, across):
    """Return the chunk of a row of all shards, counted from the first one of shard 0."""
    _, rows, chunk_rows, num_chunks = across
    return row // rows * num_chunks + row % rows // chunk_rows


@gluon.jit
def _chunks_of(tile_row, across):
    """Return the first and the last chunk that has rows of a tile."""
    row = tile_row * BLOCK_M
    last = gl.minimum(row + BLOCK_M, across[0] * across[1]) - 1
    return _chunk_of_row(row, across), _chunk_of_row(last, across)


@gluon.jit
def _next_item(ctx, answer, num_items, order, weights):
    """Return (work item, its place). It is the item that was requested, or the next one that has columns."""
    item = item_of_warp(answer)
    # A number beyond the items would divide by 0. Its place is not used.
    source, pid_m, which, n, col, is_whole = _place_of(gl.minimum(item, num_items - 1), order, weights)
    while (item < num_items) & (col >= n):
        item = item_of_warp(request_by_warp(ctx, 0))
        source, pid_m, which, n, col, is_whole = _place_of(gl.minimum(item, num_items - 1), order, weights)
    return item, (source, pid_m, which, n, col, is_whole)


@gluon.jit
def _next_rows(ctx, answer, num_items, order, weights, half, signal, num_chunks, slices, across, ACROSS: gl.constexpr):
    """Return (work item, its place, pointer to the signals of its rows, number of first slices that have arrived).

    All slices of this rank's own rows are there, unless tiles have rows of several shards.
    """
    item, place = _next_item(ctx, answer, num_items, order, weights)
    if not ACROSS:
        source, is_own = place[0], place[0] == order[0]
        first_ptr = signal_at(ctx, half, (source * num_chunks + place[1] // order[5]) * slices)
        count = gl.where((item < num_items) & (is_own == 0), slices, 0)
        ready = count_ready_by_warp(first_ptr, count, signal)  # producer: as in _await_slice
        ready = gl.where(is_own, slices, ready)
    else:
        first, last = _chunks_of(place[0], across)
        first_ptr = signal_at(ctx, half, first * slices)
        ready = gl.where(item < num_items, slices, 0)
        for chunk in range(first, last + 1):
            ready = count_ready_by_warp(first_ptr + (chunk - first) * slices, ready, signal)
    return item, place, first_ptr, ready


@gluon.jit
def load_partition(
    ctx, operands, memory, bars, num_items, order, weights, half, signal, slot_rows, num_chunks, steps, slice_steps,
    trace_ptr, across, W_IS_KN: gl.constexpr, ACROSS: gl.constexpr,
):
    """Fetch work items, and load their operands as the rows arrive, one slice of K after the other.

    operands: descriptors of this rank's rows, of the gathered rows, and a tuple of those of the weights
    slice_steps: steps of K with one signal

    The next item is requested before the last slice. STAGES steps before the end its place is computed, and its signals
    are read. Neither delays loads, because the tensor cores still have loaded steps to multiply.
    """
    x_desc, gathered_desc, w_descs = operands
    slices = (steps + slice_steps - 1) // slice_steps
    end = (slices - 1) * slice_steps  # where the last slice begins
    late = gl.maximum(steps - STAGES, end)
    turn = 0
    item, place, first_ptr, ready = _next_rows(
        ctx, request_by_warp(ctx, 0), num_items, order, weights, half, signal, num_chunks, slices, across, ACROSS
    )
    source, pid_m, which, n, col, is_whole = place
    while item < num_items:
        row, is_own = pid_m * BLOCK_M, source == order[0]
        trace = trace_ptr, item
        mark_by_warps(trace, "starts", 1)
        if trace_ptr is not None:
            peer = _chunks_of(source, across)[0] // across[3] if ACROSS else source
            if ready == 0:  # later slices are awaited while the tile is multiplied
                mark_by_warps(trace, "waits", 1, peer)
                _await_slice(ctx, first_ptr, 0, signal, source, ready, slices, across, ACROSS)
            mark_by_warps(trace, "multiplies", 1, peer)
        if not ACROSS:
            tile = row, col, 4 * source + which
            descs = selected(x_desc, gathered_desc, is_own), of_weight(which, w_descs)
            plane, row = gl.where(is_own, 0, half), gl.where(is_own, row, source * slot_rows + row)
        else:
            plane, row = half, source * BLOCK_M
            tile = row, col, which
            descs = gathered_desc, of_weight(which, w_descs)
        begin_item(memory, bars, 2 * item + gl.where(is_whole, 0, 1), tile, turn)
        block = plane, row, col, col + HALF_N, 0
        for slice_id in range(slices - 1):
            _await_slice(ctx, first_ptr, slice_id, signal, source, ready, slices, across, ACROSS)
            first = slice_id * slice_steps
            turn = load_steps(
                descs, memory, bars, block, is_whole, turn, first, first + slice_steps, HALF_COLUMNS, W_IS_KN
            )
        answer = request_by_warp(ctx, 0)
        _await_slice(ctx, first_ptr, slices - 1, signal, source, ready, slices, across, ACROSS)
        turn = load_steps(descs, memory, bars, block, is_whole, turn, end, late, HALF_COLUMNS, W_IS_KN)
        item, place, first_ptr, ready = _next_rows(
            ctx, answer, num_items, order, weights, half, signal, num_chunks, slices, across, ACROSS
        )
        turn = load_steps(descs, memory, bars, block, is_whole, turn, late, steps, HALF_COLUMNS, W_IS_KN)
        source, pid_m, which, n, col, is_whole = place
    end_items(memory, bars, turn)


# ---- store ----


@gluon.jit
def store_partition(memory, bars, y_descs, order, weights, segment_rows, trace_ptr, ACROSS: gl.constexpr):
    """Store tiles in the outputs.

    y_descs: outputs as [W * M_shard / segment_rows, segment_rows, N], for [1, HALF_M, HALF_N] elements; if ACROSS as
        [1, W * M_shard, N]
    """
    out, sent, ranks = memory[2], memory[4], order[1]
    number = 0  # halves of tiles so far
    mbarrier.wait(bars.index(OUT_FULL), 0)
    code = read_item(sent.index(0), ONE_WARP)
    while code != NO_ITEM:
        source, pid_m, which, n, col, is_whole = _place_of(code // 2, order, weights)
        desc = of_weight(which, y_descs)
        mark_by_warps((trace_ptr, code // 2), "stores", 1)
        if ACROSS:
            plane, row = 0, source * BLOCK_M
        else:
            row = pid_m * BLOCK_M
            plane, row = row // segment_rows * ranks + source, row % segment_rows
        for side in range(2 - code % 2):
            if side > 0:
                mbarrier.wait(bars.index(OUT_FULL), number & 1)
            store_half(desc, out, plane, row, col + side * HALF_N)
            tma.store_wait(0)  # the half has been read
            mbarrier.arrive(bars.index(OUT_FREE), count=1)
            number += 1
        mark_by_warps((trace_ptr, code // 2), "ends", 1)
        mbarrier.wait(bars.index(OUT_FULL), number & 1)
        code = read_item(sent.index(0), ONE_WARP)
