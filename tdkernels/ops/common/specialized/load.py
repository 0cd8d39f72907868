"""Load the operands of a tile into shared memory, in a partition of one warp."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tdkernels.lang.gluon_memory import reinterpret, tma_load
from tdkernels.ops.common.specialized.layout import (
    BLOCK_M,
    BLOCK_N,
    FREE,
    FULL,
    HALF_COLUMNS,
    HALF_M,
    HALF_N,
    HALF_ROWS,
    NO_HALVES,
    NO_ITEM,
    ONE_WARP,
    STAGES,
    STEP_BYTES,
    item_word,
    write_item,
)


@gluon.jit
def await_stage(bars, turn):
    """Wait until the stage of step ``turn`` is free, and return it."""
    stage = turn % STAGES
    mbarrier.wait(bars.index(FREE + stage), ((turn // STAGES) & 1) ^ 1)
    return stage


@gluon.jit
def load_weight(w_desc, row, col, full, memory, stage, side: gl.constexpr, is_needed, W_IS_KN: gl.constexpr):
    """Load the block of the weight for HALF_N columns of the product, into half ``side`` of a stage.

    ``row`` and ``col``: position of the block in the weight; ``row`` is along K
    """
    w = memory[1]
    if W_IS_KN:
        part = w.index(stage).slice(side * HALF_N, HALF_N, 1)
        tma_load(w_desc, [row, col], full, part, pred=is_needed)
    else:
        part = w.index(stage).slice(side * HALF_N, HALF_N, 0)
        tma_load(w_desc, [col, row], full, part, pred=is_needed)


@gluon.jit
def _expect(full, is_whole, HALF: gl.constexpr):
    """Announce the bytes of a step."""
    if HALF == NO_HALVES:
        mbarrier.expect(full, (BLOCK_M + BLOCK_N) * STEP_BYTES)
    else:
        half: gl.constexpr = BLOCK_M + HALF_N if HALF == HALF_COLUMNS else HALF_M + BLOCK_N
        mbarrier.expect(full, (BLOCK_M + BLOCK_N) * STEP_BYTES, pred=is_whole)
        mbarrier.expect(full, half * STEP_BYTES, pred=is_whole == 0)


@gluon.jit
def begin_item(memory, bars, item, place, turn, LAYOUT: gl.constexpr = ONE_WARP, span=None):
    """Pass on a work item and its place, three numbers, with the first step of its operands, number ``turn``.

    LAYOUT: layout of a vector in the partition that loads
    span: (first step of K, number of steps, split) of ``split_of``. If items differ in the number of steps: (0, number
        of steps, number of elements of K of the last step that are multiplied)
    """
    stage = await_stage(bars, turn)
    write_item(item_word(memory, stage, 0), item, LAYOUT)
    for number in gl.static_range(3):
        write_item(item_word(memory, stage, 1 + number), place[number], LAYOUT)
    if span is not None:
        for number in gl.static_range(3):
            write_item(item_word(memory, stage, 4 + number), span[number], LAYOUT)


@gluon.jit
def load_steps(
    operands, memory, bars, block, is_whole, turn, first, last, HALF: gl.constexpr, W_IS_KN: gl.constexpr,
    second=None,
):
    """Load the steps ``first`` to ``last`` - 1 of K of a tile. Return ``turn``, the number of steps so far.

    operands: (descriptor of x [planes, rows, K] for [1, HALF_M, BLOCK_K] elements, descriptor of the weight)
    block: (plane and first row of x, first column of each half of the weight, row of the weight where K begins)
    is_whole: whether the item is a whole tile; otherwise it is the half that HALF says
    second: first row of x of the second half of the rows; None if it follows the first half
    """
    x_desc, w_desc = operands
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[2]
    plane, row, left, right, above = block
    x = memory[0]
    # True, or a value that is known at run time only.
    has_last_rows = is_whole if HALF == HALF_ROWS else True
    has_last_columns = is_whole if HALF == HALF_COLUMNS else True
    for step in range(first, last):
        stage = await_stage(bars, turn)
        full = bars.index(FULL + stage)
        k = step * BLOCK_K
        _expect(full, is_whole, HALF)
        for part in gl.static_range(2):
            rows = reinterpret(x.index(2 * stage + part), x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
            is_needed = has_last_rows if part > 0 else True
            at = row + part * HALF_M
            if second is not None:
                at = row if part == 0 else second
            tma_load(x_desc, [plane, at, k], full, rows, pred=is_needed)
        load_weight(w_desc, above + k, left, full, memory, stage, 0, True, W_IS_KN)
        load_weight(w_desc, above + k, right, full, memory, stage, 1, has_last_columns, W_IS_KN)
        turn += 1
    return turn


@gluon.jit
def end_items(memory, bars, turn, ARRIVALS: gl.constexpr = 1, LAYOUT: gl.constexpr = ONE_WARP):
    """Pass on that there are no more items. ARRIVALS: as for ``make_barriers``. LAYOUT: as for ``begin_item``"""
    stage = await_stage(bars, turn)
    write_item(item_word(memory, stage, 0), NO_ITEM, LAYOUT)
    mbarrier.arrive(bars.index(FULL + stage), count=ARRIVALS)
