"""Quantization to e4m3 with one fp32 scale per 128 elements of a row, in plain torch: exact values and error bound."""

import torch
import torch.nn.functional as F

GROUP = 128


def _groups(x):
    """Return x [rows, K] as [rows, ceil(K / 128), 128], padded with zeros."""
    return F.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def _as_rows(groups, like):
    return groups.flatten(1)[:, : like.shape[1]]


def largest(x):
    """Return for each element of x [rows, K] the largest finite magnitude of its group."""
    groups = _groups(x).abs()
    most = torch.where(groups.isfinite(), groups, 0.0).amax(2, keepdim=True)
    return _as_rows(most.expand_as(groups), x)


def quantized(x):
    """Return x [rows, K] after quantization and dequantization, in fp32, bit for bit as the kernels compute it."""
    x = x.float()
    most = largest(x)
    most = torch.where(most > 0, most.clamp(min=2.0**-118), 448.0)
    factor = torch.full_like(most, 448.0) / most  # 448.0 / most would be rounded twice
    codes = torch.where(x.isfinite(), x * factor, torch.nan).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.float() * (most / 448.0)


def bound(x):
    """Return the documented bound on the error of each element of x [rows, K], in fp64, with the rounding of scales."""
    x = x.double()
    return torch.maximum(2.0**-4 * x.abs(), 2.0**-10 / 448 * largest(x)) * (1 + 2.0**-20) + 2.0**-140


def same(got, expected):
    """Return whether two tensors have equal shapes, dtypes and values, NaN being equal to NaN."""
    got = got.cpu()
    equal = (got == expected) | (got.isnan() & expected.isnan()) if got.shape == expected.shape else torch.tensor(False)
    return got.dtype == expected.dtype and bool(equal.all())


def spoil(x):
    """Put zero rows, zero groups, tiny and large magnitudes, NaN and infinities in x [rows >= 8, K], in place."""
    x[0], x[1, : GROUP // 2] = 0.0, 0.0
    x[2] *= 2.0**-12
    x[3] *= 2.0**8
    x[4, 0], x[5, -1], x[6, x.shape[1] // 2] = torch.nan, torch.inf, -torch.inf
    return x
