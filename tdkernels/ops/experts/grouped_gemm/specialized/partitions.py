"""The partitions of ``group_gemm_specialized_kernel`` that load and store tiles, and the epilogue with SwiGLU.

Tile number ``tile`` is passed on as ``2 * tile``, or as ``2 * tile + 1`` if its last HALF_M rows do not belong to its
group. Arguments of several functions:

    splits   (pointer to the splits, number of experts, rows of x)
    problem  (N of a plane, K, tile columns, group_m)
    PAIR     whether an expert has two planes, gate and up: half of the columns of a tile are of each
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tdkernels.lang.gluon_memory import reinterpret
from tdkernels.lang.gluon_signals import item_of_warp, partition_barrier, request_number, reset_after
from tdkernels.ops.common.gemm_tile import swizzle
from tdkernels.ops.common.specialized.layout import (
    BLOCK_M,
    BLOCK_N,
    HALF_M,
    HALF_N,
    HALF_ROWS,
    NO_ITEM,
    ONE_WARP,
    OUT_FREE,
    OUT_FULL,
    STAGES,
    read_item,
)
from tdkernels.ops.common.specialized.load import begin_item, end_items, load_steps
from tdkernels.ops.common.specialized.output import pass_on
from tdkernels.ops.common.specialized.store import store_half
from tdkernels.ops.experts.grouped_gemm.swiglu import swiglu

# Rows and columns that a warp stores at a time. The swizzle of shared memory repeats after them.
_ROWS, _COLUMNS = gl.constexpr(8), gl.constexpr(64)
_NO_ROW = gl.constexpr(0x7FFFFFFF)

# ---- tiles ----


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def rows_of_groups(splits, EXPERTS: gl.constexpr):
    """Return (number of rows, sum up to this group) of all groups, int64 [EXPERTS], in a partition of one warp.

    The rows are those of ``tile.rows_of_groups``, whose tensors have no layout.
    """
    splits_ptr, num_experts, R = splits
    experts = gl.arange(0, EXPERTS, layout=ONE_WARP)
    given = gl.load(splits_ptr + experts, mask=experts < num_experts, other=0).to(gl.int64)
    rows = gl.minimum(gl.maximum(given, 0), R)
    return rows, gl.associative_scan(rows, 0, _sum)


@gluon.jit
def _groups_of(splits, tiles_n, EXPERTS: gl.constexpr):
    """Return (ends of the rows, ends of the tiles) of all groups, int32 [EXPERTS], in a partition of one warp."""
    R = splits[2]
    rows, ends = rows_of_groups(splits, EXPERTS)
    begins = gl.minimum(ends - rows, R).to(gl.int32)
    ends = gl.minimum(ends, R).to(gl.int32)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M * tiles_n
    return ends, gl.associative_scan(tiles, 0, _sum)


@gluon.jit
def _place_of(tile, groups, problem):
    """Return (expert, first row of the tile, end of the rows of its group, tile column)."""
    ends, tile_ends = groups
    _, _, tiles_n, group_m = problem
    is_before = tile_ends <= tile  # groups without rows count, too
    expert = gl.sum(is_before.to(gl.int32), 0)
    first = gl.max(gl.where(is_before, tile_ends, 0), 0)
    begin = gl.max(gl.where(is_before, ends, 0), 0)
    end = gl.min(gl.where(is_before, _NO_ROW, ends), 0)
    pid_m, pid_n = swizzle(tile - first, (end - begin + BLOCK_M - 1) // BLOCK_M, tiles_n, group_m)
    return expert, begin + pid_m * BLOCK_M, end, pid_n


# ---- load ----


@gluon.jit
def block_of_tile(row, expert, pid_n, N, K, PAIR: gl.constexpr, W_IS_KN: gl.constexpr):
    """Return ``block`` of ``load_steps`` for a tile of an expert."""
    if PAIR:
        col = 2 * expert * N + pid_n * HALF_N
        block = 0, row, col, col + N, 0
    elif W_IS_KN:
        col = pid_n * BLOCK_N
        block = 0, row, col, col + HALF_N, expert * K
    else:
        col = expert * N + pid_n * BLOCK_N
        block = 0, row, col, col + HALF_N, 0
    return block


@gluon.jit
def load_partition(
    operands, memory, bars, splits, counter_ptr, problem, steps, EXPERTS: gl.constexpr, PAIR: gl.constexpr,
    W_IS_KN: gl.constexpr,
):
    """Fetch tiles, and load their operands.

    operands: descriptors of x [1, R, K] and of the weight [planes * N, K], or [experts * K, N] if W_IS_KN
    counter_ptr: number of tiles that have been fetched, zero before and after the launch

    The next tile is requested STAGES steps before the end of the current one. Its number arrives meanwhile.
    """
    N, K, tiles_n, _ = problem
    groups = _groups_of(splits, tiles_n, EXPERTS)
    num_tiles = gl.max(groups[1], 0)
    middle = gl.maximum(steps - STAGES, 0)
    turn = 0
    tile = item_of_warp(request_number(counter_ptr))
    while tile < num_tiles:
        expert, row, end, pid_n = _place_of(tile, groups, problem)
        is_whole = row + HALF_M < end
        item = 2 * tile + gl.where(is_whole, 0, 1)
        block = block_of_tile(row, expert, pid_n, N, K, PAIR, W_IS_KN)
        begin_item(memory, bars, item, (row, pid_n, expert), turn)
        turn = load_steps(operands, memory, bars, block, is_whole, turn, 0, middle, HALF_ROWS, W_IS_KN)
        answer = request_number(counter_ptr)
        turn = load_steps(operands, memory, bars, block, is_whole, turn, middle, steps, HALF_ROWS, W_IS_KN)
        tile = item_of_warp(answer)
    reset_after(counter_ptr, tile, num_tiles)
    end_items(memory, bars, turn)


# ---- multiply ----


@gluon.jit
def pass_swiglu(memory, bars, halves, item, place, number, epilogue, WHICH: gl.constexpr, EPILOGUE: gl.constexpr):
    """Return (number of halves so far, SwiGLU of a tile whose halves are gate and up)."""
    gate, up = EPILOGUE(halves[0], place, WHICH, 0, epilogue), EPILOGUE(halves[1], place, WHICH, 1, epilogue)
    return number, swiglu(gate, up).to(memory[2].dtype)


@gluon.jit
def pass_swiglu_and_input(
    memory, bars, halves, item, place, number, epilogue, WHICH: gl.constexpr, EPILOGUE: gl.constexpr
):
    """Pass on gate and up. Return (number of halves so far, their SwiGLU)."""
    dtype: gl.constexpr = memory[2].dtype
    gate, up = EPILOGUE(halves[0], place, WHICH, 0, epilogue), EPILOGUE(halves[1], place, WHICH, 1, epilogue)
    number = pass_on(memory, bars, gate.to(dtype), item, number, WHICH)
    number = pass_on(memory, bars, up.to(dtype), item, number, WHICH)
    return number, swiglu(gate, up).to(dtype)


# ---- store ----


@gluon.jit
def _store_rows(out, ptr, row, col, end, width, N):
    """Store HALF_M rows of half a tile in [R, width] at (row, col), as far as they are before ``end`` and N.

    This is a loop, because one warp took up to 15 us for straight-line code (H200), probably to fetch its instructions.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    parts: gl.constexpr = HALF_N // _COLUMNS
    # In shared memory, all rows of the first _COLUMNS columns come before those of the next ones.
    blocks = reinterpret(out, out.dtype, [parts * (HALF_M // _ROWS), _ROWS, _COLUMNS], out.layout)
    rows = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, layout))
    at = ptr + (row + rows)[:, None].to(gl.int64) * width + (col + columns)[None, :]
    for number in range((gl.minimum(end - row, HALF_M) + _ROWS - 1) // _ROWS):
        inside = (rows < end - row - number * _ROWS)[:, None]
        for part in gl.static_range(parts):
            values = blocks.index(part * (HALF_M // _ROWS) + number).load(layout)
            mask = inside & (part * _COLUMNS + columns < N - col)[None, :]
            gl.store(at + part * _COLUMNS, values, mask=mask)
        at += _ROWS * width


@gluon.jit
def _store(out, target, width, row, col, end, N):
    """Store half a tile, and return when it has been read.

    TMA has no mask, so it stores only halves without rows past ``end`` and columns past N.

    target: (pointer, descriptor) of the output [R, width]
    """
    ptr, desc = target
    if (row + BLOCK_M <= end) & (col + HALF_N <= N):
        store_half(desc, out, 0, row, col)
        tma.store_wait(0)
    else:
        for part in gl.static_range(2):
            _store_rows(out.index(part), ptr, row + part * HALF_M, col, end, width, N)
        partition_barrier()


@gluon.jit
def store_tile(memory, bars, y, pre, row, end, pid_n, N, number, PAIR: gl.constexpr, KEEP: gl.constexpr):
    """Store the rows of a tile before ``end``. The first half has arrived. Return the number of halves so far.

    y, pre: as for ``store_partition``
    """
    out = memory[2]
    for side in gl.static_range(3 if KEEP else (1 if PAIR else 2)):
        if side > 0:
            mbarrier.wait(bars.index(OUT_FULL), number & 1)
        if PAIR:
            col = pid_n * HALF_N
            if KEEP and side < 2:
                _store(out, pre, 2 * N, row, side * N + col, end, (side + 1) * N)
            else:
                _store(out, y, N, row, col, end, N)
        else:
            _store(out, y, N, row, pid_n * BLOCK_N + side * HALF_N, end, N)
        mbarrier.arrive(bars.index(OUT_FREE), count=1)
        number += 1
    return number


@gluon.jit
def store_partition(
    memory, bars, y, pre, splits, problem, EXPERTS: gl.constexpr, PAIR: gl.constexpr, KEEP: gl.constexpr
):
    """Store tiles in y, and with KEEP the input of SwiGLU in pre.

    y, pre: (pointer, descriptor for [1, HALF_M, HALF_N] elements) of [R, N] and [R, 2 * N]
    """
    sent = memory[4]
    N, _, tiles_n, _ = problem
    groups = _groups_of(splits, tiles_n, EXPERTS)
    number = 0  # halves of tiles so far
    mbarrier.wait(bars.index(OUT_FULL), 0)
    item = read_item(sent.index(0), ONE_WARP)
    while item != NO_ITEM:
        _, row, end, pid_n = _place_of(item // 2, groups, problem)
        number = store_tile(memory, bars, y, pre, row, end, pid_n, N, number, PAIR, KEEP)
        mbarrier.wait(bars.index(OUT_FULL), number & 1)
        item = read_item(sent.index(0), ONE_WARP)
