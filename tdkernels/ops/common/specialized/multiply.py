"""Compute tiles from operands in shared memory, in two partitions of four warps. Neither waits for another program.

The number of a work item travels with the first step of its operands, and with its output.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tdkernels.lang.gluon_signals import FOUR_WARPS
from tdkernels.ops.common.specialized.layout import (
    BLOCK_N,
    FREE,
    FULL,
    HALF_M,
    HALF_N,
    NO_ITEM,
    OUT_FREE,
    OUT_FULL,
    STAGES,
    read_item,
    write_item,
)


@gluon.jit
def _multiply_tile(memory, bars, turn, steps, WHICH: gl.constexpr, WIDTH: gl.constexpr, W_IS_KN: gl.constexpr):
    """Return (HALF_M rows and the first WIDTH columns of a tile in fp32, number of steps so far)."""
    x, w, _, _, _ = memory
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    acc = gl.zeros((HALF_M, WIDTH), gl.float32, layout)
    for step in range(steps):
        stage = turn % STAGES
        mbarrier.wait(bars.index(FULL + stage), (turn // STAGES) & 1)
        weight = w.index(stage)
        if WIDTH != BLOCK_N:
            weight = weight.slice(0, WIDTH, 1 if W_IS_KN else 0)
        if not W_IS_KN:
            weight = weight.permute((1, 0))
        product = warpgroup_mma(x.index(2 * stage + WHICH), weight, acc, use_acc=step > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[product])
        # The product of the step before is complete.
        mbarrier.arrive(bars.index(FREE + (turn + STAGES - 1) % STAGES), count=1, pred=step > 0)
        turn += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(bars.index(FREE + (turn + STAGES - 1) % STAGES), count=1)
    return acc, turn


@gluon.jit
def _halves(tile):
    """Return columns 0 to HALF_N - 1 and the others of [HALF_M, BLOCK_N]. No element moves to another thread."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_N, 16])
    left, right = tile.reshape((HALF_M, 2, HALF_N)).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def _pass_on(memory, bars, part, item, number, WHICH: gl.constexpr, IS_FIRST: gl.constexpr):
    """Store HALF_M rows of half a tile for the warp that sends or stores it. Return the number of halves so far."""
    _, _, out, _, sent = memory
    mbarrier.wait(bars.index(OUT_FREE), (number & 1) ^ 1)
    out.index(WHICH).store(part)
    if WHICH == 0 and IS_FIRST:
        write_item(sent.index(0), item, FOUR_WARPS)
    fence_async_shared()
    mbarrier.arrive(bars.index(OUT_FULL), count=1)
    return number + 1


@gluon.jit
def _compute(
    memory, bars, item, epilogue, steps, counts, WHICH: gl.constexpr, WIDTH: gl.constexpr, W_IS_KN: gl.constexpr,
    EPILOGUE: gl.constexpr,
):
    """Compute a work item with WIDTH columns. Return the numbers of steps and of halves so far."""
    turn, number = counts
    dtype: gl.constexpr = memory[2].dtype
    acc, turn = _multiply_tile(memory, bars, turn, steps, WHICH, WIDTH, W_IS_KN)
    if WIDTH == BLOCK_N:
        left, right = _halves(acc)
        number = _pass_on(memory, bars, EPILOGUE(left, item, 0, epilogue).to(dtype), item, number, WHICH, True)
        number = _pass_on(memory, bars, EPILOGUE(right, item, 1, epilogue).to(dtype), item, number, WHICH, False)
    else:
        number = _pass_on(memory, bars, EPILOGUE(acc, item, 0, epilogue).to(dtype), item, number, WHICH, True)
    return turn, number


@gluon.jit
def no_epilogue(half, item, side, epilogue):
    """Return half a tile as it is."""
    return half


@gluon.jit
def multiply_partition(
    memory, bars, steps, epilogue, WHICH: gl.constexpr, W_IS_KN: gl.constexpr, HAS_HALVES: gl.constexpr,
    EPILOGUE: gl.constexpr,
):
    """Compute HALF_M rows of each tile: the first ones (WHICH = 0) or the last ones.

    HAS_HALVES: odd numbers are items with HALF_N columns; otherwise all items are whole tiles
    EPILOGUE: (HALF_M rows of half a tile in fp32, item, half of the item, ``epilogue``) -> the same before rounding
    """
    turn = 0  # steps so far
    number = 0  # halves of tiles so far
    mbarrier.wait(bars.index(FULL), 0)
    item = read_item(memory[3].index(0), FOUR_WARPS)
    while item != NO_ITEM:
        counts = turn, number
        if (item % 2 if HAS_HALVES else 0) == 0:
            turn, number = _compute(memory, bars, item, epilogue, steps, counts, WHICH, BLOCK_N, W_IS_KN, EPILOGUE)
        else:
            turn, number = _compute(memory, bars, item, epilogue, steps, counts, WHICH, HALF_N, W_IS_KN, EPILOGUE)
        mbarrier.wait(bars.index(FULL + turn % STAGES), (turn // STAGES) & 1)
        item = read_item(memory[3].index(turn % STAGES), FOUR_WARPS)
    # Both partitions wait. Otherwise this arrival could count for the half before, in place of the other partition.
    mbarrier.wait(bars.index(OUT_FREE), (number & 1) ^ 1)
    if WHICH == 0:
        write_item(memory[4].index(0), NO_ITEM, FOUR_WARPS)
    mbarrier.arrive(bars.index(OUT_FULL), count=1)
