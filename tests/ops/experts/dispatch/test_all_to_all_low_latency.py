"""all_to_all of few rows in one launch: as test_all_to_all.py, with a bound on the rows of a rank."""

import pytest
import torch

from tdkernels import EpConfig
from tests.ops.experts.dispatch import all_to_all_low_latency_cases as direct
from tests.ops.experts.dispatch.all_to_all_cases import BF16, FP16, FP32, SMALL
from tests.ops.experts.dispatch.test_all_to_all import BITS
from tests.support.ranks import DEVICE, on_ranks


@pytest.mark.parametrize("world_size, experts_each, changes", [
    (1, 3, None), (2, 1, None), (2, 3, SMALL), (3, 1, SMALL), (3, 2, None), (4, 1, None),
], ids=str)
def test_rows_go_there_and_back(world_size, experts_each, changes):
    on_ranks(world_size, direct.moves, BITS, experts_each, changes)


def test_scales():
    on_ranks(3, direct.sends_scales_along, [(FP32, ()), (FP32, (3,)), (torch.uint8, (5,)), (torch.int64, ())])


@pytest.mark.parametrize("world_size, dtype, experts_each, changes", [
    (1, FP32, 2, None), (2, BF16, 1, SMALL), (3, FP16, 2, None), (3, FP32, 1, {**SMALL, "combine": "per_expert"}),
], ids=str)
def test_gradient(world_size, dtype, experts_each, changes):
    on_ranks(world_size, direct.has_a_gradient, dtype, experts_each, changes)


@pytest.mark.parametrize("config, most", [(EpConfig(direct_tokens=0, num_senders=2, num_receivers=2), 40), (None, 300)])
def test_the_other_way(config, most):
    on_ranks(2, direct.counts_first, config, most)


@pytest.mark.parametrize("world_size, experts_each", [(1, 4), (3, 1), (3, 2)])
def test_capacity(world_size, experts_each):
    on_ranks(world_size, direct.keeps_to_a_capacity, experts_each)


@pytest.mark.parametrize("what", ["negative", "sum too large"])
def test_wrong_splits_of_one_rank(what):
    on_ranks(3, direct.refuses_splits, what, 1)


@pytest.mark.parametrize("config", [None, EpConfig(direct_tokens=0, num_senders=2, num_receivers=2)],
                         ids=["one launch", "counted first"])
def test_more_rows_than_were_promised(config):
    on_ranks(3, direct.refuses_too_many_rows, config)


def test_bad_input():
    on_ranks(2, direct.refuses)


def test_stress():
    on_ranks(3, direct.endures, *((500, 20) if DEVICE == "cuda" else (8, 4)), seed=0)


def test_subgroups():
    on_ranks(4, direct.uses_subgroups)


def test_disagreement_is_named_on_every_rank():
    on_ranks(3, direct.disagrees)


@pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="needs GPUs")
@pytest.mark.parametrize("world_size", [1, 2])
def test_cuda_graph(world_size):
    on_ranks(world_size, direct.is_captured)
