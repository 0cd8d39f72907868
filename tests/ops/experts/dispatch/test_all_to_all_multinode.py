"""all_to_all in multi-node groups: test bodies of single-node groups, on simulated nodes."""

import pytest

from tests.ops.experts.dispatch import all_to_all_cases
from tests.ops.experts.dispatch.all_to_all_cases import BF16, FP32, SMALL
from tests.ops.experts.dispatch.test_all_to_all import BITS
from tests.support.ranks import DEVICE, on_ranks
from tests.support.simulated_nodes import on_nodes


@pytest.mark.parametrize("world_size, local, experts_each, changes", [
    (4, 2, 2, None), (2, 1, 1, SMALL), (3, 1, 1, None),
], ids=str)
def test_round_trip(world_size, local, experts_each, changes):
    bits = BITS if world_size == 2 else BITS[:2]
    on_ranks(world_size, on_nodes, local, all_to_all_cases.moves, bits, experts_each, changes)


def test_reference():
    on_ranks(4, on_nodes, 2, all_to_all_cases.matches_reference, 2)


def test_scales():
    on_ranks(4, on_nodes, 2, all_to_all_cases.sends_scales, [(FP32, ()), (BF16, (3,))])


@pytest.mark.parametrize("world_size, local, dtype, experts_each, capacity, changes", [
    (4, 2, BF16, 1, 60, None), (3, 1, FP32, 1, None, {**SMALL, "combine": "per_expert"}),
], ids=str)
def test_gradient(world_size, local, dtype, experts_each, capacity, changes):
    on_ranks(world_size, on_nodes, local, all_to_all_cases.computes_gradient, dtype, experts_each, capacity, changes)


@pytest.mark.parametrize("max_tokens", [None, 60])
def test_invalid_splits_of_one_rank(max_tokens):
    on_ranks(2, on_nodes, 1, all_to_all_cases.rejects_invalid_splits, "sum too small", 1, max_tokens)


def test_stress():
    on_ranks(2, on_nodes, 1, all_to_all_cases.stress, *((200, 100) if DEVICE == "cuda" else (5, 5)), 0)
