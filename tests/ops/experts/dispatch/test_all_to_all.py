"""all_to_all against what all ranks' rows and splits give, there and back, forward and backward."""

import pytest
import torch

from tests.ops.experts.dispatch import all_to_all_cases
from tests.ops.experts.dispatch.all_to_all_cases import BF16, FP16, FP32, SMALL
from tests.support.ranks import DEVICE, on_ranks

FP8 = torch.float8_e4m3fn
BY_TORCH = {"method": "torch"}
each_way = pytest.mark.parametrize("changes", [None, BY_TORCH], ids=["default", "torch"])
# As many as there are kinds of splits, with rows of 1, 2, 4, 8 and 16 bytes' multiples and of several blocks.
BITS = [(BF16, 12), (FP8, 301), (FP32, 70), (FP16, 1), (torch.float8_e5m2, 16)]


@pytest.mark.parametrize("world_size, experts_each, changes", [
    (1, 3, None), (2, 1, None), (2, 3, SMALL), (3, 1, SMALL), (3, 2, None), (4, 1, SMALL),
    (1, 3, BY_TORCH), (3, 1, BY_TORCH), (3, 2, BY_TORCH),
], ids=str)
def test_rows_go_there_and_back(world_size, experts_each, changes):
    on_ranks(world_size, all_to_all_cases.moves, BITS, experts_each, changes)


@pytest.mark.parametrize("experts_each", [1, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_specification(world_size, experts_each):
    on_ranks(world_size, all_to_all_cases.agrees_with_the_specification, experts_each)


@pytest.mark.parametrize("world_size, experts_each", [(1, 4), (3, 1), (3, 2)])
@each_way
def test_capacity(world_size, experts_each, changes):
    on_ranks(world_size, all_to_all_cases.keeps_to_a_capacity, experts_each, changes)


@pytest.mark.parametrize("world_size", [1, 3])
@each_way
def test_scales(world_size, changes):
    on_ranks(world_size, all_to_all_cases.sends_scales_along, [
        (FP32, ()), (FP32, (3,)), (BF16, (1,)), (torch.uint8, (5,)), (torch.int64, ()),
    ], changes)


@pytest.mark.parametrize("world_size, dtype, experts_each, capacity, changes", [
    (1, FP32, 2, None, None), (2, BF16, 1, None, SMALL), (3, FP16, 2, 40, None),
    (3, FP32, 1, None, {**SMALL, "combine": "per_expert"}), (3, BF16, 2, 40, BY_TORCH), (1, FP32, 2, None, BY_TORCH),
], ids=str)
def test_gradient(world_size, dtype, experts_each, capacity, changes):
    on_ranks(world_size, all_to_all_cases.has_a_gradient, dtype, experts_each, capacity, changes)


@pytest.mark.parametrize("what", [
    "negative", "sum too large", "sum too small", "large", "of no rows", "negative of no rows",
])
@each_way
def test_wrong_splits_of_one_rank(what, changes):
    on_ranks(3, all_to_all_cases.refuses_splits, what, 1, None, changes)


@each_way
def test_wrong_splits_with_a_capacity(changes):
    on_ranks(2, all_to_all_cases.refuses_splits, "sum too small", 0, 40, changes)


@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_input(world_size):
    on_ranks(world_size, all_to_all_cases.refuses)


@each_way
def test_layouts(changes):
    on_ranks(2, all_to_all_cases.takes_any_layout, changes)


@each_way
def test_stress(changes):
    on_ranks(3, all_to_all_cases.endures, *((500, 100) if DEVICE == "cuda" else (8, 5)), seed=0, changes=changes)


@each_way
def test_subgroups(changes):
    on_ranks(4, all_to_all_cases.uses_subgroups, changes)


@pytest.mark.parametrize("what", ["width", "dtype", "num_experts", "max_tokens"])
@each_way
def test_disagreement_is_named_on_every_rank(what, changes):
    on_ranks(3, all_to_all_cases.disagrees, what, changes)


@pytest.mark.parametrize("what", ["width", "max_tokens"])
def test_known_but_different_calls_never_give_a_result(what):
    on_ranks(3, all_to_all_cases.is_not_fooled_by_a_known_plan, what)
