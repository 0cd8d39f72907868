"""Multiply a tile by the scales of its rows and columns, for row-wise and tensor-wise scaled fp8 operands.

The scales are loaded before the main loop: ``PREPARE`` and ``EPILOGUE`` of ``multiply_partition``. Scales of columns
are then in one register of a thread each, and move to the threads that need them after the main loop.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.ops.common.specialized.layout import HALF_LAYOUT, HALF_M, HALF_N


@gluon.jit
def load_scales(x_ptr, rows, w_ptr, columns, X_STEP: gl.constexpr, W_STEP: gl.constexpr):
    """Return the scales of HALF_M rows, and of the first and the last HALF_N columns of a tile.

    x_ptr, rows: pointer to the scale of the first row, and number of rows that have one
    w_ptr, columns: the same for the columns
    X_STEP, W_STEP: 0 if all rows or columns have the scale at the pointer, otherwise 1
    """
    offs_m = gl.arange(0, HALF_M, layout=gl.SliceLayout(1, HALF_LAYOUT))
    offs_n = gl.arange(0, HALF_N, layout=gl.BlockedLayout([1], [32], [4], [0]))
    of_rows = gl.load(x_ptr + offs_m * X_STEP, mask=offs_m < rows, other=0.0)
    left = gl.load(w_ptr + offs_n * W_STEP, mask=offs_n < columns, other=0.0)
    right = gl.load(w_ptr + (HALF_N + offs_n) * W_STEP, mask=HALF_N + offs_n < columns, other=0.0)
    return of_rows, left, right


@gluon.jit
def times_scales(half, scales, side: gl.constexpr):
    """Return HALF_M rows of half a tile times their scales, then times the scales of their columns."""
    half = gl.convert_layout(half, HALF_LAYOUT, assert_trivial=True) * scales[0][:, None]
    of_columns = scales[1] if side == 0 else scales[2]
    return half * gl.convert_layout(of_columns, gl.SliceLayout(0, HALF_LAYOUT))[None, :]
