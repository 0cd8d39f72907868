"""EPMoE and TPMoE against the unsharded layer, and their checkpoints."""

import pytest
import torch

from tdkernels.nn import Router
from tests.nn import moe_modules
from tests.support.ranks import on_ranks

each_kind = pytest.mark.parametrize("kind", list(moe_modules.KINDS))


@each_kind
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_forward_and_gradients(world_size, kind):
    on_ranks(world_size, moe_modules.computes, kind)


@each_kind
@pytest.mark.parametrize("world_size", [1, 3])
def test_checkpoints(world_size, kind):
    on_ranks(world_size, moe_modules.loads_and_saves_checkpoints, kind)


def test_own_experts_suffice():
    on_ranks(2, moe_modules.loads_own_experts_only)


def test_copies():
    on_ranks(2, moe_modules.copies_module)


@each_kind
def test_invalid_checkpoints(kind):
    on_ranks(2, moe_modules.rejects_invalid_checkpoints, kind)


@each_kind
def test_initial_weights(kind):
    on_ranks(2, moe_modules.initializes_experts_per_rank, kind)


def test_options():
    on_ranks(2, moe_modules.passes_options)


def test_router_is_balanced():
    on_ranks(2, moe_modules.balances_router)


# ---- router ----


@pytest.mark.parametrize("normalize", [True, False])
def test_router(normalize):
    gate = Router(8, 5, 3, normalize=normalize, scale=2.0)
    x = torch.randn(6, 8)
    ids, weights = gate(x)
    scores = torch.softmax(x @ gate.weight.t(), -1)
    expected, expected_ids = torch.topk(scores, 3)
    expected = 2 * (expected / expected.sum(-1, keepdim=True) if normalize else expected)
    assert torch.equal(ids, expected_ids) and weights.dtype == torch.float32
    torch.testing.assert_close(weights, expected)
    weights[:, 0].sum().backward()
    assert gate.weight.grad.any()


def test_bf16_router_has_fp32_scores():
    gate = Router(8, 5, 3, dtype=torch.bfloat16)
    _, weights = gate(torch.randn(6, 8, dtype=torch.bfloat16))
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(1), torch.ones(6))


def test_invalid_router():
    with pytest.raises(ValueError, match="scores must be one of .*, not 'tanh'"):
        Router(8, 4, 2, scores="tanh")
    with pytest.raises(ValueError, match="top_k must be from 1 to num_experts = 4, not 5"):
        Router(8, 4, 5)
    with pytest.raises(ValueError, match="balance needs a Router with balanced=True"):
        Router(8, 4, 2).balance()
