"""flash_decode in groups that span several nodes."""

import pytest

from tests.ops.attention.flash_decode import multinode_cases
from tests.ops.attention.flash_decode.test_flash_decode import ON_GPU, SPECS
from tests.support.ranks import on_ranks
from tests.support.simulated_nodes import thorough

# The selection for CPU ranks, by (world size, ranks per node).
ON_CPU = {
    (4, 2): [
        ("odd heads", "default"), ("fp8, latent", "default"), ("window of several blocks", "default"),
        ("no keys of one", "small blocks"), ("more tokens than keys", "one program"), ("fp8 by head, paged", "default"),
        ("pages, all at once", "small blocks"), ("GQA", "torch"),
    ],
    (2, 1): [("tokens", "small blocks")],
    (3, 1): [("window", "small blocks")],
}
CASES = [(*nodes, spec, config) for nodes, cases in ON_CPU.items() for spec, config in cases]
if ON_GPU:
    CASES = [(*nodes, spec, config) for nodes in ON_CPU for spec in SPECS for config in ("default", "small blocks")]
each_topology = pytest.mark.parametrize("world_size, local", [(4, 2), (2, 1)])
SHAPES = [
    dict(batch=1, heads=2, kv_heads=1, dim=16, keys=1), dict(batch=3, heads=3, kv_heads=3, dim=20, keys=33, tokens=2),
    dict(batch=1, heads=1, kv_heads=1, dim=16, keys=4, tokens=1, window=2),
]


@pytest.mark.parametrize("world_size, local, spec, config", CASES)
def test_everything(world_size, local, spec, config):
    on_ranks(world_size, multinode_cases.computes, SPECS[spec], config, local)


@thorough
@each_topology
def test_workspace_is_reused(world_size, local):
    on_ranks(world_size, multinode_cases.reuses_poisoned_memory, SHAPES, local)


@each_topology
def test_any_network_order(world_size, local):
    assert on_ranks(world_size, multinode_cases.computes_in_any_network_order, local) == [[]] * world_size


def test_different_tile_orders():
    on_ranks(4, multinode_cases.computes_with_different_tile_orders, 2, [1, 2])


@thorough
def test_slow_rank():
    on_ranks(4, multinode_cases.waits_for_a_slow_rank, 2)


def test_missing_rank():
    # A single tile, owned by ranks 0 and 2.
    spec = dict(batch=1, heads=1, kv_heads=1, dim=16, keys=2, lens="full")
    # Rank 0 misses its node peer. So rank 2 misses the node result of rank 0, and rank 3 the final result of rank 2.
    assert on_ranks(4, multinode_cases.misses_a_rank, 2, 1, spec) == [1, None, 0, 2]
    assert on_ranks(2, multinode_cases.misses_a_rank, 1, 0, spec) == [None, 0]


@thorough
def test_late_rank():
    # With one rank per node, every rank has sent its own partial result, which is valid.
    assert on_ranks(3, multinode_cases.delays_last_rank, 1) == ["missed 2", "missed 2", "right"]
    # Rank 2 times out. So no rank gets the tiles that rank 2 owns, even if the missing data arrives later.
    answers = on_ranks(4, multinode_cases.delays_last_rank, 2)
    assert answers == ["missed 2", "missed 0", "missed 3", "missed 2"]


@thorough
def test_mismatch_of_cached_plans_is_detected():
    on_ranks(2, multinode_cases.detects_mismatch_of_cached_plans, 1)


def test_disagreement():
    on_ranks(2, multinode_cases.reports_disagreement, 1)
