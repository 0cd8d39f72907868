"""The partitions of ``ag_gemm_specialized_kernel`` that load and store tiles, and the epilogue of those that multiply.

Work item number ``item`` is passed on as ``2 * item + is_half``. Arguments of several functions:

    order    (rank, ranks, tile rows of a shard, tile columns, group_m, chunk_tiles, num_whole): from tile ``num_whole``
             on, each half of a tile is a work item
    weights  (first tile column of the second weight, of the third one, columns of each of the three)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tdkernels.lang.context import data_at, signal_at
from tdkernels.lang.gluon_signals import item_of_warp, request_by_warp
from tdkernels.lang.memory import pointer_to
from tdkernels.lang.signals import wait_plan
from tdkernels.ops.common.specialized.layout import (
    BLOCK_M,
    BLOCK_N,
    HALF_COLUMNS,
    HALF_M,
    HALF_N,
    NO_ITEM,
    ONE_WARP,
    OUT_FREE,
    OUT_FULL,
    read_item,
)
from tdkernels.ops.common.specialized.load import end_items, load_steps
from tdkernels.ops.common.specialized.scale import load_scales, times_scales
from tdkernels.ops.common.specialized.store import store_half
from tdkernels.ops.dense.ag_gemm.kernel import selected, tile_by_arrival


@gluon.jit
def _place_of(item, order, weights):
    """Return (shard, tile row, weight, its columns, first column in its output, whether it is whole) of a work item."""
    me, ranks, tiles_m, tiles_n, group_m, chunk_tiles, num_whole = order
    second, third, n, n_2, n_3 = weights
    is_whole = item < num_whole
    halves = item + gl.minimum(item, num_whole)  # before this item
    source, pid_m, pid_n = tile_by_arrival(halves // 2, me, ranks, tiles_m, tiles_n, group_m, chunk_tiles)
    which = (pid_n >= second).to(gl.int32) + (pid_n >= third).to(gl.int32)
    pid_n -= gl.where(which == 2, third, gl.where(which == 1, second, 0))
    col = pid_n * BLOCK_N + halves % 2 * HALF_N
    n = gl.where(which == 2, n_3, gl.where(which == 1, n_2, n))
    # The second half of a tile at the edge may have no columns of the output.
    return source, pid_m, which, n, col, is_whole & (col + HALF_N < n)


@gluon.jit
def _of_weight(which, choices):
    """Return the descriptor or pointer of weight number ``which``."""
    found = choices[0]
    for other in gl.static_range(1, 3):
        if choices[other] is not None:
            found = selected(choices[other], found, which == other)
    return found


# ---- load ----


@gluon.jit
def _await_slice(ctx, first_ptr, slice_id, signal, source, is_own):
    """Wait until a slice of K of the rows of a tile has arrived. This rank's own rows are there."""
    if is_own == 0:
        wait_plan(ctx, first_ptr + slice_id, signal, source, FOR_TMA=True)  # producer: push_partition of the source


@gluon.jit
def _next_item(ctx, answer, num_items, order, weights):
    """Return the work item that was requested, or the next one if it has no columns of the output."""
    item = item_of_warp(answer)
    is_empty = item < num_items
    while is_empty:
        place = _place_of(item, order, weights)
        is_empty = place[4] >= place[3]  # the column, and the columns of the output
        if is_empty:
            item = item_of_warp(request_by_warp(ctx, 0))
            is_empty = item < num_items
    return item


@gluon.jit
def load_partition(
    ctx, operands, memory, bars, num_items, order, weights, half, signal, slot_rows, num_chunks, steps, slice_steps,
    W_IS_KN: gl.constexpr,
):
    """Fetch work items, and load their operands as the rows arrive, one slice of K after the other.

    operands: descriptors of this rank's rows, of the gathered rows, and a tuple of those of the weights
    slice_steps: steps of K with one signal

    The next item is requested before the last slice. Its number arrives meanwhile.
    """
    x_desc, gathered_desc, w_descs = operands
    me, chunk_tiles = order[0], order[5]
    last = (steps + slice_steps - 1) // slice_steps - 1  # number of the last slice
    turn = 0
    item = _next_item(ctx, request_by_warp(ctx, 0), num_items, order, weights)
    while item < num_items:
        source, pid_m, which, n, col, is_whole = _place_of(item, order, weights)
        is_own = source == me
        row = pid_m * BLOCK_M
        first_ptr = signal_at(ctx, half, (source * num_chunks + pid_m // chunk_tiles) * (last + 1))
        descs = selected(x_desc, gathered_desc, is_own), _of_weight(which, w_descs)
        plane, row = gl.where(is_own, 0, half), gl.where(is_own, row, source * slot_rows + row)
        place = plane, row, col, col + HALF_N, 0
        code = 2 * item + gl.where(is_whole, 0, 1)
        for slice_id in range(last):
            _await_slice(ctx, first_ptr, slice_id, signal, source, is_own)
            first = slice_id * slice_steps
            turn = load_steps(
                descs, memory, bars, code, place, is_whole, turn, first, first + slice_steps, HALF_COLUMNS, W_IS_KN
            )
        answer = request_by_warp(ctx, 0)
        _await_slice(ctx, first_ptr, last, signal, source, is_own)
        first = last * slice_steps
        turn = load_steps(descs, memory, bars, code, place, is_whole, turn, first, steps, HALF_COLUMNS, W_IS_KN)
        item = _next_item(ctx, answer, num_items, order, weights)
    end_items(memory, bars, turn)


# ---- multiply ----


@gluon.jit
def add_bias(half, code, WHICH: gl.constexpr, side: gl.constexpr, epilogue):
    """Add the bias to half a tile. ``epilogue``: (order, weights, pointers to the biases, …)."""
    order, weights, bias_ptrs = epilogue[0], epilogue[1], epilogue[2]
    source, pid_m, which, n, col, is_whole = _place_of(code // 2, order, weights)
    layout: gl.constexpr = gl.SliceLayout(0, half.type.layout)
    offs_n = col + side * HALF_N + gl.arange(0, HALF_N, layout=layout)
    bias = gl.load(_of_weight(which, bias_ptrs) + offs_n, mask=offs_n < n, other=0.0)
    return half + bias.to(gl.float32)[None, :]


@gluon.jit
def scales_of_tile(code, WHICH: gl.constexpr, epilogue):
    """Load the scales of the rows and columns of a tile, whose first slice has arrived.

    epilogue: (order, weights, pointers to the biases, of_x, scales of the weight, X_STEP, W_STEP)
    of_x: (ctx, half, scales of this rank's rows, rows of a shard, bytes of a slot, offset of the scales in it)
    """
    order, weights = epilogue[0], epilogue[1]
    ctx, half, own_ptr, rows, slot_bytes, offset = epilogue[3]
    source, pid_m, which, n, col, is_whole = _place_of(code // 2, order, weights)
    row = pid_m * BLOCK_M + WHICH * HALF_M
    arrived = data_at(ctx, half, order[0]) + source * slot_bytes + offset
    address = gl.where(source == order[0], own_ptr.to(gl.int64), arrived)
    x_ptr = pointer_to(address, gl.float32) + row * epilogue[5]
    w_ptr = epilogue[4] + col * epilogue[6]
    return load_scales(x_ptr, rows - row, w_ptr, n - col, epilogue[5], epilogue[6])


@gluon.jit
def scale_tile(half, code, WHICH: gl.constexpr, side: gl.constexpr, prepared):
    """Multiply half a tile by its scales, and add the bias, if there is one."""
    epilogue, scales = prepared
    half = times_scales(half, scales, side)
    if epilogue[2][0] is not None:
        half = add_bias(half, code, WHICH, side, epilogue)
    return half


# ---- store ----


@gluon.jit
def store_partition(memory, bars, y_descs, order, weights, segment_rows):
    """Store tiles in the outputs.

    y_descs: outputs as [W * M_shard / segment_rows, segment_rows, N], for [1, HALF_M, HALF_N] elements
    """
    out, sent, ranks = memory[2], memory[4], order[1]
    number = 0  # halves of tiles so far
    mbarrier.wait(bars.index(OUT_FULL), 0)
    code = read_item(sent.index(0), ONE_WARP)
    while code != NO_ITEM:
        source, pid_m, which, n, col, is_whole = _place_of(code // 2, order, weights)
        desc = _of_weight(which, y_descs)
        row = pid_m * BLOCK_M
        plane, row = row // segment_rows * ranks + source, row % segment_rows
        for side in range(2 - code % 2):
            if side > 0:
                mbarrier.wait(bars.index(OUT_FULL), number & 1)
            store_half(desc, out, plane, row, col + side * HALF_N)
            tma.store_wait(0)  # the half has been read
            mbarrier.arrive(bars.index(OUT_FREE), count=1)
            number += 1
        mbarrier.wait(bars.index(OUT_FULL), number & 1)
        code = read_item(sent.index(0), ONE_WARP)
