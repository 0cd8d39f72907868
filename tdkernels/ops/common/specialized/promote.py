"""Compute tiles of fp8 operands with a second accumulator, in the partitions of ``multiply``.

The tensor cores of Hopper add products of fp8 with reduced precision. Here they sum one step, 128 elements of K. The
partial sum is then added to an accumulator in fp32. With block-wise scales it is multiplied by the scales of the step
first.

The accumulator of HALF_M rows of a tile has 128 registers of a thread, so a step is multiplied in two products of
HALF_N columns, one after the other, which share 64 registers. While one partition adds a product, the other one has the
tensor cores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tdkernels.ops.common.specialized.layout import FP8_LAYOUT, FREE, HALF_LAYOUT, HALF_M, HALF_N, await_operands
from tdkernels.ops.common.specialized.output import pass_kept


@gluon.jit
def _product(memory, stage, WHICH: gl.constexpr, side: gl.constexpr):
    """Start to multiply a step of HALF_M rows and HALF_N columns. It is complete after ``warpgroup_mma_wait``."""
    x, w, _, _, _, _ = memory
    weight = w.index(stage).slice(side * HALF_N, HALF_N, 0).permute((1, 0))
    nothing = gl.zeros((HALF_M, HALF_N), gl.float32, FP8_LAYOUT)
    return warpgroup_mma(x.index(2 * stage + WHICH), weight, nothing, use_acc=False, is_async=True)


@gluon.jit
def _add(total, product, of_rows, of_columns, FACTORS: gl.constexpr):
    """Return ``total`` plus a product. With FACTORS it is multiplied by the scales.

    of_rows, of_columns: scales [HALF_M]; all elements of ``of_columns`` are equal
    """
    product = gl.convert_layout(product, HALF_LAYOUT, assert_trivial=True)
    if FACTORS is None:
        total += product
    else:
        total += product * (of_rows * of_columns)[:, None]
    return total


@gluon.jit
def _step(
    memory, bars, sums, factors, turn, kept, WHICH: gl.constexpr, SIDES: gl.constexpr, FACTORS: gl.constexpr,
    PASS_KEPT: gl.constexpr,
):
    """Add a step of K, number ``turn`` of all tiles, to the sums.

    Return (first half and last half of the sums, number of halves of tiles so far).

    With PASS_KEPT the half that was kept is passed on while the last product runs. kept: (half, item, number of halves)
    """
    left, right = sums
    of_rows, of_left, of_right = factors
    half, half_item, number = kept
    stage = await_operands(memory, bars, turn)
    product = _product(memory, stage, WHICH, 0)
    if SIDES == 2:
        left = _add(left, warpgroup_mma_wait(0, deps=[product]), of_rows, of_left, FACTORS)
        product = _product(memory, stage, WHICH, 1)
    if PASS_KEPT:
        number = pass_kept(memory, bars, half, half_item, number, WHICH)
    product = warpgroup_mma_wait(0, deps=[product])
    mbarrier.arrive(bars.index(FREE + stage), count=1)
    if SIDES == 2:
        right = _add(right, product, of_rows, of_right, FACTORS)
    else:
        left = _add(left, product, of_rows, of_left, FACTORS)
    return left, right, number


@gluon.jit
def _load_factors(place, step, epilogue, WHICH: gl.constexpr, FACTORS: gl.constexpr):
    """Return the factors of a step, or unused numbers without FACTORS."""
    if FACTORS is None:
        return step, step, step
    else:
        return FACTORS(place, step, WHICH, epilogue)


@gluon.jit
def begin_promoted(
    memory, bars, place, epilogue, first, state, WHICH: gl.constexpr, SIDES: gl.constexpr, FACTORS: gl.constexpr
):
    """Multiply step ``first`` of K of a tile, and pass on the half that was kept.

    Return (first half and last half of the sums, numbers of steps and of halves of tiles so far). With SIDES = 1 the
    last half is zero.
    """
    turn, number, kept, kept_item = state
    nothing = gl.zeros((HALF_M, HALF_N), gl.float32, HALF_LAYOUT)
    factors = _load_factors(place, first, epilogue, WHICH, FACTORS)
    left, right, number = _step(
        memory, bars, (nothing, nothing), factors, turn, (kept, kept_item, number), WHICH, SIDES, FACTORS, True
    )
    return left, right, turn + 1, number


@gluon.jit
def end_promoted(
    memory, bars, place, epilogue, sums, turn, first, steps, WHICH: gl.constexpr, SIDES: gl.constexpr,
    FACTORS: gl.constexpr,
):
    """Multiply ``steps`` - 1 steps of a tile after step ``first``. Return (complete sums, number of steps so far)."""
    left, right = sums
    last = first + steps - 1
    following = _load_factors(place, gl.minimum(first + 1, last), epilogue, WHICH, FACTORS)
    for step in range(first + 1, first + steps):
        factors = following
        # In flight during the products of this step.
        following = _load_factors(place, gl.minimum(step + 1, last), epilogue, WHICH, FACTORS)
        left, right, _ = _step(
            memory, bars, (left, right), factors, turn, (turn, turn, turn), WHICH, SIDES, FACTORS, False
        )
        turn += 1
    return left, right, turn
