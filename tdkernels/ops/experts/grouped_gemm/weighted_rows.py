"""Kernel of the gradients of the input of a grouped GEMM whose output rows are multiplied by routing weights."""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.experts.grouped_gemm.swiglu import NONE, gate_and_up, swiglu, swiglu_gradient
from tdkernels.ops.experts.grouped_gemm.tile import rows_of_groups


@td.jit(do_not_specialize=["R", "num_experts"])
def weighted_gradients_kernel(
    dy_ptr, inner_ptr, splits_ptr, choices_ptr, weights_ptr, dinner_ptr, weighted_ptr, dweights_ptr, R, N, num_experts,
    EXPERTS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute the gradients of rows h. Of n programs each one takes every n-th row.

    dy_ptr: [R, N], gradients of rows h before the routing weights are applied
    inner_ptr: h [R, N], or with an activation its input [R, 2 * N], from which h is computed again
    choices_ptr: int32 [R], the assignment of each row, or None if each row has a weight of its own
    weights_ptr: fp32, the routing weight of each assignment
    dinner_ptr: the gradient of ``inner_ptr``, in its shape
    weighted_ptr: [R, N], h times the routing weight of its row
    dweights_ptr: fp32, the gradient of each routing weight, the dot product of a row of h and dy. That of an assignment
        without a row is not written
    """
    rows = td.sum_of(rows_of_groups(splits_ptr, num_experts, R, EXPERTS), 0)
    dtype: tl.constexpr = weighted_ptr.dtype.element_ty
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        choice = row
        if choices_ptr is not None:
            choice = tl.load(choices_ptr + row)
        weight = tl.load(weights_ptr + choice)
        dots = tl.full((BLOCK,), 0.0, tl.float32)
        for first in range(0, N, BLOCK):
            offs = first + tl.arange(0, BLOCK)
            mask = offs < N
            at = tl.cast(row, tl.int64) * N + offs
            dy = td.to_float32(tl.load(dy_ptr + at, mask=mask, other=0.0))
            if ACTIVATION == NONE:
                h = td.to_float32(tl.load(inner_ptr + at, mask=mask, other=0.0))
                tl.store(dinner_ptr + at, td.from_float32(dy * weight, dtype), mask=mask)
            else:
                gate, up, at_gate, at_up = gate_and_up(inner_ptr, row, offs, mask, N, ACTIVATION)
                h = swiglu(gate, up)
                dgate, dup = swiglu_gradient(dy * weight, gate, up)
                tl.store(dinner_ptr + at_gate, td.from_float32(dgate, dtype), mask=mask)
                tl.store(dinner_ptr + at_up, td.from_float32(dup, dtype), mask=mask)
            tl.store(weighted_ptr + at, td.from_float32(h * weight, dtype), mask=mask)
            dots += dy * h
        tl.store(dweights_ptr + choice, td.sum_of(dots, 0))
