"""Scaled fp8 operands in layouts, formats and kinds of scales that differ between the methods of an operator."""

import functools

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tests.ops.dense.scaled_cases import CONFIG_CLASSES, E5M2, ScaledCase
from tests.support.ranks import device, on_ranks

PLAIN = [("ag_gemm", "parts"), ("ag_gemm", "torch"), ("gemm_rs", "parts"), ("gemm_rs", "torch"), ("gemm_ar", "torch")]


def multiplies_any_layout(operator, method):
    """Operands and bias that torch's GEMM cannot read where they are, and two operands in e5m2."""
    case = ScaledCase(operator, 24, 32, 64, ("tensor", "tensor"), dtypes=(E5M2, E5M2))
    config = CONFIG_CLASSES[operator](method=method)
    case.x, case.weight = case.x.t().contiguous().t(), case.weight.t().contiguous().t()
    wide = case.bias.new_full((32, 2), torch.nan)
    wide[:, 0] = case.bias
    case.bias = wide[:, 0]
    case.scale_w = case.scale_w.reshape(1, 1, 1)
    for _ in range(2):
        case.check(case.run(config))
    with torch.autocast(device().type, dtype=torch.bfloat16):
        case.check(case.run(config))


@pytest.mark.parametrize("operator, method", PLAIN)
def test_layouts_of_torch(operator, method):
    on_ranks(2, multiplies_any_layout, operator, method)


def mixes_kinds_of_scales(method):
    """One rank has a tensor-wise scale, the others have row-wise scales."""
    case = ScaledCase("ag_gemm", 24, 32, 64, ("tensor", "row"))
    if dist.get_rank() > 0:
        case.scale_x = case.scale_x.reshape(1, 1).expand(24, 1).contiguous()
    case.check(case.run(None if method is None else CONFIG_CLASSES["ag_gemm"](method=method)))


@pytest.mark.parametrize("method", [None, "parts", "torch"])
def test_kinds_of_scales_of_ranks(method):
    on_ranks(2, mixes_kinds_of_scales, method)


def rejects_wrong_dimensions():
    case = ScaledCase("gemm_rs", 24, 32, 256, ("block", "block"))
    x, scales = case.x.view(2, 12, 256), case.scale_x.view(2, 12, 2)
    call = functools.partial(tdkernels.gemm_rs, x, case.weight, scale_w=case.scale_w)
    for dim in (0, 1):
        with pytest.raises(ValueError, match="gemm_rs: scale_x"):
            call(scale_x=scales.transpose(0, 1), dim=dim)
    call(scale_x=scales, dim=0)
    for _ in range(2):
        with pytest.raises(ValueError, match="gemm_rs: dim must be 0 or 1, not -1"):
            call(scale_x=scales, dim=-1)
    with pytest.raises(ValueError, match="at least 3 dimensions"):
        tdkernels.gemm_rs(case.x, case.weight, scale_x=case.scale_x, scale_w=case.scale_w, dim=1)


def test_wrong_dimensions():
    on_ranks(2, rejects_wrong_dimensions)
