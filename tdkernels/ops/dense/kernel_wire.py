"""Kernels that quantize rows for the wire and dequantize them; the format of a packed row is in ``fp8_groups``."""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.fp8_groups import block_of_rows, load_quantized, quantize_groups, store_quantized
from tdkernels.ops.common.gemm_tile import as_aligned


@td.jit(do_not_specialize=["rows", "k", "row_bytes"])
def pack_rows_kernel(
    x_ptr, packed_ptr, rows, k, row_bytes, ALIGNED: tl.constexpr, CONVERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Quantize x [rows, k] to packed rows [rows, row_bytes].

    ALIGNED: k is a multiple of 16, and x begins at a multiple of 16 bytes, as the packed rows always do.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    ITEM_BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    k = as_aligned(k, ALIGNED)
    offs = tl.arange(0, BLOCK)
    for item in range(tl.program_id(0), rows * ((k + BLOCK - 1) // BLOCK), tl.num_programs(0)):
        row, column, codes_at, scales_at = block_of_rows(item, k, row_bytes, BLOCK)
        x = td.pointer_to(x_ptr.to(tl.int64) + (row * k + column) * ITEM_BYTES, DTYPE, ALIGNED)
        block = tl.load(x + offs, mask=offs < k - column, other=0.0)
        codes, scales = quantize_groups(td.to_float32(block), CONVERTS, BLOCK)
        packed = packed_ptr.to(tl.int64)
        store_quantized(packed + codes_at, packed + scales_at, codes, scales, k - column, True, BLOCK)


@td.jit(do_not_specialize=["rows", "k", "row_bytes"])
def unpack_rows_kernel(
    packed_ptr, x_ptr, rows, k, row_bytes, ALIGNED: tl.constexpr, CONVERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute x [rows, k] from packed rows; arguments as for ``pack_rows_kernel``."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    ITEM_BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    k = as_aligned(k, ALIGNED)
    offs = tl.arange(0, BLOCK)
    for item in range(tl.program_id(0), rows * ((k + BLOCK - 1) // BLOCK), tl.num_programs(0)):
        row, column, codes_at, scales_at = block_of_rows(item, k, row_bytes, BLOCK)
        packed = packed_ptr.to(tl.int64)
        values = load_quantized(packed + codes_at, packed + scales_at, k - column, True, CONVERTS, BLOCK)
        x = td.pointer_to(x_ptr.to(tl.int64) + (row * k + column) * ITEM_BYTES, DTYPE, ALIGNED)
        tl.store(x + offs, td.from_float32(values, DTYPE), mask=offs < k - column)
