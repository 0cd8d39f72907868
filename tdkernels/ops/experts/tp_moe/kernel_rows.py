"""Kernel that copies gathered tokens to their rows, for the weight gradient of tp_moe."""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.experts.grouped_gemm.tile import rows_of_groups


@td.jit(do_not_specialize=["M_shard", "R", "slot_rows", "num_experts"])
def moe_rows_kernel(
    ctx, x_ptr, choices_ptr, splits_ptr, rows_ptr, M_shard, R, K, slot_rows, num_experts,
    CHOICES: tl.constexpr, ALIGNED: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Store the token of each row, [R, K], after a kernel of moe_ag_gemm has gathered the tokens of all ranks.

    The tokens of a peer are in the half of that call, those of this rank in ``x_ptr``. The kernel of moe_ag_gemm has
    waited for all tokens. Of n programs each one takes every n-th row.

    ALIGNED: whether tokens have a multiple of 16 bytes
    """
    me = td.rank(ctx)
    slots = td.data_at(ctx, (td.epoch(ctx) % 2).to(tl.int32), me)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row_bytes = tl.cast(K, tl.int64) * (dtype.primitive_bitwidth // 8)
    rows = td.sum_of(rows_of_groups(splits_ptr, num_experts, R, EXPERTS), 0)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        token = tl.load(choices_ptr + row) // CHOICES
        source = token // M_shard
        shard = tl.where(source == me, x_ptr.to(tl.int64), slots + source.to(tl.int64) * slot_rows * row_bytes)
        token_ptr = td.pointer_to(shard + (token - source * M_shard) * row_bytes, dtype, ALIGNED)
        for first in range(0, K, BLOCK):
            offs = first + tl.arange(0, BLOCK)
            token_part = tl.load(token_ptr + offs, mask=offs < K, other=0.0)
            tl.store(rows_ptr + tl.cast(row, tl.int64) * K + offs, token_part, mask=offs < K)
