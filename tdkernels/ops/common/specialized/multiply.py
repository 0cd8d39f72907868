"""Compute tiles from operands in shared memory, in two partitions of four warps.

Neither waits for another program, except with split-K, see ``split_k``.

The number and the place of a work item travel with the first step of its operands, its number also with its output.

A whole tile leaves in halves. The last one is kept in registers until the next tile has begun, so that the tensor cores
are busy while it is stored. By then the half before has usually left the buffer of the output.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

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
    STAGES,
    await_operands,
    item_word,
    read_item,
)
from tdkernels.ops.common.specialized.output import pass_kept, pass_no_item, pass_nothing, pass_on
from tdkernels.ops.common.specialized.promote import begin_promoted, end_promoted
from tdkernels.ops.common.specialized.split_k import add_splits, store_split


@gluon.jit
def _multiply_step(
    memory, bars, acc, turn, WHICH: gl.constexpr, WIDTH: gl.constexpr, W_IS_KN: gl.constexpr, IS_FIRST: gl.constexpr,
    DEPTH: gl.constexpr = None,
):
    """Start to multiply the next step of a tile, and wait for the step before.

    Return (HALF_M rows and the first WIDTH columns of the product in fp32, number of steps so far). The product is
    complete after ``warpgroup_mma_wait``.

    DEPTH: number of elements of K that are multiplied, the first ones, with W_IS_KN; None: all
    """
    x, w, _, _, _, _ = memory
    stage = await_operands(memory, bars, turn)
    weight = w.index(stage)
    if DEPTH is not None:
        weight = weight.slice(0, DEPTH, 0)
    if WIDTH != BLOCK_N:
        weight = weight.slice(0, WIDTH, 1 if W_IS_KN else 0)
    if not W_IS_KN:
        weight = weight.permute((1, 0))
    use_acc: gl.constexpr = not IS_FIRST
    rows = x.index(2 * stage + WHICH)
    if DEPTH is not None:
        rows = rows.slice(0, DEPTH, 1)
    product = warpgroup_mma(rows, weight, acc, use_acc=use_acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[product])
    if not IS_FIRST:
        mbarrier.arrive(bars.index(FREE + (turn + STAGES - 1) % STAGES), count=1)
    return acc, turn + 1


@gluon.jit
def _begin_tile(
    memory, bars, steps, state, WHICH: gl.constexpr, WIDTH: gl.constexpr, W_IS_KN: gl.constexpr, IN_PARTS: gl.constexpr
):
    """Multiply the first steps of a tile. While the last of them runs, pass on the kept half of the previous tile.

    Return (product, numbers of steps and of halves so far).

    IN_PARTS: as for ``_end_tile``
    """
    turn, number, kept, kept_item = state
    depth: gl.constexpr = 256 // memory[0].dtype.primitive_bitwidth  # elements of K that an instruction multiplies
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, depth])
    acc = gl.zeros((HALF_M, WIDTH), gl.float32, layout)
    acc, turn = _multiply_step(memory, bars, acc, turn, WHICH, WIDTH, W_IS_KN, True)
    for _ in range(1, gl.minimum(steps - 1 if IN_PARTS else steps, EARLY_STEPS)):
        acc, turn = _multiply_step(memory, bars, acc, turn, WHICH, WIDTH, W_IS_KN, False)
    return acc, turn, pass_kept(memory, bars, kept, kept_item, number, WHICH)


@gluon.jit
def _multiply_part(
    memory, bars, acc, turn, depth, WHICH: gl.constexpr, WIDTH: gl.constexpr, W_IS_KN: gl.constexpr
):
    """Multiply the first ``depth`` elements of K of the last step: 16, 32 or all. Return what ``_multiply_step`` does.

    Each branch waits for its product. Otherwise ptxas might serialize all products. If the order of the branches is 16,
    32, all, ptxas 12.8 omits an instruction (docs/performance/notes/host-and-compiler.md). A test of the machine code
    finds that.
    """
    if depth > 32:
        acc, turn = _multiply_step(memory, bars, acc, turn, WHICH, WIDTH, W_IS_KN, False)
        acc = warpgroup_mma_wait(0, deps=[acc])
    elif depth == 16:
        acc, turn = _multiply_step(memory, bars, acc, turn, WHICH, WIDTH, W_IS_KN, False, 16)
        acc = warpgroup_mma_wait(0, deps=[acc])
    else:
        acc, turn = _multiply_step(memory, bars, acc, turn, WHICH, WIDTH, W_IS_KN, False, 32)
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, turn


@gluon.jit
def _end_tile(
    memory, bars, acc, turn, steps, depth, WHICH: gl.constexpr, WIDTH: gl.constexpr, W_IS_KN: gl.constexpr,
    IN_PARTS: gl.constexpr,
):
    """Multiply the other steps of a tile. Return (complete product, number of steps so far).

    depth: as for ``_multiply_part``, with IN_PARTS
    IN_PARTS: whether only a part of the last step may be multiplied, if it is not the first one
    """
    for _ in range(EARLY_STEPS, steps - 1 if IN_PARTS else steps):
        acc, turn = _multiply_step(memory, bars, acc, turn, WHICH, WIDTH, W_IS_KN, False)
    if not IN_PARTS:
        acc = warpgroup_mma_wait(0, deps=[acc])
    elif steps > 1:
        acc, turn = _multiply_part(memory, bars, acc, turn, depth, WHICH, WIDTH, W_IS_KN)
    else:
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
def _multiply_tile(
    memory, bars, place, epilogue, span, state, WHICH: gl.constexpr, SIDES: gl.constexpr,
    W_IS_KN: gl.constexpr, PREPARE: gl.constexpr, PROMOTE: gl.constexpr, FACTORS: gl.constexpr,
    IN_PARTS: gl.constexpr = False,
):
    """Multiply the steps of K of HALF_M rows of a tile, or of its first half if SIDES = 1.

    Return (halves of the product, result of PREPARE, numbers of steps and of halves so far).

    span: (first step of K, number of steps, ``depth`` of ``_end_tile`` with IN_PARTS)
    """
    first, steps, depth = span
    WIDTH: gl.constexpr = SIDES * HALF_N
    if PROMOTE:
        left, right, turn, number = begin_promoted(
            memory, bars, place, epilogue, first, state, WHICH, SIDES, FACTORS
        )
    else:
        acc, turn, number = _begin_tile(memory, bars, steps, state, WHICH, WIDTH, W_IS_KN, IN_PARTS)
    loaded = turn if PREPARE is None else PREPARE(place, WHICH, epilogue)
    if PROMOTE:
        left, right, turn = end_promoted(
            memory, bars, place, epilogue, (left, right), turn, first, steps, WHICH, SIDES, FACTORS
        )
    else:
        acc, turn = _end_tile(memory, bars, acc, turn, steps, depth, WHICH, WIDTH, W_IS_KN, IN_PARTS)
        if SIDES == 2:
            left, right = halves_of(acc)
        else:
            left, right = acc, acc
    return (left, right), loaded, turn, number


@gluon.jit
def _end_split(
    memory, bars, halves, output, number, kept, split, splits, WHICH: gl.constexpr, EPILOGUE: gl.constexpr,
    PASS: gl.constexpr,
):
    """Store the sums of a split, or pass on a tile: a whole one, or the last split with the sums of the others.

    Return (number of halves so far, the half that is kept, its item).
    """
    item, place, prepared = output
    left, right = halves
    kept_item = item * 0 + NO_ITEM
    if split > 0:
        store_split((left, right), split, splits, WHICH)
    else:
        if split < 0:
            left, right = add_splits((left, right), split, splits, WHICH)
        number, kept = PASS(memory, bars, (left, right), item, place, number, prepared, WHICH, EPILOGUE)
        kept_item = item
    return number, kept, kept_item


@gluon.jit
def _compute(
    memory, bars, item, place, epilogue, span, splits, state, WHICH: gl.constexpr, W_IS_KN: gl.constexpr,
    EPILOGUE: gl.constexpr, PASS: gl.constexpr, PREPARE: gl.constexpr, PROMOTE: gl.constexpr, FACTORS: gl.constexpr,
    SPLIT_K: gl.constexpr, IN_PARTS: gl.constexpr,
):
    """Compute HALF_M rows of a whole tile, or their sums over a range of K. Return the new state.

    span: as ``_read_span`` returns it
    """
    halves, loaded, turn, number = _multiply_tile(
        memory, bars, place, epilogue, span, state, WHICH, 2, W_IS_KN, PREPARE, PROMOTE, FACTORS, IN_PARTS
    )
    prepared = epilogue if PREPARE is None else (epilogue, loaded)
    if SPLIT_K:
        output = item, place, prepared
        number, kept, item = _end_split(
            memory, bars, halves, output, number, state[2], span[2], splits, WHICH, EPILOGUE, PASS
        )
    else:
        number, kept = PASS(memory, bars, halves, item, place, number, prepared, WHICH, EPILOGUE)
    return turn, number, kept, item


@gluon.jit
def _compute_half(
    memory, bars, item, place, epilogue, steps, state, WHICH: gl.constexpr, HALF: gl.constexpr, W_IS_KN: gl.constexpr,
    EPILOGUE: gl.constexpr, PASSES: gl.constexpr, PREPARE: gl.constexpr, PROMOTE: gl.constexpr, FACTORS: gl.constexpr,
):
    """Process half a tile, if this partition's part differs from that of a whole tile: HALF_N columns, or no rows.

    Return the new state. Nothing is kept.
    """
    if HALF == HALF_COLUMNS:
        halves, loaded, turn, number = _multiply_tile(
            memory, bars, place, epilogue, (0, steps, 0), state, WHICH, 1, W_IS_KN, PREPARE, PROMOTE, FACTORS
        )
        prepared = epilogue if PREPARE is None else (epilogue, loaded)
        half = EPILOGUE(halves[0], place, WHICH, 0, prepared).to(memory[2].dtype)
        number = pass_on(memory, bars, half, item, number, WHICH)
    else:  # these rows do not belong to the item
        turn, number, kept, kept_item = state
        number = pass_kept(memory, bars, kept, kept_item, number, WHICH)
        turn = _skip_tile(bars, turn, steps)
        for _ in gl.static_range(PASSES):
            number = pass_nothing(bars, number)
    # NO_ITEM as a value of the same type as an item: both branches of the caller must return one.
    return turn, number, state[2], item * 0 + NO_ITEM


@gluon.jit
def _read_span(memory, stage, steps, SPLIT_K: gl.constexpr):
    """Return (first step of K, number of steps, x) of the work item that begins with a stage.

    x: with SPLIT_K the split as in ``split_of``. If each work item has its own steps, ``depth`` of ``_end_tile``
    """
    if SPLIT_K:
        first = read_item(item_word(memory, stage, 4), FOUR_WARPS)
        count = read_item(item_word(memory, stage, 5), FOUR_WARPS)
        return first, count, read_item(item_word(memory, stage, 6), FOUR_WARPS)
    elif steps is None:
        count = read_item(item_word(memory, stage, 5), FOUR_WARPS)
        return 0, count, read_item(item_word(memory, stage, 6), FOUR_WARPS)
    else:
        return 0, steps, 0


@gluon.jit
def multiply_partition(
    memory, bars, steps, epilogue, WHICH: gl.constexpr, HALF: gl.constexpr, W_IS_KN: gl.constexpr,
    EPILOGUE: gl.constexpr, PASS: gl.constexpr, PASSES: gl.constexpr, PREPARE: gl.constexpr = None,
    PROMOTE: gl.constexpr = False, FACTORS: gl.constexpr = None, SPLIT_K: gl.constexpr = False,
    splits=None,
):
    """Compute HALF_M rows of each tile: the first ones (WHICH = 0) or the last ones.

    steps: number of steps of K, or None if each work item has its own, with NO_HALVES and W_IS_KN. Then an item also
        has the number of elements of K of its last step that are multiplied: 16, 32 or all; if there is only one step,
        all
    HALF: what items with odd numbers are; NO_HALVES: all items are whole tiles
    EPILOGUE: (HALF_M rows of half a tile in fp32, place, WHICH, half of the item, ``epilogue``) -> these rows in
        fp32, scaled or with a bias, before they are rounded
    PASS: passes on all halves of a whole tile but the last, and returns that one, like ``pass_halves``
    PASSES: number of halves
    PREPARE: None, or (place, WHICH, ``epilogue``) -> x, which runs during the main loop. EPILOGUE gets (epilogue, x)
    PROMOTE: whether each step is added to a second accumulator, see ``promote``; without W_IS_KN
    FACTORS: None, or with PROMOTE: (place, step of K, WHICH, ``epilogue``) -> the scales of the step, in the form that
        ``load_block_scales`` returns
    SPLIT_K: whether tiles are split along K, with NO_HALVES
    splits: as for ``store_split`` of ``split_k``, with SPLIT_K
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
        span = _read_span(memory, stage, steps, SPLIT_K)
        state = turn, number, kept, kept_item
        if (item % 2 if has_halves else 0) == 0:
            turn, number, kept, kept_item = _compute(
                memory, bars, item, place, epilogue, span, splits, state, WHICH, W_IS_KN, EPILOGUE, PASS, PREPARE,
                PROMOTE, FACTORS, SPLIT_K, steps is None,
            )
        else:
            turn, number, kept, kept_item = _compute_half(
                memory, bars, item, place, epilogue, steps, state, WHICH, HALF, W_IS_KN, EPILOGUE, PASSES, PREPARE,
                PROMOTE, FACTORS,
            )
        mbarrier.wait(bars.index(FULL + turn % STAGES), (turn // STAGES) & 1)
        item = read_item(item_word(memory, turn % STAGES, 0), FOUR_WARPS)
    number = pass_kept(memory, bars, kept, kept_item, number, WHICH)
    pass_no_item(memory, bars, number, WHICH)
