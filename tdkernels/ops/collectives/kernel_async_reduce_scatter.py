"""Kernel of ``async_reduce_scatter`` that adds the received parts."""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.rank_reduce import reduce_in_rank_order


@td.jit(do_not_specialize=["n", "width", "slot_bytes"])
def add_parts_kernel(
    ctx, own_ptr, bias_ptr, n, width, slot_bytes,
    RANKS: tl.constexpr, ALIGNED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Add the parts of all peers to this rank's part in place, in fp32 and in rank order, then a bias [width].

    A part has ``n`` elements in rows of ``width``. The part of rank r is at offset ``r * slot_bytes`` of half 0, and an
    ``await_kernel`` has waited for it.
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
        tl.store(own + offs, td.from_float32(total, DTYPE), mask=mask)
