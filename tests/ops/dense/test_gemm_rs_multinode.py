"""gemm_rs in groups that span several nodes."""

import pytest

import tdkernels
from tdkernels import Tiles
from tests.ops.dense import cases, multinode_cases
from tests.support.dense_oracle import Case
from tests.support.ranks import on_ranks
from tests.support.simulated_nodes import a_group_on_nodes, thorough
from tests.support.subset import THOROUGH

BF16, FP16, FP32 = cases.DTYPES
FORWARD = {"transport": "forward"}  # the default for few rows is one shot
SMALL = {**FORWARD, "tiles": Tiles(16, 16, 16, 1, 4, 2), "item_tiles": 1}
CONFIGS = {
    "small tiles, sent one by one": SMALL,
    "items of three tiles": {**FORWARD, "tiles": Tiles(32, 64, 16), "item_tiles": 3},
    "items longer than a shard": {**FORWARD, "tiles": Tiles(64, 16, 32, 2, 4, 1), "item_tiles": 9},
    "sums in two halves": {**FORWARD, "tiles": Tiles(16, 128, 32), "item_tiles": 5},
    "direct, ignored": {"transport": "direct"},
    "torch": {"method": "torch"},
}


@pytest.mark.parametrize("world_size, local, dtype, shapes", [
    (4, 2, BF16, [(5, 3, 7), (65, 21, 33)]), (2, 1, FP32, [(19, 29, 21)]), (3, 1, FP16, [(17, 21, 33)]),
], ids=str)
def test_shapes(world_size, local, dtype, shapes):
    on_ranks(world_size, multinode_cases.computes, "gemm_rs", dtype, local, shapes)


@thorough
@pytest.mark.parametrize("world_size, local", [(4, 2), (3, 1)])
def test_every_element_of_minimal_shapes(world_size, local):
    on_ranks(
        world_size, multinode_cases.computes, "gemm_rs", BF16, local, cases.MINIMAL_SHAPES, bias=False, exact=True
    )


@thorough
@pytest.mark.parametrize("config", CONFIGS)
def test_configs(config):
    on_ranks(4, multinode_cases.computes, "gemm_rs", FP16, 2, [(20, 37, 24)], **CONFIGS[config])


@thorough
def test_each_gradient_alone():
    on_ranks(4, multinode_cases.computes_subsets_of_gradients, "gemm_rs", 2)


def test_workspace_is_reused():
    on_ranks(4, multinode_cases.reuses_poisoned_memory, "gemm_rs", 2, [(5, 3, 7), (66, 20, 9), (5, 3, 7)])


@thorough
def test_slow_rank():
    on_ranks(4, multinode_cases.waits_for_a_slow_rank, "gemm_rs", 2)


@pytest.mark.parametrize("world_size, local, seeds, shapes, changes", [
    (4, 2, 50 if THOROUGH else 12, [(1, 1, 1), (2, 3, 1)], {}), (4, 2, 12, [(1, 65, 1)], SMALL),
    (3, 1, 20, [(1, 1, 1)], {}),
], ids=["default", "several tiles", "one rank a node"])
def test_any_network_order(world_size, local, seeds, shapes, changes):
    on_ranks(world_size, multinode_cases.computes_in_any_network_order, "gemm_rs", local, seeds, shapes, **changes)


@thorough
@pytest.mark.parametrize("world_size, local", [(4, 2), (2, 1)])
def test_determinism(world_size, local):
    on_ranks(world_size, multinode_cases.is_deterministic, "gemm_rs", local, BF16, **SMALL)


@pytest.mark.parametrize("world_size, local", [(4, 2), (3, 1)])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_summation_order(dtype, world_size, local):
    on_ranks(world_size, multinode_cases.reduces_in_fixed_order, "gemm_rs", local, dtype)


def test_missing_rank():
    # Rank 0 misses its node peer, rank 3 the sum of the other node, and rank 2 the sum that rank 0 cannot compute.
    assert on_ranks(4, multinode_cases.misses_a_rank, "gemm_rs", 2, 1) == [1, None, 0, 1]


def _rejects_parts_method():
    with a_group_on_nodes(1) as group:
        case = Case("gemm_rs", FP32, 4, 3, 8)
        with pytest.raises(NotImplementedError, match="gemm_rs: runs on one node, .* are on 2 nodes"):
            case.call(group=group, config=tdkernels.GemmRsConfig(method="parts"))
        case.check(case.run(group=group))


def test_parts_method_is_rejected():
    on_ranks(2, _rejects_parts_method)


def test_disagreement():
    on_ranks(2, multinode_cases.reports_disagreement, "gemm_rs", 1)
