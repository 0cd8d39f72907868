"""all_to_all: forward and backward against results computed from the rows and splits of all ranks."""

import pytest
import torch

from tests.ops.experts.dispatch import all_to_all_cases
from tests.ops.experts.dispatch.all_to_all_cases import BF16, FP16, FP32, SMALL
from tests.support.ranks import DEVICE, on_ranks

FP8 = torch.float8_e4m3fn
TORCH = {"method": "torch"}
each_method = pytest.mark.parametrize("changes", [None, TORCH], ids=["default", "torch"])
# One for each kind of splits. Row sizes are multiples of 1, 2, 4, 8 and 16 bytes, and of several blocks.
BITS = [(BF16, 12), (FP8, 301), (FP32, 70), (FP16, 1), (torch.float8_e5m2, 16)]


@pytest.mark.parametrize("world_size, experts_each, changes", [
    (1, 3, None), (2, 1, None), (2, 3, SMALL), (3, 1, SMALL), (3, 2, None), (4, 1, SMALL),
    (1, 3, TORCH), (3, 1, TORCH), (3, 2, TORCH),
], ids=str)
def test_round_trip(world_size, experts_each, changes):
    on_ranks(world_size, all_to_all_cases.moves, BITS, experts_each, changes)


@pytest.mark.parametrize("experts_each", [1, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_reference(world_size, experts_each):
    on_ranks(world_size, all_to_all_cases.matches_reference, experts_each)


@pytest.mark.parametrize("world_size, experts_each", [(1, 4), (3, 1), (3, 2)])
@each_method
def test_capacity(world_size, experts_each, changes):
    on_ranks(world_size, all_to_all_cases.respects_capacity, experts_each, changes)


@pytest.mark.parametrize("world_size", [1, 3])
@each_method
def test_scales(world_size, changes):
    on_ranks(world_size, all_to_all_cases.sends_scales, [
        (FP32, ()), (FP32, (3,)), (BF16, (1,)), (torch.uint8, (5,)), (torch.int64, ()),
    ], changes)


@pytest.mark.parametrize("world_size, dtype, experts_each, capacity, changes", [
    (1, FP32, 2, None, None), (2, BF16, 1, None, SMALL), (3, FP16, 2, 40, None),
    (3, FP32, 1, None, {**SMALL, "combine": "per_expert"}), (3, BF16, 2, 40, TORCH), (1, FP32, 2, None, TORCH),
], ids=str)
def test_gradient(world_size, dtype, experts_each, capacity, changes):
    on_ranks(world_size, all_to_all_cases.computes_gradient, dtype, experts_each, capacity, changes)


@pytest.mark.parametrize("what", [
    "negative", "sum too large", "sum too small", "large", "positive with empty x", "negative with empty x",
])
@each_method
def test_invalid_splits_of_one_rank(what, changes):
    on_ranks(3, all_to_all_cases.rejects_invalid_splits, what, 1, None, changes)


@each_method
def test_invalid_splits_with_a_capacity(changes):
    on_ranks(2, all_to_all_cases.rejects_invalid_splits, "sum too small", 0, 40, changes)


@pytest.mark.parametrize("world_size", [1, 2])
def test_invalid_arguments(world_size):
    on_ranks(world_size, all_to_all_cases.rejects_invalid_arguments)


@each_method
def test_layouts(changes):
    on_ranks(2, all_to_all_cases.takes_any_layout, changes)


@each_method
def test_stress(changes):
    on_ranks(3, all_to_all_cases.stress, *((500, 100) if DEVICE == "cuda" else (8, 5)), seed=0, changes=changes)


@each_method
def test_subgroups(changes):
    on_ranks(4, all_to_all_cases.uses_subgroups, changes)


@pytest.mark.parametrize("what", ["width", "dtype", "num_experts", "max_tokens"])
@each_method
def test_disagreement_is_reported_on_every_rank(what, changes):
    on_ranks(3, all_to_all_cases.reports_disagreement, what, changes)


@pytest.mark.parametrize("what", ["width", "max_tokens"])
def test_mixed_cached_calls_return_no_result(what):
    on_ranks(3, all_to_all_cases.detects_mismatch_of_cached_plans, what)
