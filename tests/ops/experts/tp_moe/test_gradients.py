"""The kernels between the GEMMs of the backward of tp_moe, with wide rows and assignments that are dropped."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import MoeTpConfig
from tdkernels.ops.experts.grouped_gemm.launch_weighted_rows import weighted_gradients
from tdkernels.ops.experts.tp_moe import launch_ag_gemm, launch_rows
from tdkernels.symm import get_workspace
from tdkernels.symm.workspace import Workspace
from tests.ops.experts.tp_moe.cases import poisoned_outputs
from tests.support.ranks import device, on_ranks

TOKENS, CHOICES, EXPERTS, DROPPED = 37, 3, 4, 5
BF16, FP32 = torch.bfloat16, torch.float32
# Results are rounded once, from fp32. The gradient of SwiGLU has a few operations of fp32 before.
TOLERANCE = {FP32: dict(rtol=1e-5, atol=1e-5), BF16: dict(rtol=2**-8, atol=1e-5)}
SIZES = [(24, BF16), (1100, BF16), (1030, FP32)]


def _routing(generator):
    """Return (MoeRouting with the last rows unused, routing weights, NaN if the assignment is dropped)."""
    rows = TOKENS * CHOICES
    order = torch.randperm(rows, generator=generator).int()
    splits = torch.tensor([20, 0, rows - DROPPED - 27, 7], dtype=torch.int32)
    weights = torch.rand(rows, generator=generator)
    weights[order[rows - DROPPED :].long()] = torch.nan
    # The assignments of unused rows must not be used.
    choices = torch.cat([order[: rows - DROPPED], torch.full((DROPPED,), 2**30, dtype=torch.int32)])
    routing = SimpleNamespace(splits=splits.to(device()), choices=choices.to(device()))
    return routing, weights.view(TOKENS, CHOICES).to(device())


def _swiglu(inner, activation):
    if activation is None:
        return inner
    gate, up = inner.chunk(2, 1) if activation == "swiglu" else (inner[:, ::2], inner[:, 1::2])
    return torch.nn.functional.silu(gate) * up


def computes_gradients(width, dtype, activation):
    generator = torch.Generator().manual_seed(width)
    routing, weights = _routing(generator)
    rows, used = TOKENS * CHOICES, int(routing.splits.sum())
    inner_width = 2 * width if activation else width
    dy, inner = (torch.randn(rows, columns, generator=generator).to(dtype) for columns in (width, inner_width))
    dy[used:], inner[used:] = torch.nan, torch.nan
    dy, inner = dy.to(device()), inner.to(device())
    with poisoned_outputs():
        dinner, weighted, dweights = weighted_gradients(
            dy, inner, routing.splits, routing.choices, weights, activation
        )
    assert dinner.shape == inner.shape and dinner.dtype == weighted.dtype == dtype and dweights.dtype == FP32

    choices = routing.choices[:used].long()
    weight = weights.flatten()[choices].double().unsqueeze(1)
    leaf, dy = inner[:used].double().requires_grad_(), dy[:used].double()
    h = _swiglu(leaf, activation)
    h.backward(dy * weight)
    torch.testing.assert_close(dinner[:used].double(), leaf.grad, **TOLERANCE[dtype])
    torch.testing.assert_close(weighted[:used].double(), (h * weight).detach(), **TOLERANCE[dtype])
    expected = torch.zeros(rows, dtype=torch.double, device=device())
    expected[choices] = (dy * h).sum(1).detach()
    torch.testing.assert_close(dweights.flatten().double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("activation", [None, "swiglu", "swiglu_interleaved"])
@pytest.mark.parametrize("width, dtype", SIZES, ids=str)
def test_gradients(width, dtype, activation):
    on_ranks(1, computes_gradients, width, dtype, activation)


def gathers_rows(tokens, width, dtype, drops):
    """Compare the rows of ``rows_of_workspace`` with those that the kernel of moe_ag_gemm made.

    Each call has other tokens, and the calls alternate between the halves.
    """
    group, rank = dist.group.WORLD, dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    w = torch.randn(EXPERTS, 16, width, generator=torch.Generator().manual_seed(99)).to(dtype).to(device())
    ids = torch.randint(-1 if drops else 0, EXPERTS, (tokens, CHOICES), generator=generator).to(device())
    config = MoeTpConfig(tiles=tdkernels.Tiles(16, 16, 16), num_comm_sms=2, chunk_rows=16, stages=2)
    x = torch.randn(tokens, width, generator=generator).to(dtype).to(device())
    _, routing = tdkernels.moe_ag_gemm(x, ids, w, group=group, config=config)
    used, workspace = int(routing.splits.sum()), get_workspace(group, x.device, "moe_ag_gemm")
    for _ in range(4):
        x = torch.randn(tokens, width, generator=generator).to(dtype).to(device())
        made = launch_ag_gemm.launch(x, w, routing, config, keep_rows=True)
        with poisoned_outputs(), mock.patch.object(Workspace, "extend_launch") as extend_launch:
            rows = launch_rows.rows_of_workspace(x, routing, workspace)
        extend_launch.assert_called_once_with()
        assert rows.shape == made.rows.shape and torch.equal(rows[:used], made.rows[:used])
        everything = torch.empty(dist.get_world_size() * tokens, width, dtype=dtype, device=device())
        dist.all_gather_into_tensor(everything, x)
        assert torch.equal(rows[:used], everything[routing.choices[:used].long() // CHOICES])


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("tokens, width, dtype, drops", [
    (37, 24, BF16, True), (16, 4104, BF16, False), (3, 12, FP32, True), (5, 13, BF16, True),
], ids=str)
def test_rows_of_workspace(world_size, tokens, width, dtype, drops):
    on_ranks(world_size, gathers_rows, tokens, width, dtype, drops)
