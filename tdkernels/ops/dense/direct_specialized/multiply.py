"""The partitions that multiply: ``multiply_partition`` with scales of rows, columns or blocks.

Arguments of several functions:

    place     (first row in x of the first half, first column, first row in x of the second half)
    epilogue  (scales of x, rows of x, scales of the weight, columns, steps of K, X_STEP, W_STEP)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.ops.common.specialized.layout import NO_HALVES
from tdkernels.ops.common.specialized.multiply import multiply_partition
from tdkernels.ops.common.specialized.output import no_epilogue, pass_halves
from tdkernels.ops.common.specialized.vectors import (
    block_scale_pointers,
    load_block_scales,
    load_columns,
    load_rows,
    scale_tile,
)


@gluon.jit
def scales_of_tile(place, WHICH: gl.constexpr, epilogue):
    """Load the scales of the rows and columns of a tile."""
    x_ptr, rows, w_ptr, columns, _, x_step, w_step = epilogue
    row, col = place[2 * WHICH], place[1]
    of_rows = load_rows(x_ptr + row * x_step, rows - row, x_step)
    return of_rows, load_columns(w_ptr + col * w_step, columns - col, w_step)


@gluon.jit
def scales_of_step(place, step, WHICH: gl.constexpr, epilogue):
    """Load the block-wise scales of a step of K of a tile."""
    x_ptr, rows, w_ptr, columns, blocks, _, _ = epilogue
    row, col = place[2 * WHICH], place[1]
    left_ptr, right_ptr = block_scale_pointers(w_ptr, col, columns, blocks)
    return load_block_scales(x_ptr + row.to(gl.int64) * blocks, rows - row, left_ptr, right_ptr, blocks, step)


@gluon.jit
def multiply_tiles(
    memory, bars, steps, epilogue, splits, WHICH: gl.constexpr, W_IS_KN: gl.constexpr, SCALING: gl.constexpr,
    PROMOTE: gl.constexpr, SPLIT_K: gl.constexpr,
):
    """``multiply_partition`` with scales. SCALING: their kind, "row" or "block", or ""."""
    prepare: gl.constexpr = scales_of_tile if SCALING == "row" else None
    apply: gl.constexpr = scale_tile if SCALING == "row" else no_epilogue
    factors: gl.constexpr = scales_of_step if SCALING == "block" else None
    pass_tile: gl.constexpr = pass_halves  # Triton 3.6 does not accept the function itself as an argument
    multiply_partition(
        memory, bars, steps, epilogue, WHICH, NO_HALVES, W_IS_KN, apply, pass_tile, 2, prepare, PROMOTE, factors,
        SPLIT_K, splits,
    )
