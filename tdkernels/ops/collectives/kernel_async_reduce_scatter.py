"""Kernels of ``async_reduce_scatter`` that add the received parts."""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.fp8_groups import block_of_rows, quantized_part_of
from tdkernels.ops.common.gemm_tile import as_aligned
from tdkernels.ops.common.rank_reduce import reduce_in_rank_order


@td.jit(do_not_specialize=["n", "width", "slot_bytes"])
def add_parts_kernel(
    ctx, own_ptr, bias_ptr, out_ptr, n, width, slot_bytes,
    RANKS: tl.constexpr, ALIGNED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Add the parts of all peers to this rank's part, in fp32 and in rank order, then a bias [width].

    A part has ``n`` elements in rows of ``width``. The part of rank r is at offset ``r * slot_bytes`` of half 0, and an
    ``await_kernel`` has waited for it. ``out_ptr`` may be ``own_ptr``.
    """
    DTYPE: tl.constexpr = own_ptr.dtype.element_ty
    ITEM_BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    me = td.rank(ctx)
    parts = td.data_at(ctx, 0, me)
    slot_bytes = tl.cast(slot_bytes, tl.int64)
    n = tl.cast(n, tl.int64)
    n = n // 8 * 8 if ALIGNED else n
    offs = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), ((n + BLOCK - 1) // BLOCK).to(tl.int32), tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * BLOCK
        mask = offs < n - start
        own = td.pointer_to(own_ptr.to(tl.int64) + start * ITEM_BYTES, DTYPE, ALIGNED)
        ours = td.to_float32(tl.load(own + offs, mask=mask, other=0.0))
        total = reduce_in_rank_order(parts + start * ITEM_BYTES, slot_bytes, offs, mask, ours, me, RANKS, DTYPE)
        if HAS_BIAS:
            column = (start % width).to(tl.int32) + offs
            total += td.to_float32(tl.load(bias_ptr + column % width, mask=mask, other=0.0))
        out = td.pointer_to(out_ptr.to(tl.int64) + start * ITEM_BYTES, DTYPE, ALIGNED)
        tl.store(out + offs, td.from_float32(total, DTYPE), mask=mask)


@td.jit(do_not_specialize=["rows", "width", "row_bytes", "slot_bytes"])
def add_quantized_parts_kernel(
    ctx, own_ptr, bias_ptr, rows, width, row_bytes, slot_bytes,
    RANKS: tl.constexpr, ALIGNED: tl.constexpr, HAS_BIAS: tl.constexpr, CONVERTS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Do the same as ``add_parts_kernel`` for parts in packed rows of ``row_bytes``; this rank's part is not quantized.

    ALIGNED: the rows of this rank's part begin at multiples of 16 bytes and ``width`` is a multiple of 16.
    """
    DTYPE: tl.constexpr = own_ptr.dtype.element_ty
    ITEM_BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    me = td.rank(ctx)
    parts = td.data_at(ctx, 0, me)
    slot_bytes = tl.cast(slot_bytes, tl.int64)
    width = as_aligned(width, ALIGNED)
    offs = tl.arange(0, BLOCK)
    for item in range(tl.program_id(0), rows * ((width + BLOCK - 1) // BLOCK), tl.num_programs(0)):
        row, column, codes_at, scales_at = block_of_rows(item, width, row_bytes, BLOCK)
        at, left = (parts + codes_at, parts + scales_at), width - column
        own = td.pointer_to(own_ptr.to(tl.int64) + (row * width + column) * ITEM_BYTES, DTYPE, ALIGNED)
        ours = td.to_float32(tl.load(own + offs, mask=offs < left, other=0.0))
        total = tl.full((BLOCK,), 0.0, tl.float32)
        for first in tl.static_range(0, RANKS, 4):  # four parts are loaded at a time, see ``reduce_in_rank_order``
            part0 = quantized_part_of(first, me, RANKS, at, slot_bytes, left, ours, CONVERTS, BLOCK)
            part1 = quantized_part_of(first + 1, me, RANKS, at, slot_bytes, left, ours, CONVERTS, BLOCK)
            part2 = quantized_part_of(first + 2, me, RANKS, at, slot_bytes, left, ours, CONVERTS, BLOCK)
            part3 = quantized_part_of(first + 3, me, RANKS, at, slot_bytes, left, ours, CONVERTS, BLOCK)
            total += part0
            total += part1
            total += part2
            total += part3
        if HAS_BIAS:
            total += td.to_float32(tl.load(bias_ptr + column + offs, mask=offs < left, other=0.0))
        tl.store(own + offs, td.from_float32(total, DTYPE), mask=offs < left)
