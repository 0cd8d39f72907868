"""The partitions of ``group_gemm_weights_specialized_kernel``.

A step has STEP rows of a group. The last step may also have rows of the next group, or rows of no group, which may be
NaN. The warp that loads sets them to zero in shared memory, in both operands, before it passes on the step. Meanwhile
the tensor cores have the steps before, and the next step is loaded. A group without rows has one step of zeros.

If a group has several steps, only 16, 32 or all rows of the last one are multiplied, as few as possible. The rows after
these are not set to zero.

Arguments of several functions:

    splits   (pointer to the splits, number of experts, rows of dy and x)
    problem  (tile rows, tile columns, group_m)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tdkernels.lang.gluon_memory import reinterpret, tma_load
from tdkernels.lang.gluon_signals import item_of_warp, partition_barrier, request_number, reset_after
from tdkernels.ops.common.gemm_tile import swizzle
from tdkernels.ops.common.specialized.layout import (
    BLOCK_M,
    BLOCK_N,
    FULL,
    HALF_M,
    HALF_N,
    NO_HALVES,
    NO_ITEM,
    ONE_WARP,
    OUT_FREE,
    OUT_FULL,
    STAGES,
    STEP_BYTES,
    read_item,
)
from tdkernels.ops.common.specialized.load import await_stage, begin_item, end_items, load_weight
from tdkernels.ops.common.specialized.multiply import multiply_partition
from tdkernels.ops.common.specialized.output import no_epilogue, pass_halves
from tdkernels.ops.common.specialized.store import store_half
from tdkernels.ops.experts.grouped_gemm.specialized.partitions import rows_of_groups

STEP = HALF_M  # rows: as many as STEP_BYTES have elements
LAST = gl.constexpr(10)  # barrier, one per stage: a step with fewer than STEP rows of its group has arrived
_ROWS = gl.constexpr(8)  # that are set to zero at a time


@gluon.jit
def _place_of(tile, problem):
    """Return (expert, tile row, tile column)."""
    tiles_m, tiles_n, group_m = problem
    expert = tile // (tiles_m * tiles_n)
    pid_m, pid_n = swizzle(tile % (tiles_m * tiles_n), tiles_m, tiles_n, group_m)
    return expert, pid_m, pid_n


# ---- load ----


@gluon.jit
def _ends_of_groups(splits, EXPERTS: gl.constexpr):
    """Return the end of the rows of each group, int32 [EXPERTS], in a partition of one warp."""
    _, ends = rows_of_groups(splits, EXPERTS)
    return gl.minimum(ends, splits[2]).to(gl.int32)


@gluon.jit
def _group_of(expert, ends, EXPERTS: gl.constexpr):
    """Return (begin, end) of the rows of a group."""
    experts = gl.arange(0, EXPERTS, layout=ONE_WARP)
    begin = gl.max(gl.where(experts < expert, ends, 0), 0)
    return begin, gl.max(gl.where(experts <= expert, ends, 0), 0)


@gluon.jit
def _load_step(operands, memory, bars, turn, row, place, count):
    """Load the STEP rows from ``row`` on of both operands, of which ``count`` belong to the group."""
    dy_desc, x_desc = operands
    _, pid_m, pid_n = place
    stage = await_stage(bars, turn)
    arrived = bars.index(gl.where(count < STEP, LAST, FULL) + stage)
    mbarrier.expect(arrived, (BLOCK_M + BLOCK_N) * STEP_BYTES)
    for part in gl.static_range(2):
        block = reinterpret(memory[0].index(2 * stage + part), dy_desc.dtype, dy_desc.block_type.shape, dy_desc.layout)
        tma_load(dy_desc, [0, row, pid_m * BLOCK_M + part * HALF_M], arrived, block)
    col = pid_n * BLOCK_N
    load_weight(x_desc, row, col, arrived, memory, stage, 0, True, True)
    load_weight(x_desc, row, col + HALF_N, arrived, memory, stage, 1, True, True)


@gluon.jit
def _keep_rows(block, first: gl.constexpr, count):
    """Set the rows from ``count`` on to zero, among _ROWS rows of a block in shared memory from ``first`` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    part = block.slice(first, _ROWS, 0)
    COLUMNS: gl.constexpr = block.shape[1]
    zeros = gl.zeros((_ROWS, COLUMNS), block.dtype, layout)
    if first >= count:
        part.store(zeros)
    else:
        rows = first + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, layout))
        part.store(gl.where((rows < count)[:, None], part.load(layout), zeros))


@gluon.jit
def _multiplied_rows(steps, count):
    """Return how many rows of the last step of a group are multiplied. ``count`` of them belong to the group."""
    few = gl.where(count <= 16, 16, gl.where(count <= 32, 32, STEP))
    return gl.where(steps > 1, few, STEP)


@gluon.jit
def _finish_step(memory, bars, step, count, multiplied, phases):
    """If step number ``step`` has rows that are not of its group, set them to zero as far as they are multiplied.

    Then pass the step on.

    count: number of rows that belong to the group
    multiplied: number of rows that are multiplied

    Return ``phases``, whose bit for each stage is the phase of its barrier LAST.
    """
    if count < STEP:
        stage = step % STAGES
        mbarrier.wait(bars.index(LAST + stage), (phases >> stage) & 1)
        for first in gl.static_range(0, STEP, _ROWS):
            if (first + _ROWS > count) & (first < multiplied):
                for part in gl.static_range(2):
                    _keep_rows(memory[0].index(2 * stage + part).permute((1, 0)), first, count)
                _keep_rows(memory[1].index(stage), first, count)
        fence_async_shared()
        partition_barrier()
        mbarrier.arrive(bars.index(FULL + stage), count=1)
        phases ^= 1 << stage
    return phases


@gluon.jit
def load_weights_partition(operands, memory, bars, splits, counter_ptr, problem, num_tiles, EXPERTS: gl.constexpr):
    """Fetch tiles, and load their operands.

    operands: descriptors of dy [1, R, N] for [1, STEP, HALF_M] elements and of x [R, K] for [STEP, HALF_N]
    counter_ptr: number of tiles that have been fetched, zero before and after the launch

    The loads of a step begin before the step before it is finished. Otherwise there would be no loads in flight if each
    group has only one step.
    """
    ends = _ends_of_groups(splits, EXPERTS)
    turn, phases = 0, 0
    before, multiplied_before = STEP, STEP  # rows of the step before that belong to its group, and are multiplied
    tile = item_of_warp(request_number(counter_ptr))
    while tile < num_tiles:
        place = _place_of(tile, problem)
        expert, pid_m, pid_n = place
        begin, end = _group_of(expert, ends, EXPERTS)
        steps = gl.maximum((end - begin + STEP - 1) // STEP, 1)
        multiplied = _multiplied_rows(steps, end - begin - (steps - 1) * STEP)
        begin_item(memory, bars, tile, (pid_m, pid_n, expert), turn, span=(0, steps, multiplied))
        answer = request_number(counter_ptr)
        for step in range(steps):
            row = begin + step * STEP
            count = gl.minimum(end - row, STEP)
            _load_step(operands, memory, bars, turn, row, place, count)
            phases = _finish_step(memory, bars, turn + STAGES - 1, before, multiplied_before, phases)
            before, multiplied_before = count, multiplied
            turn += 1
        tile = item_of_warp(answer)
    reset_after(counter_ptr, tile, num_tiles)
    _finish_step(memory, bars, turn + STAGES - 1, before, multiplied_before, phases)
    end_items(memory, bars, turn)


# ---- multiply ----


@gluon.jit
def multiply_weights(memory, bars, WHICH: gl.constexpr):
    """``multiply_partition`` for whole tiles, each with a number of steps of its own."""
    multiply_partition(memory, bars, None, None, WHICH, NO_HALVES, True, no_epilogue, pass_halves, 2)


# ---- store ----


@gluon.jit
def store_weights_partition(memory, bars, dw_desc, problem):
    """Store tiles. dw_desc: descriptor of dw [experts, N, K] for [1, HALF_M, HALF_N] elements"""
    out, sent = memory[2], memory[4]
    number = 0  # halves of tiles so far
    mbarrier.wait(bars.index(OUT_FULL), 0)
    item = read_item(sent.index(0), ONE_WARP)
    while item != NO_ITEM:
        expert, pid_m, pid_n = _place_of(item, problem)
        for side in gl.static_range(2):
            if side > 0:
                mbarrier.wait(bars.index(OUT_FULL), number & 1)
            store_half(dw_desc, out, expert, pid_m * BLOCK_M, pid_n * BLOCK_N + side * HALF_N)
            tma.store_wait(0)
            mbarrier.arrive(bars.index(OUT_FREE), count=1)
            number += 1
        mbarrier.wait(bars.index(OUT_FULL), number & 1)
        item = read_item(sent.index(0), ONE_WARP)
