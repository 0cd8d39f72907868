"""all_to_all in groups on several nodes: what is asked of any group."""

import pytest

from tests.nodes import on_nodes
from tests.ops import rows_to_all
from tests.ops.rows_to_all import BF16, FP32, SMALL
from tests.ops.test_all_to_all import BITS
from tests.ranks import DEVICE, on_ranks


@pytest.mark.parametrize("world_size, local, experts_each, changes", [
    (4, 2, 2, None), (2, 1, 1, SMALL), (3, 1, 1, None),
], ids=str)  # fmt: skip
def test_rows_go_there_and_back(world_size, local, experts_each, changes):
    bits = BITS if world_size == 2 else BITS[:2]
    on_ranks(world_size, on_nodes, local, rows_to_all.moves, bits, experts_each, changes)


def test_specification():
    on_ranks(4, on_nodes, 2, rows_to_all.agrees_with_the_specification, 2)


def test_scales():
    on_ranks(4, on_nodes, 2, rows_to_all.sends_scales_along, [(FP32, ()), (BF16, (3,))])


@pytest.mark.parametrize("world_size, local, dtype, experts_each, capacity, changes", [
    (4, 2, BF16, 1, 60, None), (3, 1, FP32, 1, None, {**SMALL, "combine": "per_expert"}),
], ids=str)  # fmt: skip
def test_gradient(world_size, local, dtype, experts_each, capacity, changes):
    on_ranks(world_size, on_nodes, local, rows_to_all.has_a_gradient, dtype, experts_each, capacity, changes)


@pytest.mark.parametrize("max_tokens", [None, 60])
def test_wrong_splits_of_one_rank(max_tokens):
    on_ranks(2, on_nodes, 1, rows_to_all.refuses_splits, "sum too small", 1, max_tokens)


def test_stress():
    on_ranks(2, on_nodes, 1, rows_to_all.endures, *((200, 100) if DEVICE == "cuda" else (5, 5)), 0)
