"""The kernel of method "torch" of tp_moe, with rows wider than a block and assignments that are dropped."""

import pytest
import torch

from tdkernels.ops.experts.tp_moe import launch_unfused
from tests.ops.experts.tp_moe.cases import poisoned_outputs
from tests.support.ranks import device, on_ranks

TOKENS, CHOICES = 37, 3
# Results are rounded once, from fp32.
TOLERANCE = {torch.float32: dict(rtol=1e-5, atol=1e-5), torch.bfloat16: dict(rtol=2**-8, atol=1e-5)}


def _operands(width, dtype):
    """Return (y [R, width], row of each assignment, weights), some assignments dropped."""
    generator = torch.Generator().manual_seed(width)
    y = torch.randn(TOKENS * CHOICES, width, generator=generator).to(dtype)
    order = torch.randperm(TOKENS * CHOICES, generator=generator)
    there = order[: TOKENS * CHOICES - 5]
    rows = torch.full((TOKENS * CHOICES,), -1, dtype=torch.int32)
    rows[there] = torch.arange(len(there), dtype=torch.int32)
    weights = torch.rand(TOKENS * CHOICES, generator=generator)
    weights[rows < 0] = torch.nan
    y[len(there) :] = torch.nan
    return y, rows.view(TOKENS, CHOICES), weights.view(TOKENS, CHOICES)


def computes_sums(width, dtype, is_weighted):
    y, rows, weights = _operands(width, dtype)
    taken = y.double()[rows.clamp(min=0).long()] * (weights.unsqueeze(2) if is_weighted else 1)
    expected = taken.where(rows.unsqueeze(2) >= 0, 0.0).sum(1)
    of_rows = weights.to(device()) if is_weighted else None
    with poisoned_outputs():
        found = launch_unfused.sums(y.to(device()), rows.to(device()), of_rows)
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu().double(), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("is_weighted", [True, False], ids=["weighted", ""])
@pytest.mark.parametrize("width, dtype", [(24, torch.bfloat16), (1100, torch.bfloat16), (1030, torch.float32)], ids=str)
def test_sums(width, dtype, is_weighted):
    on_ranks(1, computes_sums, width, dtype, is_weighted)
