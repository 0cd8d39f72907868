"""Scale the rows and columns of a tile, or add a bias to its columns.

The vectors are loaded after the first steps (``PREPARE`` of ``multiply_partition``), and arrive during the main loop. A
vector of columns is then in one register of a thread, and moves to the threads that need it after the main loop
(``EPILOGUE``). Block-wise scales are loaded for each step of K (``FACTORS``).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.ops.common.specialized.layout import HALF_LAYOUT, HALF_M, HALF_N


@gluon.jit
def load_rows(ptr, rows, step):
    """Return a value for each of HALF_M rows.

    ptr, rows: pointer to the value of the first row, and number of rows that have one
    step: distance of the values of two rows; 0 if all rows have the value at the pointer
    """
    offs_m = gl.arange(0, HALF_M, layout=gl.SliceLayout(1, HALF_LAYOUT))
    return gl.load(ptr + offs_m * step, mask=offs_m < rows, other=0.0)


@gluon.jit
def load_half_columns(ptr, columns, step):
    """Return a value for each of HALF_N columns; arguments as for ``load_rows``."""
    offs_n = gl.arange(0, HALF_N, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return gl.load(ptr + offs_n * step, mask=offs_n < columns, other=0.0)


@gluon.jit
def load_columns(ptr, columns, step):
    """Return (values of the first HALF_N columns, of the last ones); arguments as for ``load_rows``."""
    return load_half_columns(ptr, columns, step), load_half_columns(ptr + HALF_N * step, columns - HALF_N, step)


@gluon.jit
def block_scale_pointers(w_ptr, col, columns, blocks):
    """Return the pointers to the scales [blocks] of the weight for each half of the columns of a tile.

    w_ptr: pointer to the scales of column 0
    col, columns: first column of the tile, and number of columns of the weight
    """
    left_ptr = w_ptr + col // HALF_N * blocks
    return left_ptr, left_ptr + gl.where(col + HALF_N < columns, blocks, 0)  # any scale, if the last half is empty


@gluon.jit
def load_block_scales(x_ptr, rows, left_ptr, right_ptr, blocks, step):
    """Return the block-wise scales of a step of K: vectors of HALF_M for the rows and for each half of the columns.

    x_ptr, rows: pointer to the scales of the first row, [rows, blocks], and number of rows that have scales
    left_ptr, right_ptr: pointers to the scales [blocks] of the weight for each half of the columns
    """
    # All threads load the same scale of the weight. Triton 3.6 does not compile the product of a loaded scalar and a
    # tile here. With a mask that all threads share, ptxas would wait for it at once, to keep it in a uniform register.
    of_rows = load_rows(x_ptr + step, rows, blocks)
    return of_rows, load_rows(left_ptr + step, HALF_M, 0), load_rows(right_ptr + step, HALF_M, 0)


@gluon.jit
def _of_half(values, side: gl.constexpr):
    """Return the values of the columns of half a tile, as [1, HALF_N] in fp32."""
    found = values[0] if side == 0 else values[1]
    return gl.convert_layout(found, gl.SliceLayout(0, HALF_LAYOUT)).to(gl.float32)[None, :]


@gluon.jit
def times_scales(half, of_rows, of_columns, side: gl.constexpr):
    """Return HALF_M rows of half a tile times the scales of the rows, then times those of the columns."""
    half = gl.convert_layout(half, HALF_LAYOUT, assert_trivial=True) * of_rows[:, None]
    return half * _of_half(of_columns, side)


@gluon.jit
def scale_tile(half, place, WHICH: gl.constexpr, side: gl.constexpr, prepared):
    """Multiply half a tile by its scales: an EPILOGUE, if PREPARE returns (scales of the rows, of the columns)."""
    of_rows, of_columns = prepared[1]
    return times_scales(half, of_rows, of_columns, side)


@gluon.jit
def plus_bias(half, bias, side: gl.constexpr):
    """Return HALF_M rows of half a tile plus the bias of its columns."""
    return gl.convert_layout(half, HALF_LAYOUT, assert_trivial=True) + _of_half(bias, side)
