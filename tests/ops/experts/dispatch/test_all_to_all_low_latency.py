"""Low-latency all_to_all: as test_all_to_all.py, with a bound on the rows of a rank and a single launch."""

import pytest
import torch

from tdkernels import EpConfig
from tests.ops.experts.dispatch import all_to_all_low_latency_cases as low_latency
from tests.ops.experts.dispatch.all_to_all_cases import BF16, FP16, FP32, SMALL
from tests.ops.experts.dispatch.test_all_to_all import BITS
from tests.support.ranks import DEVICE, on_ranks


@pytest.mark.parametrize("world_size, experts_each, changes", [
    (1, 3, None), (2, 1, None), (2, 3, SMALL), (3, 1, SMALL), (3, 2, None), (4, 1, None),
], ids=str)
def test_round_trip(world_size, experts_each, changes):
    on_ranks(world_size, low_latency.moves, BITS, experts_each, changes)


def test_scales():
    on_ranks(3, low_latency.sends_scales, [(FP32, ()), (FP32, (3,)), (torch.uint8, (5,)), (torch.int64, ())])


@pytest.mark.parametrize("world_size, dtype, experts_each, changes", [
    (1, FP32, 2, None), (2, BF16, 1, SMALL), (3, FP16, 2, None), (3, FP32, 1, {**SMALL, "combine": "per_expert"}),
], ids=str)
def test_gradient(world_size, dtype, experts_each, changes):
    on_ranks(world_size, low_latency.computes_gradient, dtype, experts_each, changes)


@pytest.mark.parametrize("config, bound", [
    (EpConfig(direct_tokens=0, num_senders=2, num_receivers=2), 40), (None, 300),
])
def test_fallback_to_two_phase(config, bound):
    on_ranks(2, low_latency.falls_back_to_two_phase, config, bound)


@pytest.mark.parametrize("world_size, experts_each", [(1, 4), (3, 1), (3, 2)])
def test_capacity(world_size, experts_each):
    on_ranks(world_size, low_latency.respects_capacity, experts_each)


@pytest.mark.parametrize("what", ["negative", "sum too large"])
def test_invalid_splits_of_one_rank(what):
    on_ranks(3, low_latency.rejects_invalid_splits, what, 1)


@pytest.mark.parametrize("config", [None, EpConfig(direct_tokens=0, num_senders=2, num_receivers=2)],
                         ids=["low latency", "two-phase"])
def test_too_many_rows(config):
    on_ranks(3, low_latency.rejects_too_many_rows, config)


def test_invalid_arguments():
    on_ranks(2, low_latency.rejects_invalid_arguments)


def test_stress():
    on_ranks(3, low_latency.stress, *((500, 20) if DEVICE == "cuda" else (8, 4)), seed=0)


def test_subgroups():
    on_ranks(4, low_latency.uses_subgroups)


def test_disagreement_is_reported_on_every_rank():
    on_ranks(3, low_latency.reports_disagreement)


@pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="needs GPUs")
@pytest.mark.parametrize("world_size", [1, 2])
def test_cuda_graph(world_size):
    on_ranks(world_size, low_latency.replays_in_cuda_graph)
