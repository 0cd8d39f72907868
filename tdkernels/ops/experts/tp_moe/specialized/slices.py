"""Slices of the columns of the output, of the warp-specialized moe_gemm_rs.

They have different widths, in units of some tile columns. Byte i of an int64 argument is the first unit of slice i, or
NO_SLICE. Byte MAX_SLICES is always NO_SLICE. The host computes them, because the kernel needed more registers and
instructions to do so. An argument of several functions:

    slices  (tile rows, first units of all slices, tile columns of a unit)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MAX_SLICES = gl.constexpr(7)
NO_SLICE = gl.constexpr(127)


@gluon.jit
def first_column(slices, slice_id):
    """Return the first tile column of a slice: 0 before the first slice, past the last column after the last one."""
    number = gl.minimum(gl.maximum(slice_id, 0), MAX_SLICES)
    return ((slices[1] >> (8 * number)) & 255).to(gl.int32) * slices[2]


@gluon.jit
def slice_of_column(slices, column):
    """Return the slice that has a tile column."""
    slice_id = 0
    for i in gl.static_range(1, MAX_SLICES):
        slice_id += gl.where(column >= first_column(slices, i), 1, 0)
    return slice_id


@gluon.jit
def columns_of_slice(slices, slice_id, tiles_n):
    """Return the number of tile columns of a slice, which is 0 if there is no such slice."""
    return gl.maximum(gl.minimum(first_column(slices, slice_id + 1), tiles_n) - first_column(slices, slice_id), 0)
