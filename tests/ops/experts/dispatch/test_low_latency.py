"""Low-latency ep_dispatch (``max_tokens_per_rank``): a single launch that sends tokens without exchanging counts."""

import pytest
import torch

from tdkernels import EpConfig
from tdkernels.launch import RankError
from tdkernels.ops.experts.dispatch.low_latency import can_be_low_latency
from tdkernels.ops.experts.dispatch.request import RoutingShape
from tests.ops.experts.dispatch import low_latency_cases, low_latency_rank_cases
from tests.ops.experts.dispatch.cases import SMALL
from tests.ops.experts.dispatch.low_latency_rank_cases import CACHED_CALLS, DISAGREEMENTS
from tests.ops.experts.dispatch.oracle import BF16, FP16, FP32
from tests.ops.experts.dispatch.rank_cases import check_killed
from tests.ops.experts.dispatch.test_dispatch import BITS, CONFIGS, CPU_CASES, FULL_RANK, SPECS
from tests.support.ranks import DEVICE, dies, fresh_ranks, on_ranks
from tests.support.subset import THOROUGH, turns

ON_GPU = DEVICE == "cuda"


@pytest.mark.parametrize("world_size, config, spec", [
    (*ranks_and_config, spec) for ranks_and_config, specs in CPU_CASES.items() for spec in (SPECS if ON_GPU else specs)
])
def test_forward_and_gradients(world_size, config, spec):
    on_ranks(world_size, low_latency_cases.computes, SPECS[spec], CONFIGS[config], 4)


@pytest.mark.parametrize("world_size", [1, 3])
def test_any_bits(world_size):
    on_ranks(world_size, low_latency_cases.moves_any_bits, BITS)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("width, dtype", [(1, BF16), (127, FP32), (129, BF16), (600, FP16)], ids=str)
def test_quantized(world_size, width, dtype):
    on_ranks(world_size, low_latency_cases.quantizes, width, dtype, SMALL if width > 256 else None)


def test_many_assignments_per_token():
    on_ranks(2, low_latency_cases.counts_many_assignments)


@pytest.mark.parametrize("config, bound, k", [
    (EpConfig(**SMALL, direct_tokens=0), 7, 2), (EpConfig(**SMALL, direct_tokens=7), 8, 2),
], ids=["never", "too many"])
def test_fallback_to_two_phase(config, bound, k):
    on_ranks(2, low_latency_cases.falls_back_to_two_phase, config, bound, k)


def test_low_latency_limits():
    """The number of comparisons grows with k and the number of experts, and a rank has at most 1024 signals."""

    def can(bound, k, experts, ranks):
        shape = RoutingShape("op", bound, k, experts, ranks, max_tokens_per_rank=bound)
        return can_be_low_latency(EpConfig(direct_tokens=1024), shape)

    assert can(1024, 8, 256, 8) and can(1, 8, 1024, 8)
    assert not can(1025, 8, 256, 8)
    assert not can(1, 16, 1024, 8) and not can(1, 512, 8, 8)
    assert "direct_tokens must be" in EpConfig(direct_tokens=1025).illegal(torch.device("cpu"))
    assert "direct_tokens must be" in EpConfig(direct_tokens=True).illegal(torch.device("cpu"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_separate_send_and_receive(world_size):
    on_ranks(world_size, low_latency_cases.sends_and_receives_separately, EpConfig(**SMALL))


@pytest.mark.parametrize("world_size", [1, 3])
def test_overflow(world_size):
    on_ranks(world_size, low_latency_cases.rejects_overflow, FULL_RANK)


@pytest.mark.parametrize("separate_phases", [False, True])
def test_overflow_returns_no_rows(separate_phases):
    on_ranks(2, low_latency_cases.overflow_returns_no_rows, separate_phases)


@pytest.mark.parametrize("wrong, where, id_dtype", [
    (-2, 0, torch.int64), ((1 << 32) + 1, 1, torch.int64), (9, 0, torch.int32)
], ids=str)
def test_invalid_ids(wrong, where, id_dtype):
    on_ranks(3, low_latency_cases.rejects_invalid_ids, wrong, where, id_dtype)


BOTH_STRATEGIES = [EpConfig(**SMALL), EpConfig(**SMALL, direct_tokens=0)]


@pytest.mark.parametrize("config", BOTH_STRATEGIES, ids=["low latency", "two-phase"])
def test_too_many_tokens(config):
    on_ranks(3, low_latency_cases.rejects_too_many_tokens, config)


HOW = [("calls",), ("separate phases",), ("backward",)]
RANKS = [(2, "two-phase"), (3, "low latency"), (2, "low latency"), (3, "two-phase")]


@pytest.mark.parametrize("how, world_size, strategy", turns(HOW, RANKS[: 4 if THOROUGH else 2], 2, THOROUGH))
def test_early_error_keeps_other_ranks_in_step(how, world_size, strategy):
    config = BOTH_STRATEGIES[strategy == "two-phase"]
    on_ranks(world_size, low_latency_cases.keeps_other_ranks_in_step, config, how)


def test_invalid_arguments():
    on_ranks(2, low_latency_cases.rejects_invalid_arguments)


# ---- between the ranks ----


@pytest.mark.parametrize("world_size, calls", [(2, 12), (3, 6), (4, 3)])
def test_stress(world_size, calls):
    on_ranks(world_size, low_latency_rank_cases.stress, *((500, 200) if ON_GPU else (calls, 6)), seed=world_size)


@pytest.mark.parametrize("world_size, calls", [(2, 6), (3, 4)] if ON_GPU else [(3, 4)])
def test_no_rank_overtakes_its_peers_data(world_size, calls):
    on_ranks(world_size, low_latency_rank_cases.runs_ahead_of_peers, calls * (20 if ON_GPU else 1))


def test_workspace_grows():
    on_ranks(2, low_latency_rank_cases.grows_workspace, [(1, 3), ([70, 3, 0, 6], 5), (2, 300), (3, 4)])


def test_subgroups():
    on_ranks(3, low_latency_rank_cases.uses_subgroups)


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_disagreement_is_reported_on_every_rank(what):
    on_ranks(3, low_latency_rank_cases.reports_disagreement, what)


@pytest.mark.parametrize("what", CACHED_CALLS)
def test_mixed_cached_calls_return_no_result(what):
    on_ranks(3, low_latency_rank_cases.detects_mismatch_of_cached_plans, what)


@pytest.mark.parametrize("world_size", [2, 3])
def test_killed_rank(world_size):
    with fresh_ranks(world_size) as pool, pytest.raises(RankError) as caught:
        pool.run(low_latency_rank_cases.loses_rank_1, dies, 1.5)
    check_killed(caught, world_size, 1.5)


def test_other_ranks_complete_after_a_timeout():
    assert on_ranks(3, low_latency_rank_cases.times_out_on_rank_0) == ["missed 1", "right", "right"]
