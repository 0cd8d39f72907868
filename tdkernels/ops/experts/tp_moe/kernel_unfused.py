"""Kernel of method "torch" of tp_moe, between torch's grouped GEMM and its reduce-scatter."""

import triton.language as tl

from tdkernels import lang as td


@td.jit(do_not_specialize=["num_choices"])
def moe_sums_kernel(
    y_ptr, rows_ptr, weights_ptr, sums_ptr, num_choices, N, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Store the sum of the rows of each token's assignments, weighted or not. One program has BLOCK columns of a token.

    y_ptr: [R, N]; rows_ptr: int32 [M, num_choices], the row of each assignment, or -1; weights_ptr: fp32, as rows_ptr
    sums_ptr: [M, N]; the rows are added in fp32, in the order of the assignments
    """
    token = tl.cast(tl.program_id(0), tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = offs < N
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for choice in range(0, num_choices):
        at = token * num_choices + choice
        row = tl.load(rows_ptr + at)
        y = td.to_float32(tl.load(y_ptr + tl.cast(row, tl.int64) * N + offs, mask=there & (row >= 0), other=0.0))
        if WEIGHTED:
            y *= tl.load(weights_ptr + at, mask=row >= 0, other=0.0)
        total += y
    tl.store(sums_ptr + token * N + offs, td.from_float32(total, sums_ptr.dtype.element_ty), mask=there)
