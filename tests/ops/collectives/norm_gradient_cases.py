"""Test bodies for the gradients of all_reduce_rms_norm and all_reduce_layer_norm, against autograd in fp64."""

import pytest
import torch
from torch.autograd import forward_ad

from tests.ops.collectives.norm_oracle import FP32, NormCase, normalized
from tests.support.ranks import device


def computes_gradients(operator, dtype, changes, weight_dtype=None):
    """Check the gradients for every use of the outputs, and for subsets of the operands that need one."""
    for number, (uses, needed) in enumerate([
        ("yr", "x residual weight bias"), ("y", "x residual weight bias"), ("r", "x residual weight bias"),
        ("yr", "x"), ("y", "weight"), ("yr", "bias residual"),
    ]):
        case = NormCase(operator, (2, 3, 40), dtype, seed=number, weight_dtype=weight_dtype)
        _check_gradients(case, changes, uses, needed.split())
    case = NormCase(operator, (3, 40), dtype, without=("residual", "bias"), weight_dtype=weight_dtype)
    _check_gradients(case, changes, "yr", ["x", "weight"])


def _check_gradients(case, changes, uses, needed):
    operands = dict(zip(("x", "residual", "weight", "bias"), case.operands(), strict=True))
    for name in needed:
        operands[name].requires_grad_()
    y, r = outputs = case.call(changes, operands=tuple(operands.values()))
    case.check(outputs, is_exact=not changes or changes.get("method") != "torch")
    generator = torch.Generator().manual_seed(3)
    grads = [torch.randn(r.shape, generator=generator).to(case.dtype) for _ in range(2)]
    used = [(output, grad) for name, output, grad in zip("yr", outputs, grads, strict=True) if name in uses]
    torch.autograd.backward([output for output, _ in used], [grad.to(device()) for _, grad in used])

    exact_r = r.detach().cpu().double().requires_grad_()
    weight = case.weight.detach().double().requires_grad_()
    bias = None if case.bias is None else case.bias.detach().double().requires_grad_()
    exact_y = normalized(exact_r, weight, bias, case.is_layer_norm)[0]
    exact = {"y": exact_y, "r": exact_r}
    torch.autograd.backward([exact[name] for name in uses], [grads["yr".index(name)].double() for name in uses])
    expected = {"x": exact_r, "residual": exact_r, "weight": weight, "bias": bias}
    for name, operand in operands.items():
        if name not in needed:
            assert operand is None or operand.grad is None
            continue
        if uses == "r" and name in ("weight", "bias"):
            assert operand.grad is None, "r does not depend on it"
            continue
        assert operand.grad.dtype == operand.dtype and operand.grad.shape == operand.shape
        unit = max(torch.finfo(operand.dtype).eps, 2.0**-20)
        exact = expected[name].grad
        error = (operand.grad.cpu().double() - exact).abs()
        # A gradient of x is rounded twice: that of the norm, and its sum with that of r.
        assert (error <= unit * (exact.abs() + 2 * exact.abs().amax())).all(), (case.operator, uses, name)


def rejects_derivatives(operator):
    case = NormCase(operator, (3, 8), FP32)
    x, residual, weight, bias = case.operands()
    x.requires_grad_()
    y, _ = case.call(operands=(x, residual, weight, bias))
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    with torch.no_grad():
        y, r = case.call(operands=(x, residual, weight, bias))
        assert not y.requires_grad and not r.requires_grad
        case.call(None, "fp8", operands=(x, residual, weight, bias))
    with pytest.raises(RuntimeError, match=f'{operator}: quantize="fp8" has no gradient'):
        case.call(None, "fp8", operands=(x, residual, weight, bias))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        case.call(operands=(dual, residual, weight, bias))
