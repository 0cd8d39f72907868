"""flash_decode in groups on several nodes."""

import pytest

from tests.ops.attention.flash_decode import multinode_cases
from tests.ops.attention.flash_decode.test_flash_decode import ON_GPU, SPECS
from tests.support.ranks import on_ranks
from tests.support.simulated_nodes import thorough

# What the interpreter has the time for, of (world size, ranks of a node).
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
each_division = pytest.mark.parametrize("world_size, local", [(4, 2), (2, 1)])
SHAPES = [
    dict(batch=1, heads=2, kv_heads=1, dim=16, keys=1), dict(batch=3, heads=3, kv_heads=3, dim=20, keys=33, tokens=2),
    dict(batch=1, heads=1, kv_heads=1, dim=16, keys=4, tokens=1, window=2),
]


@pytest.mark.parametrize("world_size, local, spec, config", CASES)
def test_everything(world_size, local, spec, config):
    on_ranks(world_size, multinode_cases.computes, SPECS[spec], config, local)


@thorough
@each_division
def test_new_data_in_memory_used_again(world_size, local):
    on_ranks(world_size, multinode_cases.takes_new_data, SHAPES, local)


@each_division
def test_any_order_of_the_network(world_size, local):
    assert on_ranks(world_size, multinode_cases.is_right_on_every_network, local) == [[]] * world_size


def test_ranks_that_deal_tiles_differently():
    on_ranks(4, multinode_cases.deals_tiles_differently, 2, [1, 2])


@thorough
def test_slow_rank():
    on_ranks(4, multinode_cases.waits_for_a_slow_rank, 2)


def test_missing_rank():
    # One tile, of which ranks 0 and 2 are owners.
    spec = dict(batch=1, heads=1, kv_heads=1, dim=16, keys=2, lens="full")
    # Rank 0 misses its node peer, so rank 2 misses what rank 0 makes of both, and rank 3 what rank 2 makes of that.
    assert on_ranks(4, multinode_cases.misses_a_rank, 2, 1, spec) == [1, None, 0, 2]
    assert on_ranks(2, multinode_cases.misses_a_rank, 1, 0, spec) == [None, 0]


@thorough
def test_late_rank():
    # With one rank a node all have sent what is their own, which is right for everybody.
    assert on_ranks(3, multinode_cases.gives_nothing_on_that_it_has_not, 1) == ["missed 2", "missed 2", "right"]
    # Rank 2 gives up. So nobody gets the tiles that it owns, whether or not what it would have needed comes at last.
    answers = on_ranks(4, multinode_cases.gives_nothing_on_that_it_has_not, 2)
    assert answers == ["missed 2", "missed 0", "missed 3", "missed 2"]


@thorough
def test_known_but_different_calls_never_give_a_result():
    on_ranks(2, multinode_cases.is_not_fooled_by_a_known_plan, 1)


def test_disagreement():
    on_ranks(2, multinode_cases.refuses_other_sequences, 1)
