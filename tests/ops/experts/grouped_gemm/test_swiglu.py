"""The kernels of SwiGLU and of its gradient, without a GEMM."""

import math

import pytest
import torch

from tdkernels.ops.experts.grouped_gemm import launch
from tdkernels.ops.experts.grouped_gemm.dispatch import swiglu_ref
from tdkernels.ops.experts.grouped_gemm.swiglu import ACTIVATIONS
from tests.support.dense_oracle import assert_close
from tests.support.ranks import device, on_ranks


def computes_swiglu_of_wide_rows(activation):
    """Check SwiGLU and its gradient for rows with more columns than one program processes at a time."""
    dh, pre = torch.randn(3, 1030), torch.randn(3, 2060)
    expected = []
    for dtype in (torch.float64, torch.float32):
        operand = pre.to(dtype, copy=True).requires_grad_()
        h = swiglu_ref(operand, activation)
        h.backward(dh.to(dtype))
        expected.append((h.detach()[:2], operand.grad[:2]))
    splits = torch.tensor([1, 0, 1], dtype=torch.int32, device=device())
    got = launch.swiglu(pre.to(device()), splits, activation)
    of_pre = launch.swiglu_backward(dh.to(device()), pre.to(device()), splits, activation)
    for name, found, *both in zip(("h", "dpre"), (got, of_pre), *expected, strict=True):
        assert_close(name, found[:2].cpu(), *both)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_swiglu_of_wide_rows(activation):
    on_ranks(1, computes_swiglu_of_wide_rows, activation)


def computes_swiglu_of_extreme_gates(activation):
    """Compare with fp64 down to the gate below which the sigmoid is less than 2**-126, and may be 0."""
    gates = [0.0, -0.0, 1e-30, 80.0, 100.0, 1e30, math.inf, -1e-30, -80.0, -87.2, -87.5, -89.0, -1e30, math.nan]
    gates = torch.tensor(gates)
    up, dh = torch.full_like(gates, 0.5), torch.full_like(gates, 0.25)
    pre = torch.stack([gates, up]).flatten() if activation == "swiglu" else torch.stack([gates, up], 1).flatten()
    splits = torch.tensor([1], dtype=torch.int32, device=device())
    h = launch.swiglu(pre[None].to(device()), splits, activation)[0].cpu()
    of_pre = launch.swiglu_backward(dh[None].to(device()), pre[None].to(device()), splits, activation)[0].cpu()
    of_gate, of_up = of_pre.view(2, -1) if activation == "swiglu" else of_pre.view(-1, 2).T
    wide = gates.double()
    share = wide.sigmoid()
    expected = wide * share * 0.5, 0.125 * share * (1 + wide * (1 - share)), 0.25 * wide * share
    for name, found, exact in zip(("h", "gate", "up"), (h, of_gate, of_up), expected, strict=True):
        for gate, one, other in zip(gates.tolist(), found.tolist(), exact.tolist(), strict=True):
            if gate == math.inf and name == "gate":
                assert math.isnan(one), "infinity times 0"
            elif math.isnan(other):
                assert math.isnan(one)
            elif gate < -87.3:
                assert abs(one) <= 100 * 2.0**-126, (name, gate, one)
            else:
                assert one == other or abs(one - other) <= 2e-5 * abs(other), (name, gate, one, other)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_swiglu_of_extreme_gates(activation):
    on_ranks(1, computes_swiglu_of_extreme_gates, activation)
