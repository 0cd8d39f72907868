"""The partitions that load and store tiles, of both warp-specialized kernels of tp_moe.

An entry of the table of ``kernel_route`` is one tile row. A tile has the number ``index in the table * tile columns +
tile column``. It is passed on as ``2 * number``, or as ``2 * number + 1`` if it has at most HALF_M rows. Arguments of
several functions:

    tiles    (pointer to the table, pointer to the begins of the stages, tile columns, group_m)
    slices   of moe_gemm_rs, see ``specialized.slices``
    problem  (N of a plane, K)

In a trace, the number of a tile is that of its piece.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tdkernels.lang.gluon_profile import mark_by_warps
from tdkernels.lang.gluon_signals import add_release_by_warps, item_of_warp, request_by_warp
from tdkernels.lang.memory import await_tma_stores
from tdkernels.ops.common.gemm_tile import swizzle
from tdkernels.ops.common.specialized.layout import (
    HALF_M,
    HALF_ROWS,
    NO_ITEM,
    ONE_WARP,
    OUT_FULL,
    STAGES,
    read_item,
)
from tdkernels.ops.common.specialized.load import begin_item, end_items, load_steps
from tdkernels.ops.experts.grouped_gemm.specialized.partitions import block_of_tile, store_tile
from tdkernels.ops.experts.tp_moe.kernel_route import MAX_STAGES, TILE_WORDS
from tdkernels.ops.experts.tp_moe.specialized.slices import columns_of_slice, first_column, slice_of_column

_LAST = gl.constexpr(0x7FFFFFFF)


@gluon.jit
def place_by_stage(item, ends, tiles):
    """Return (stage, index in the table, tile column) of a work item, stage by stage. ends: see ``ends_of_stages``."""
    is_before = ends <= item
    first = gl.max(gl.where(is_before, ends, 0), 0)
    end = gl.min(gl.where(is_before, _LAST, ends), 0)
    _, _, tiles_n, group_m = tiles
    rows = gl.maximum(end - first, tiles_n) // tiles_n
    pid_m, pid_n = swizzle(item - first, rows, tiles_n, group_m)
    return gl.sum(is_before.to(gl.int32), 0), first // tiles_n + pid_m, pid_n


@gluon.jit
def place_by_slice(item, slices, tiles):
    """Return (slice, index in the table, tile column) of a work item, slice by slice of the columns."""
    _, _, tiles_n, group_m = tiles
    rows = gl.maximum(slices[0], 1)  # without tiles the place is not used
    slice_id = slice_of_column(slices, item // rows)
    first, columns = first_column(slices, slice_id), columns_of_slice(slices, slice_id, tiles_n)
    pid_m, pid_n = swizzle(item - first * rows, rows, columns, group_m)
    return slice_id, pid_m, first + pid_n


@gluon.jit
def ends_of_stages(tiles, LAYOUT: gl.constexpr):
    """Return the number of work items up to the end of each stage, int32 [32], in a layout.

    The last stages may be empty. Values from MAX_STAGES - 1 on are equal.
    """
    _, begins_ptr, tiles_n, _ = tiles
    stages = gl.arange(0, 32, layout=LAYOUT)
    return gl.load(begins_ptr + 1 + gl.minimum(stages, MAX_STAGES - 1)) * tiles_n


@gluon.jit
def place_of(item, num_items, order, tiles, PLACE: gl.constexpr):
    """Return (stage, number, tile column, expert, first row, number of rows) of the tile of a work item.

    ``item`` may be past the last one. Its place is not used.
    """
    table_ptr, _, tiles_n, _ = tiles
    stage, tile, pid_n = PLACE(gl.minimum(item, gl.maximum(num_items - 1, 0)), order, tiles)
    entry, there = table_ptr + tile * TILE_WORDS, item < num_items
    expert, row = gl.load(entry, mask=there, other=0), gl.load(entry + 1, mask=there, other=0)
    return stage, tile * tiles_n + pid_n, pid_n, expert, row, gl.load(entry + 2, mask=there, other=0)


@gluon.jit
def load_partition(
    ctx, operands, memory, bars, tiles, problem, num_items, slices, steps, trace_ptr, W_IS_KN: gl.constexpr,
):
    """Fetch tiles of moe_gemm_rs, and load their operands.

    operands: descriptors of the rows [1, R, K] and of the weight, as for ``group_gemm_specialized_kernel``

    The next tile is requested 2 * STAGES steps before the end of the current one. Its place is computed STAGES steps
    before that end. Neither delays loads, because the tensor cores still have loaded steps to multiply.
    """
    early, late = gl.maximum(steps - 2 * STAGES, 0), gl.maximum(steps - STAGES, 0)
    turn = 0
    item = item_of_warp(request_by_warp(ctx, 0))
    _, number, pid_n, expert, row, count = place_of(item, num_items, slices, tiles, place_by_slice)
    while item < num_items:
        is_whole = count > HALF_M
        mark_by_warps((trace_ptr, number), "starts", 1)
        mark_by_warps((trace_ptr, number), "multiplies", 1)
        begin_item(memory, bars, 2 * number + gl.where(is_whole, 0, 1), (row, pid_n, expert), turn)
        block = block_of_tile(row, expert, pid_n, problem[0], problem[1], False, W_IS_KN)
        turn = load_steps(operands, memory, bars, block, is_whole, turn, 0, early, HALF_ROWS, W_IS_KN)
        answer = request_by_warp(ctx, 0)
        turn = load_steps(operands, memory, bars, block, is_whole, turn, early, late, HALF_ROWS, W_IS_KN)
        item = item_of_warp(answer)
        _, number, pid_n, expert, row, count = place_of(item, num_items, slices, tiles, place_by_slice)
        turn = load_steps(operands, memory, bars, block, is_whole, turn, late, steps, HALF_ROWS, W_IS_KN)
    end_items(memory, bars, turn)


@gluon.jit
def store_partition(
    memory, bars, y, pre, tiles, N, done_ptr, slices, trace_ptr, PAIR: gl.constexpr, KEEP: gl.constexpr,
    COUNTS: gl.constexpr,
):
    """Store tiles in y, and with KEEP the input of SwiGLU in pre, see ``grouped_gemm.specialized.partitions``.

    COUNTS: count the stored tiles of each slice in ``done_ptr``
    """
    sent = memory[4]
    table_ptr, _, tiles_n, _ = tiles
    halves = 0  # of tiles so far
    mbarrier.wait(bars.index(OUT_FULL), 0)
    item = read_item(sent.index(0), ONE_WARP)
    while item != NO_ITEM:
        number = item // 2
        pid_n = number % tiles_n
        entry = table_ptr + number // tiles_n * TILE_WORDS
        row = gl.load(entry + 1)
        end = row + gl.load(entry + 2)
        mark_by_warps((trace_ptr, number), "stores", 1)
        halves = store_tile(memory, bars, y, pre, row, end, pid_n, N, halves, PAIR, KEEP)
        if COUNTS:
            await_tma_stores()
            add_release_by_warps(done_ptr + slice_of_column(slices, pid_n), 1)  # waiter: add_partition of this rank
        mark_by_warps((trace_ptr, number), "ends", 1)
        mbarrier.wait(bars.index(OUT_FULL), halves & 1)
        item = read_item(sent.index(0), ONE_WARP)
