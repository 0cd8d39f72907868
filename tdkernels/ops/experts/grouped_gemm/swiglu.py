"""SwiGLU, silu(gate) * up, and its gradient.

One GEMM computes gate and up: its weight has 2 * I rows. With "swiglu" the first I rows are the gate and the others are
up, as in most checkpoints. With "swiglu_interleaved" gate and up rows alternate, gate first.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.experts.grouped_gemm.tile import rows_of_groups

ACTIVATIONS = (None, "swiglu", "swiglu_interleaved")
NONE, HALVES, INTERLEAVED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NUMBERS = {None: NONE.value, "swiglu": HALVES.value, "swiglu_interleaved": INTERLEAVED.value}

_COLUMNS = 512


@td.jit
def swiglu(gate, up):
    return gate * td.sigmoid(gate) * up


@td.jit
def swiglu_gradient(dh, gate, up):
    """Return (gradient of gate, gradient of up)."""
    share = td.sigmoid(gate)
    return dh * up * share * (1.0 + gate * (1.0 - share)), dh * gate * share


@td.jit
def gate_and_up(pre_ptr, row, offs, mask, I, ACTIVATION: tl.constexpr):
    """Load columns of a row of [R, 2 * I]. Return (gate and up in fp32, index of the gate, index of up)."""
    pre = tl.cast(row, tl.int64) * 2 * I
    if ACTIVATION == HALVES:
        at_gate, at_up = pre + offs, pre + I + offs
    else:
        at_gate, at_up = pre + 2 * offs, pre + 2 * offs + 1
    gate = td.to_float32(tl.load(pre_ptr + at_gate, mask=mask, other=0.0))
    up = td.to_float32(tl.load(pre_ptr + at_up, mask=mask, other=0.0))
    return gate, up, at_gate, at_up


@td.jit(do_not_specialize=["R", "num_experts"])
def swiglu_kernel(
    pre_ptr, splits_ptr, h_ptr, R, I, num_experts,
    EXPERTS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute h [R, I] from pre [R, 2 * I]. Of n programs each one takes every n-th row."""
    rows = td.sum_of(rows_of_groups(splits_ptr, num_experts, R, EXPERTS), 0)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        for first in range(0, I, BLOCK):
            offs = first + tl.arange(0, BLOCK)
            mask = offs < I
            gate, up, _, _ = gate_and_up(pre_ptr, row, offs, mask, I, ACTIVATION)
            h = td.from_float32(swiglu(gate, up), h_ptr.dtype.element_ty)
            tl.store(h_ptr + tl.cast(row, tl.int64) * I + offs, h, mask=mask)


@td.jit(do_not_specialize=["R", "num_experts"])
def swiglu_backward_kernel(
    dh_ptr, pre_ptr, splits_ptr, dpre_ptr, R, I, num_experts,
    EXPERTS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute dpre [R, 2 * I] from dh [R, I] and pre [R, 2 * I]. Of n programs each one takes every n-th row."""
    rows = td.sum_of(rows_of_groups(splits_ptr, num_experts, R, EXPERTS), 0)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        for first in range(0, I, BLOCK):
            offs = first + tl.arange(0, BLOCK)
            mask = offs < I
            gate, up, at_gate, at_up = gate_and_up(pre_ptr, row, offs, mask, I, ACTIVATION)
            dh = td.to_float32(tl.load(dh_ptr + tl.cast(row, tl.int64) * I + offs, mask=mask, other=0.0))
            dgate, dup = swiglu_gradient(dh, gate, up)
            tl.store(dpre_ptr + at_gate, td.from_float32(dgate, dpre_ptr.dtype.element_ty), mask=mask)
            tl.store(dpre_ptr + at_up, td.from_float32(dup, dpre_ptr.dtype.element_ty), mask=mask)
