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
    HALF_COLUMNS,
    HALF_LAYOUT,
    HALF_M,
    HALF_N,
    HALF_ROWS,
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
    depth: gl.constexpr = 256 // x.dtype.primitive_bitwidth  # elements of K that an instruction multiplies
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, depth])
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
def _skip_tile(bars, turn, steps):
    """Free the operands of a tile that the other partition computes alone. Return the number of steps so far."""
    for _ in range(steps):
        stage = turn % STAGES
        mbarrier.wait(bars.index(FULL + stage), (turn // STAGES) & 1)
        mbarrier.arrive(bars.index(FREE + stage), count=1)
        turn += 1
    return turn


@gluon.jit
def halves_of(tile):
    """Return columns 0 to HALF_N - 1 and the others of [HALF_M, BLOCK_N]. No element moves to another thread."""
    left, right = tile.reshape((HALF_M, 2, HALF_N)).permute((0, 2, 1)).split()
    left = gl.convert_layout(left, HALF_LAYOUT, assert_trivial=True)
    return left, gl.convert_layout(right, HALF_LAYOUT, assert_trivial=True)


@gluon.jit
def pass_on(memory, bars, part, item, number, WHICH: gl.constexpr, IS_FIRST: gl.constexpr):
    """Store HALF_M rows of half a tile for the warp that sends or stores it. Return the number of halves so far.

    IS_FIRST: whether it is the first half of its work item
    """
    _, _, out, _, sent = memory
    mbarrier.wait(bars.index(OUT_FREE), (number & 1) ^ 1)
    out.index(WHICH).store(part)
    if WHICH == 0 and IS_FIRST:
        write_item(sent.index(0), item, FOUR_WARPS)
    fence_async_shared()
    mbarrier.arrive(bars.index(OUT_FULL), count=1)
    return number + 1


@gluon.jit
def _pass_nothing(bars, number):
    """Take part in a half that the other partition passes on. Return the number of halves so far."""
    mbarrier.wait(bars.index(OUT_FREE), (number & 1) ^ 1)
    mbarrier.arrive(bars.index(OUT_FULL), count=1)
    return number + 1


@gluon.jit
def pass_halves(memory, bars, acc, item, number, epilogue, WHICH: gl.constexpr, EPILOGUE: gl.constexpr):
    """Pass on both halves of a tile. Return the number of halves so far."""
    dtype: gl.constexpr = memory[2].dtype
    left, right = halves_of(acc)
    number = pass_on(memory, bars, EPILOGUE(left, item, WHICH, 0, epilogue).to(dtype), item, number, WHICH, True)
    return pass_on(memory, bars, EPILOGUE(right, item, WHICH, 1, epilogue).to(dtype), item, number, WHICH, False)


@gluon.jit
def _compute(
    memory, bars, item, epilogue, steps, counts, WHICH: gl.constexpr, W_IS_KN: gl.constexpr, EPILOGUE: gl.constexpr,
    PASS: gl.constexpr,
):
    """Compute HALF_M rows of a whole tile. Return the numbers of steps and of halves so far."""
    turn, number = counts
    acc, turn = _multiply_tile(memory, bars, turn, steps, WHICH, BLOCK_N, W_IS_KN)
    return turn, PASS(memory, bars, acc, item, number, epilogue, WHICH, EPILOGUE)


@gluon.jit
def _compute_half(
    memory, bars, item, epilogue, steps, counts, WHICH: gl.constexpr, HALF: gl.constexpr, W_IS_KN: gl.constexpr,
    EPILOGUE: gl.constexpr, PASSES: gl.constexpr,
):
    """Compute this partition's part of half a tile, if it differs from its part of a whole tile.

    Return the numbers of steps and of halves so far.
    """
    turn, number = counts
    if HALF == HALF_COLUMNS:
        dtype: gl.constexpr = memory[2].dtype
        acc, turn = _multiply_tile(memory, bars, turn, steps, WHICH, HALF_N, W_IS_KN)
        number = pass_on(memory, bars, EPILOGUE(acc, item, WHICH, 0, epilogue).to(dtype), item, number, WHICH, True)
    else:  # these rows do not belong to the item
        turn = _skip_tile(bars, turn, steps)
        for _ in gl.static_range(PASSES):
            number = _pass_nothing(bars, number)
    return turn, number


@gluon.jit
def no_epilogue(half, item, WHICH: gl.constexpr, side: gl.constexpr, epilogue):
    """Return half a tile as it is."""
    return half


@gluon.jit
def multiply_partition(
    memory, bars, steps, epilogue, WHICH: gl.constexpr, HALF: gl.constexpr, W_IS_KN: gl.constexpr,
    EPILOGUE: gl.constexpr, PASS: gl.constexpr, PASSES: gl.constexpr, PREPARE: gl.constexpr = None,
):
    """Compute HALF_M rows of each tile: the first ones (WHICH = 0) or the last ones.

    HALF: what items with odd numbers are; NO_HALVES: all items are whole tiles
    EPILOGUE: (HALF_M rows of half a tile in fp32, item, WHICH, half of the item, ``epilogue``) -> the same before
        rounding
    PASS: passes on a whole tile, like ``pass_halves``, as PASSES halves
    PREPARE: None, or (item, WHICH, ``epilogue``) -> x, which runs before the main loop. EPILOGUE gets (epilogue, x)
    """
    has_halves: gl.constexpr = HALF == HALF_COLUMNS or HALF == HALF_ROWS and WHICH == 1
    turn = 0  # steps so far
    number = 0  # halves of tiles so far
    mbarrier.wait(bars.index(FULL), 0)
    item = read_item(memory[3].index(0), FOUR_WARPS)
    while item != NO_ITEM:
        counts = turn, number
        prepared = epilogue if PREPARE is None else (epilogue, PREPARE(item, WHICH, epilogue))
        if (item % 2 if has_halves else 0) == 0:
            turn, number = _compute(memory, bars, item, prepared, steps, counts, WHICH, W_IS_KN, EPILOGUE, PASS)
        else:
            turn, number = _compute_half(
                memory, bars, item, prepared, steps, counts, WHICH, HALF, W_IS_KN, EPILOGUE, PASSES
            )
        mbarrier.wait(bars.index(FULL + turn % STAGES), (turn // STAGES) & 1)
        item = read_item(memory[3].index(turn % STAGES), FOUR_WARPS)
    # Both partitions wait. Otherwise this arrival could count for the half before, in place of the other partition.
    mbarrier.wait(bars.index(OUT_FREE), (number & 1) ^ 1)
    if WHICH == 0:
        write_item(memory[4].index(0), NO_ITEM, FOUR_WARPS)
    mbarrier.arrive(bars.index(OUT_FULL), count=1)
