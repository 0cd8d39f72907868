"""Compute tiles from operands in shared memory, in two partitions of four warps. Neither waits for another program.

The number and the place of a work item travel with the first step of its operands, its number also with its output.

A whole tile leaves in halves. The last one is kept in registers until the next tile has begun, so that the tensor cores
are busy while it is stored. By then the half before has usually left the buffer of the output.
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
    EARLY_STEPS,
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
    item_word,
    read_item,
    write_item,
)


@gluon.jit
def _multiply_step(
    memory, bars, acc, turn, WHICH: gl.constexpr, WIDTH: gl.constexpr, W_IS_KN: gl.constexpr, IS_FIRST: gl.constexpr
):
    """Start to multiply the next step of a tile, and wait for the step before.

    Return (HALF_M rows and the first WIDTH columns of the product in fp32, number of steps so far). The product is
    complete after ``warpgroup_mma_wait``.
    """
    x, w, _, _, _ = memory
    stage = turn % STAGES
    mbarrier.wait(bars.index(FULL + stage), (turn // STAGES) & 1)
    weight = w.index(stage)
    if WIDTH != BLOCK_N:
        weight = weight.slice(0, WIDTH, 1 if W_IS_KN else 0)
    if not W_IS_KN:
        weight = weight.permute((1, 0))
    use_acc: gl.constexpr = not IS_FIRST
    product = warpgroup_mma(x.index(2 * stage + WHICH), weight, acc, use_acc=use_acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[product])
    if not IS_FIRST:
        mbarrier.arrive(bars.index(FREE + (turn + STAGES - 1) % STAGES), count=1)
    return acc, turn + 1


@gluon.jit
def _begin_tile(memory, bars, steps, state, WHICH: gl.constexpr, WIDTH: gl.constexpr, W_IS_KN: gl.constexpr):
    """Multiply the first steps of a tile, and pass on the half that was kept while the last one of them is multiplied.

    Return (product, numbers of steps and of halves so far).
    """
    turn, number, kept, kept_item = state
    depth: gl.constexpr = 256 // memory[0].dtype.primitive_bitwidth  # elements of K that an instruction multiplies
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, depth])
    acc = gl.zeros((HALF_M, WIDTH), gl.float32, layout)
    acc, turn = _multiply_step(memory, bars, acc, turn, WHICH, WIDTH, W_IS_KN, True)
    for _ in range(1, gl.minimum(steps, EARLY_STEPS)):
        acc, turn = _multiply_step(memory, bars, acc, turn, WHICH, WIDTH, W_IS_KN, False)
    return acc, turn, _pass_kept(memory, bars, kept, kept_item, number, WHICH)


@gluon.jit
def _end_tile(memory, bars, acc, turn, steps, WHICH: gl.constexpr, WIDTH: gl.constexpr, W_IS_KN: gl.constexpr):
    """Multiply the other steps of a tile. Return (complete product, number of steps so far)."""
    for _ in range(EARLY_STEPS, steps):
        acc, turn = _multiply_step(memory, bars, acc, turn, WHICH, WIDTH, W_IS_KN, False)
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
def pass_on(memory, bars, part, item, number, WHICH: gl.constexpr):
    """Store HALF_M rows of half a tile for the warp that sends or stores it. Return the number of halves so far."""
    _, _, out, _, sent = memory
    mbarrier.wait(bars.index(OUT_FREE), (number & 1) ^ 1)
    out.index(WHICH).store(part)
    if WHICH == 0:
        write_item(sent.index(0), item, FOUR_WARPS)
    fence_async_shared()
    mbarrier.arrive(bars.index(OUT_FULL), count=1)
    return number + 1


@gluon.jit
def _pass_kept(memory, bars, kept, kept_item, number, WHICH: gl.constexpr):
    """Pass on the half of a tile that was kept, if there is one. Return the number of halves so far."""
    if kept_item != NO_ITEM:
        number = pass_on(memory, bars, kept, kept_item, number, WHICH)
    return number


@gluon.jit
def _pass_nothing(bars, number):
    """Take part in a half that the other partition passes on. Return the number of halves so far."""
    mbarrier.wait(bars.index(OUT_FREE), (number & 1) ^ 1)
    mbarrier.arrive(bars.index(OUT_FULL), count=1)
    return number + 1


@gluon.jit
def pass_halves(memory, bars, acc, item, place, number, epilogue, WHICH: gl.constexpr, EPILOGUE: gl.constexpr):
    """Pass on the first half of a tile. Return (number of halves so far, the last half)."""
    dtype: gl.constexpr = memory[2].dtype
    left, right = halves_of(acc)
    number = pass_on(memory, bars, EPILOGUE(left, place, WHICH, 0, epilogue).to(dtype), item, number, WHICH)
    return number, EPILOGUE(right, place, WHICH, 1, epilogue).to(dtype)


@gluon.jit
def _compute(
    memory, bars, item, place, epilogue, steps, state, WHICH: gl.constexpr, W_IS_KN: gl.constexpr,
    EPILOGUE: gl.constexpr, PASS: gl.constexpr, PREPARE: gl.constexpr,
):
    """Compute HALF_M rows of a whole tile. Return the new state."""
    acc, turn, number = _begin_tile(memory, bars, steps, state, WHICH, BLOCK_N, W_IS_KN)
    prepared = epilogue if PREPARE is None else (epilogue, PREPARE(place, WHICH, epilogue))
    acc, turn = _end_tile(memory, bars, acc, turn, steps, WHICH, BLOCK_N, W_IS_KN)
    number, kept = PASS(memory, bars, acc, item, place, number, prepared, WHICH, EPILOGUE)
    return turn, number, kept, item


@gluon.jit
def _compute_half(
    memory, bars, item, place, epilogue, steps, state, WHICH: gl.constexpr, HALF: gl.constexpr, W_IS_KN: gl.constexpr,
    EPILOGUE: gl.constexpr, PASSES: gl.constexpr, PREPARE: gl.constexpr,
):
    """Compute this partition's part of half a tile, if it differs from its part of a whole tile.

    Return the new state. Nothing is kept.
    """
    if HALF == HALF_COLUMNS:
        acc, turn, number = _begin_tile(memory, bars, steps, state, WHICH, HALF_N, W_IS_KN)
        prepared = epilogue if PREPARE is None else (epilogue, PREPARE(place, WHICH, epilogue))
        acc, turn = _end_tile(memory, bars, acc, turn, steps, WHICH, HALF_N, W_IS_KN)
        dtype: gl.constexpr = memory[2].dtype
        number = pass_on(memory, bars, EPILOGUE(acc, place, WHICH, 0, prepared).to(dtype), item, number, WHICH)
    else:  # these rows do not belong to the item
        turn, number, kept, kept_item = state
        number = _pass_kept(memory, bars, kept, kept_item, number, WHICH)
        turn = _skip_tile(bars, turn, steps)
        for _ in gl.static_range(PASSES):
            number = _pass_nothing(bars, number)
    # NO_ITEM as a value of the same type as an item: both branches of the caller must return one.
    return turn, number, state[2], item * 0 + NO_ITEM


@gluon.jit
def no_epilogue(half, place, WHICH: gl.constexpr, side: gl.constexpr, epilogue):
    """Return half a tile as it is."""
    return half


@gluon.jit
def multiply_partition(
    memory, bars, steps, epilogue, WHICH: gl.constexpr, HALF: gl.constexpr, W_IS_KN: gl.constexpr,
    EPILOGUE: gl.constexpr, PASS: gl.constexpr, PASSES: gl.constexpr, PREPARE: gl.constexpr = None,
):
    """Compute HALF_M rows of each tile: the first ones (WHICH = 0) or the last ones.

    HALF: what items with odd numbers are; NO_HALVES: all items are whole tiles
    EPILOGUE: (HALF_M rows of half a tile in fp32, place, WHICH, half of the item, ``epilogue``) -> the same before
        rounding
    PASS: passes on all halves of a whole tile but the last, and returns that one, like ``pass_halves``
    PASSES: number of halves
    PREPARE: None, or (place, WHICH, ``epilogue``) -> x, which runs during the main loop. EPILOGUE gets (epilogue, x)
    """
    has_halves: gl.constexpr = HALF == HALF_COLUMNS or HALF == HALF_ROWS and WHICH == 1
    turn = 0  # steps so far
    number = 0  # halves of tiles so far
    kept = gl.zeros((HALF_M, HALF_N), memory[2].dtype, HALF_LAYOUT)  # a half that has not been passed on
    kept_item = NO_ITEM  # its item
    mbarrier.wait(bars.index(FULL), 0)
    item = read_item(item_word(memory, 0, 0), FOUR_WARPS)
    while item != NO_ITEM:
        stage = turn % STAGES
        row = read_item(item_word(memory, stage, 1), FOUR_WARPS)
        column = read_item(item_word(memory, stage, 2), FOUR_WARPS)
        place = row, column, read_item(item_word(memory, stage, 3), FOUR_WARPS)
        state = turn, number, kept, kept_item
        if (item % 2 if has_halves else 0) == 0:
            turn, number, kept, kept_item = _compute(
                memory, bars, item, place, epilogue, steps, state, WHICH, W_IS_KN, EPILOGUE, PASS, PREPARE
            )
        else:
            turn, number, kept, kept_item = _compute_half(
                memory, bars, item, place, epilogue, steps, state, WHICH, HALF, W_IS_KN, EPILOGUE, PASSES, PREPARE
            )
        mbarrier.wait(bars.index(FULL + turn % STAGES), (turn // STAGES) & 1)
        item = read_item(item_word(memory, turn % STAGES, 0), FOUR_WARPS)
    number = _pass_kept(memory, bars, kept, kept_item, number, WHICH)
    # Both partitions wait. Otherwise this arrival could count for the half before, in place of the other partition.
    mbarrier.wait(bars.index(OUT_FREE), (number & 1) ^ 1)
    if WHICH == 0:
        write_item(memory[4].index(0), NO_ITEM, FOUR_WARPS)
    mbarrier.arrive(bars.index(OUT_FULL), count=1)
