"""Launches of group_gemm for any number of rows: which calls share one, and that results are right for each number."""

import pytest
import torch

import tdkernels
from tdkernels.ops.common.scaling import Scales
from tdkernels.ops.experts.grouped_gemm.scaled import group_gemm_scaled_ref
from tdkernels.runtime.kernel_launch import local_workspace_of
from tests.runtime.test_launch_cache_users import BF16, FP32, cached_local_launches, draw
from tests.support.ranks import device, on_ranks

# The first launch has fewer or more rows than later ones. All but the last number are rounded up to 48.
ROWS = 40, 33, 48, 47, 130


def splits_of(rows, total):
    """Return three group sizes with a sum of ``total``."""
    return torch.tensor([rows // 3, 0, total - rows // 3], dtype=torch.int32, device=device())


def call_group_gemm(dtype, activation, beyond):
    """Check calls whose groups have ``beyond`` rows more than x, or less.

    Memory after x is NaN. If a launch had too many rows, the weight gradient of groups that go beyond x would be NaN.
    """
    w, counts = draw(1, 3, 64, 48, dtype=dtype), []
    local_workspace_of(device()).launches.clear()
    for seed, rows in enumerate(ROWS):
        memory = torch.full((rows + 40, 48), torch.nan, dtype=dtype, device=device())
        memory[:rows] = draw(seed, rows, 48, dtype=dtype)
        splits, all_used = splits_of(rows, rows + beyond), rows + min(beyond, 0)
        x, weight = memory[:rows].requires_grad_(), w.clone().requires_grad_()
        inputs = x, weight
        y = tdkernels.group_gemm(*inputs, splits, activation=activation)
        dy = draw(seed + 9, *y.shape, dtype=dtype)
        with torch.no_grad():
            direct = tdkernels.group_gemm(x.detach(), w, splits, activation=activation)
        floats = [each.detach().float().requires_grad_() for each in inputs]
        expected = tdkernels.group_gemm_ref(*floats, splits, activation=activation)
        found = y, *torch.autograd.grad(y, inputs, dy)
        wanted = expected, *torch.autograd.grad(expected, floats, dy.float())
        assert torch.equal(direct[:all_used], y[:all_used]) and direct.shape == y.shape
        for mine, theirs in zip(found, wanted, strict=True):
            used = slice(all_used if mine.shape[0] == rows else None)
            error = (mine[used] - theirs[used]).norm() / theirs[used].norm()
            assert error < (1e-5 if dtype is FP32 else 1e-2), (rows, error)
        counts.append([
            cached_local_launches(name) for name in ("group_gemm", "group_gemm weights", "swiglu backward")
        ])
    # The products for y and dx, and with an activation one that also returns its input.
    assert counts[:-1] == [[3, 1, 1] if activation else [2, 1, 0]] * 4
    assert counts[-1] == [2 * count for count in counts[0]]


@pytest.mark.parametrize("beyond", [-2, 5])
@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_group_gemm(dtype, activation, beyond):
    on_ranks(1, call_group_gemm, dtype, activation, beyond)


def call_scaled_group_gemm(scaling, shape):
    w, counts = draw(1, 3, 48, 64, dtype=BF16), []
    local_workspace_of(device()).launches.clear()
    codes, scales = zip(*(tdkernels.quantize_fp8(one, "row") for one in w), strict=True)
    for seed, rows in enumerate((1, *ROWS)):
        x = draw(seed, rows, 64, dtype=BF16)
        of_x, scale_x = tdkernels.quantize_fp8(x, scaling)
        scale_x = scale_x if shape is None else scale_x.reshape(shape)
        splits = splits_of(rows, rows)
        given = of_x, torch.stack(codes), splits
        options = dict(scale_x=scale_x, scale_w=torch.stack(scales))
        for _ in range(2):
            y = tdkernels.group_gemm(*given, **options)
        dequantized = Scales(scale_x.reshape(-1, 1), torch.stack(scales), "row", BF16, False)
        expected = group_gemm_scaled_ref(*given, dequantized)
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=0.1)
        assert y.shape == (rows, 48)
        counts.append(cached_local_launches("group_gemm"))
    # The first call of a size gives a scale of one element two dimensions, later ones do not.
    each = 2 if shape in ((), (1,)) else 1
    assert counts == [each * sizes for sizes in (1, 2, 2, 2, 2, 3)]


@pytest.mark.parametrize("scaling, shape", [("row", None), ("tensor", ()), ("tensor", (1,)), ("tensor", (1, 1))])
def test_group_gemm_in_fp8(scaling, shape):
    on_ranks(1, call_scaled_group_gemm, scaling, shape)
