"""gemm_ar in groups that span several nodes."""

import pytest

from tdkernels import Tiles
from tdkernels.ops.dense.gemm_ar.launch_multinode import adds_once
from tests.ops.dense import cases, multinode_cases
from tests.support.ranks import on_ranks
from tests.support.simulated_nodes import thorough
from tests.support.subset import THOROUGH

BF16, FP16, FP32 = cases.DTYPES
SMALL = {"exchange": "two_shot", "tiles": Tiles(16, 16, 16, 1, 4, 2), "item_tiles": 1}
CONFIGS = {
    "small tiles, sent one by one": SMALL,
    "items of three tiles": {"exchange": "two_shot", "tiles": Tiles(32, 64, 16), "item_tiles": 3},
    "items longer than the output": {"exchange": "two_shot", "tiles": Tiles(64, 16, 32, 2, 4, 1), "item_tiles": 9},
    "sums in two halves": {"exchange": "two_shot", "tiles": Tiles(16, 128, 32), "item_tiles": 5},
    "one shot, ignored": {"exchange": "one_shot", "tiles": Tiles(16, 64, 32), "split_k": 2},
    "direct, ignored": {"transport": "direct", "num_comm_sms": 1},
    "torch": {"method": "torch"},
}


@pytest.mark.parametrize("world_size, local, dtype, shapes", [
    (4, 2, BF16, [(5, 3, 7), (65, 21, 33)]), (2, 1, FP32, [(19, 29, 21)]), (3, 1, FP16, [(17, 21, 33)]),
], ids=str)
def test_shapes(world_size, local, dtype, shapes):
    on_ranks(world_size, multinode_cases.computes, "gemm_ar", dtype, local, shapes)


@thorough
@pytest.mark.parametrize("world_size, local", [(4, 2), (3, 1)])
def test_every_element_of_minimal_shapes(world_size, local):
    on_ranks(
        world_size, multinode_cases.computes, "gemm_ar", BF16, local, cases.MINIMAL_SHAPES, bias=False, exact=True
    )


@thorough
@pytest.mark.parametrize("config", CONFIGS)
def test_configs(config):
    on_ranks(4, multinode_cases.computes, "gemm_ar", FP16, 2, [(20, 37, 24)], **CONFIGS[config])


def test_workspace_is_reused():
    on_ranks(4, multinode_cases.reuses_poisoned_memory, "gemm_ar", 2, [(5, 3, 7), (66, 20, 9), (5, 3, 7)])


@thorough
def test_slow_rank():
    on_ranks(4, multinode_cases.waits_for_a_slow_rank, "gemm_ar", 2)


@pytest.mark.parametrize("world_size, local, seeds, shapes, changes", [
    (4, 2, 50 if THOROUGH else 12, [(1, 1, 1), (2, 3, 1)], {}), (4, 2, 12, [(1, 65, 1)], SMALL),
    (3, 1, 20, [(1, 1, 1)], {}),
], ids=["default", "several tiles", "one rank a node"])
def test_any_network_order(world_size, local, seeds, shapes, changes):
    on_ranks(world_size, multinode_cases.computes_in_any_network_order, "gemm_ar", local, seeds, shapes, **changes)


@thorough
@pytest.mark.parametrize("world_size, local", [(4, 2), (2, 1)])
def test_determinism(world_size, local):
    on_ranks(world_size, multinode_cases.is_deterministic, "gemm_ar", local, BF16, **SMALL)


@pytest.mark.parametrize("world_size, local", [(4, 2), (3, 1)])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_summation_order(dtype, world_size, local):
    on_ranks(world_size, multinode_cases.reduces_in_fixed_order, "gemm_ar", local, dtype)


# ---- one owner per tile sums all nodes ----


def test_one_owner_sums_large_messages_of_three_or_more_nodes():
    few, many = 1 << 12, 1 << 24
    assert [adds_once(nodes, few) for nodes in (2, 3, 8)] == [False, False, False]
    assert [adds_once(nodes, many) for nodes in (1, 2, 3, 8)] == [False, False, True, True]


@pytest.mark.parametrize("world_size, local, dtype, shapes", [
    (4, 2, BF16, [(5, 3, 7), (65, 21, 33)]), (3, 1, FP16, [(17, 21, 33), (1, 1, 1)]),
    pytest.param(6, 2, BF16, [(65, 21, 33)], marks=thorough),
], ids=str)
def test_one_owner_sums(world_size, local, dtype, shapes):
    on_ranks(world_size, multinode_cases.adding_once, multinode_cases.computes, "gemm_ar", dtype, local, shapes)


@thorough
@pytest.mark.parametrize("config", CONFIGS)
def test_one_owner_sums_configs(config):
    args = ("gemm_ar", FP16, 1, [(20, 37, 24), (70, 66, 9)])
    on_ranks(3, multinode_cases.adding_once, multinode_cases.computes, *args, **CONFIGS[config])


@pytest.mark.parametrize("world_size, local, seeds, shapes, changes", [
    (4, 2, 25, [(1, 1, 1), (2, 3, 1)], {}), (4, 2, 12, [(1, 65, 1)], SMALL), (3, 1, 50, [(1, 1, 1), (2, 65, 1)], SMALL),
], ids=["default", "several tiles", "one rank a node"])
def test_one_owner_sums_in_any_network_order(world_size, local, seeds, shapes, changes):
    args = ("gemm_ar", local, seeds, shapes)
    on_ranks(world_size, multinode_cases.adding_once, multinode_cases.computes_in_any_network_order, *args, **changes)


def test_one_owner_sums_in_reused_workspace():
    args = ("gemm_ar", 1, [(5, 3, 7), (66, 20, 9), (5, 3, 7)])
    on_ranks(3, multinode_cases.adding_once, multinode_cases.reuses_poisoned_memory, *args)


@pytest.mark.parametrize("world_size, local", [(4, 2), (3, 1)])
def test_one_owner_summation_order(world_size, local):
    # The same numbers are summed in the same order, wherever the sum is computed.
    on_ranks(
        world_size, multinode_cases.adding_once, multinode_cases.reduces_in_fixed_order, "gemm_ar", local, BF16, **SMALL
    )


# Rank 0 sums the only tile, rank 2 relays it. Without rank 0, rank 2 misses the total. Without rank 1, rank 0 times out
# and sends nothing, so rank 2 relays nothing.
@pytest.mark.parametrize("missing, missed", [(0, [None, 0, 0, 2]), (1, [1, None, 0, 2])], ids=["adder", "its peer"])
def test_one_owner_misses_a_rank(missing, missed):
    errors = on_ranks(4, multinode_cases.adding_once, multinode_cases.misses_a_rank, "gemm_ar", 2, missing)
    assert errors == missed


def test_missing_rank():
    # Rank 0 owns the only tile of its node and misses its node peer. Rank 2 misses rank 0's sum, rank 3 the total.
    assert on_ranks(4, multinode_cases.misses_a_rank, "gemm_ar", 2, 1) == [1, None, 0, 2]


def test_disagreement():
    on_ranks(2, multinode_cases.reports_disagreement, "gemm_ar", 1)
