"""Kernels that quantize a matrix to fp8: codes and scales, or the codes of the transposed matrix.

    kernel                      scales                                   program
    quantize_rows_kernel        one per row of x                         a few whole rows
    quantize_columns_kernel     one per column of x, few rows            a few whole columns
    largest_kernel              none: it finds the largest magnitudes    one tile after another of some columns
    quantize_tiles_kernel       all others                               one tile

ALIGNED: the rows of x and of the codes are multiples of 16 elements, and so is the stride of x.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.fp8_codes import magnitude_bits, scale_of_bits, scaled_codes
from tdkernels.ops.common.gemm_tile import as_aligned

# The argument AXIS of quantize_tiles_kernel: which elements of a tile share a scale.
ROW = tl.constexpr(1)  # a row of the tile
COLUMN = tl.constexpr(0)  # a column of the tile
TILE = tl.constexpr(2)  # the whole tile
GIVEN = tl.constexpr(3)  # all tiles do, and the scale is given
MATRIX = tl.constexpr(4)  # all tiles do; largest_kernel has found the largest magnitude
WHOLE_COLUMN = tl.constexpr(5)  # a column of x; largest_kernel has found the largest magnitudes


@td.jit
def _load_tile(x_ptr, row, column, rows, columns, stride):
    """Load the elements at (row, column) as fp32; 0 outside of the matrix."""
    offs = row[:, None].to(tl.int64) * stride + column[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    return td.to_float32(tl.load(x_ptr + offs, mask=mask, other=0.0))


@td.jit
def _store_tile(codes_ptr, codes, row, column, rows, columns, TRANSPOSE: tl.constexpr):
    """Store the codes of the elements at (row, column), in rows or in columns of the codes."""
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    if TRANSPOSE:
        offs = column[None, :].to(tl.int64) * rows + row[:, None]
    else:
        offs = row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(codes_ptr + offs, codes, mask=mask)


@td.jit(do_not_specialize=["rows", "columns", "stride"])
def quantize_rows_kernel(
    x_ptr, codes_ptr, scale_ptr, rows, columns, stride,
    FORMAT: tl.constexpr, ALIGNED: tl.constexpr, ONE_PASS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Quantize x [rows, columns] with a scale per row. ONE_PASS: a row has at most BLOCK_C elements, read once."""
    columns, stride = as_aligned(columns, ALIGNED), as_aligned(stride, ALIGNED)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    lane = tl.arange(0, BLOCK_C)
    if ONE_PASS:
        x = _load_tile(x_ptr, row, lane, rows, columns, stride)
        scale = scale_of_bits(td.max_of(magnitude_bits(x), 1), FORMAT)
        codes = scaled_codes(x, scale[:, None], FORMAT, x_ptr.dtype.element_ty)
        _store_tile(codes_ptr, codes, row, lane, rows, columns, False)
    else:
        largest = tl.full((BLOCK_R, BLOCK_C), 0, tl.int32)
        for first in range(0, columns, BLOCK_C):
            x = _load_tile(x_ptr, row, first + lane, rows, columns, stride)
            largest = tl.maximum(largest, magnitude_bits(x))
        scale = scale_of_bits(td.max_of(largest, 1), FORMAT)
        for first in range(0, columns, BLOCK_C):
            x = _load_tile(x_ptr, row, first + lane, rows, columns, stride)
            codes = scaled_codes(x, scale[:, None], FORMAT, x_ptr.dtype.element_ty)
            _store_tile(codes_ptr, codes, row, first + lane, rows, columns, False)
    tl.store(scale_ptr + row, scale, mask=row < rows)


@td.jit(do_not_specialize=["rows", "columns", "stride"])
def quantize_columns_kernel(
    x_ptr, codes_ptr, scale_ptr, rows, columns, stride,
    FORMAT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Quantize x.T with a scale per column of x, which has at most BLOCK_R rows; the codes are [columns, rows]."""
    columns, stride, rows = as_aligned(columns, ALIGNED), as_aligned(stride, ALIGNED), as_aligned(rows, ALIGNED)
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.arange(0, BLOCK_R)
    x = _load_tile(x_ptr, row, column, rows, columns, stride)
    scale = scale_of_bits(td.max_of(magnitude_bits(x), 0), FORMAT)
    codes = scaled_codes(x, scale[None, :], FORMAT, x_ptr.dtype.element_ty)
    _store_tile(codes_ptr, codes, row, column, rows, columns, True)
    tl.store(scale_ptr + column, scale, mask=column < columns)


@td.jit(do_not_specialize=["rows", "columns", "stride", "parts"])
def largest_kernel(
    x_ptr, largest_ptr, rows, columns, stride, parts,
    ALIGNED: tl.constexpr, BY_COLUMN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Find the largest magnitude of each column of x [rows, columns], or of x; ``largest_ptr`` has zeros before.

    The magnitudes are bits, see ``magnitude_bits``. There are ``parts`` programs for BLOCK_C columns. They take turns
    in tiles, so that all programs read x from its first to its last row.
    """
    columns, stride = as_aligned(columns, ALIGNED), as_aligned(stride, ALIGNED)
    tiles_c = (columns + BLOCK_C - 1) // BLOCK_C
    part, tile_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    column = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
    largest = tl.full((BLOCK_R, BLOCK_C), 0, tl.int32)
    for first in range(part * BLOCK_R, rows, parts * BLOCK_R):
        x = _load_tile(x_ptr, first + tl.arange(0, BLOCK_R), column, rows, columns, stride)
        largest = tl.maximum(largest, magnitude_bits(x))
    of_columns = td.max_of(largest, 0)
    if BY_COLUMN:
        tl.atomic_max(largest_ptr + column, of_columns, mask=column < columns, sem="relaxed")
    else:
        tl.atomic_max(largest_ptr, td.max_of(of_columns, 0), sem="relaxed")


@td.jit(do_not_specialize=["rows", "columns", "stride"])
def quantize_tiles_kernel(
    x_ptr, codes_ptr, scale_ptr, known_ptr, rows, columns, stride,
    FORMAT: tl.constexpr, ALIGNED: tl.constexpr, AXIS: tl.constexpr, TRANSPOSE: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Quantize a tile of x [rows, columns], or of x.T, and store its scales.

    scale_ptr: the scales are stored there, one per tile and row of the codes with ROW or COLUMN, one per tile with TILE
    known_ptr: the scale with GIVEN; the largest magnitudes with MATRIX and WHOLE_COLUMN; None otherwise
    """
    ALIGNED_ROWS: tl.constexpr = ALIGNED and TRANSPOSE
    columns, stride, rows = as_aligned(columns, ALIGNED), as_aligned(stride, ALIGNED), as_aligned(rows, ALIGNED_ROWS)
    tiles_r, tiles_c = (rows + BLOCK_R - 1) // BLOCK_R, (columns + BLOCK_C - 1) // BLOCK_C
    tile = tl.program_id(0)
    if AXIS == MATRIX or AXIS == WHOLE_COLUMN:
        # largest_kernel has read the last rows last: the L2 cache still has them.
        tile = tiles_r * tiles_c - 1 - tile
    tile_r, tile_c = tile // tiles_c, tile % tiles_c
    row, column = tile_r * BLOCK_R + tl.arange(0, BLOCK_R), tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
    x = _load_tile(x_ptr, row, column, rows, columns, stride)
    if AXIS == GIVEN:
        each = tl.load(known_ptr + tl.full((1, 1), 0, tl.int32))
    elif AXIS == MATRIX:
        scale = scale_of_bits(tl.load(known_ptr + tl.full((1,), 0, tl.int32)), FORMAT)
        tl.store(scale_ptr + tl.arange(0, 1), scale, mask=tl.full((1,), tile, tl.int32) == 0)
        each = scale[:, None]
    elif AXIS == WHOLE_COLUMN:
        scale = scale_of_bits(tl.load(known_ptr + column, mask=column < columns, other=0), FORMAT)
        tl.store(scale_ptr + column, scale, mask=(column < columns) & (tile_r == 0))
        each = scale[None, :]
    elif AXIS == ROW:
        scale = scale_of_bits(td.max_of(magnitude_bits(x), 1), FORMAT)
        tl.store(scale_ptr + row.to(tl.int64) * tiles_c + tile_c, scale, mask=row < rows)
        each = scale[:, None]
    elif AXIS == COLUMN:
        scale = scale_of_bits(td.max_of(magnitude_bits(x), 0), FORMAT)
        tl.store(scale_ptr + column.to(tl.int64) * tiles_r + tile_r, scale, mask=column < columns)
        each = scale[None, :]
    else:
        largest = td.max_of(td.max_of(magnitude_bits(x), 1), 0)
        scale = scale_of_bits(tl.full((1,), 0, tl.int32) + largest, FORMAT)
        place = tile_c * tiles_r + tile_r if TRANSPOSE else tile_r * tiles_c + tile_c
        tl.store(scale_ptr + place + tl.arange(0, 1), scale)
        each = scale[:, None]
    codes = scaled_codes(x, each, FORMAT, x_ptr.dtype.element_ty, AXIS != GIVEN)
    _store_tile(codes_ptr, codes, row, column, rows, columns, TRANSPOSE)
