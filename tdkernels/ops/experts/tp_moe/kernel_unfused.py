"""Kernels of method "torch" of tp_moe: the steps between torch's grouped GEMMs and collectives."""

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


@td.jit
def moe_gradients_kernel(
    dh_ptr, h_ptr, choices_ptr, weights_ptr, weighted_dh_ptr, weighted_h_ptr, dots_ptr, N, BLOCK: tl.constexpr,
):
    """Multiply a row of dh and of h, each [R, N], by its routing weight, and store the dot product of the two rows.

    choices_ptr: int32 [R], the assignment of each row; weights_ptr: fp32, the routing weight of each assignment
    dots_ptr: fp32 [R], without the routing weight
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    weight = tl.load(weights_ptr + tl.load(choices_ptr + row))
    dots = tl.full((BLOCK,), 0.0, tl.float32)
    for first in range(0, N, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        there, at = offs < N, row * N + offs
        dh = td.to_float32(tl.load(dh_ptr + at, mask=there, other=0.0))
        h = td.to_float32(tl.load(h_ptr + at, mask=there, other=0.0))
        tl.store(weighted_dh_ptr + at, td.from_float32(dh * weight, weighted_dh_ptr.dtype.element_ty), mask=there)
        tl.store(weighted_h_ptr + at, td.from_float32(h * weight, weighted_h_ptr.dtype.element_ty), mask=there)
        dots += dh * h
    tl.store(dots_ptr + row, td.sum_of(dots, 0))
