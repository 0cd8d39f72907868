"""Kernel that converts rows of e4m3 codes with a scale per 128 elements back to floating point."""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.fp8_groups import GROUP
from tdkernels.ops.common.gemm_tile import as_aligned


@td.jit(do_not_specialize=["rows", "columns"])
def dequantize_rows_kernel(
    codes_ptr, scale_ptr, y_ptr, rows, columns,
    CONVERTS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """Multiply BLOCK_R rows of GROUP codes by their scales: y [rows, columns] in its dtype.

    scale_ptr: [rows, ceil(columns / GROUP)]. CONVERTS: as for ``td.from_e4m3``. ALIGNED: rows are multiples of 16
    elements.
    """
    columns = as_aligned(columns, ALIGNED)
    groups = (columns + GROUP - 1) // GROUP
    group = tl.program_id(0) % groups
    row = tl.program_id(0) // groups * BLOCK_R + tl.arange(0, BLOCK_R)
    column = group * GROUP + tl.arange(0, GROUP)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    offs = row[:, None].to(tl.int64) * columns + column[None, :]
    codes = tl.load(codes_ptr + offs, mask=there, other=0)
    scale = tl.load(scale_ptr + row.to(tl.int64) * groups + group, mask=row < rows, other=0.0)
    values = td.from_e4m3(codes, CONVERTS) * scale[:, None]
    tl.store(y_ptr + offs, td.from_float32(values, y_ptr.dtype.element_ty), mask=there)
