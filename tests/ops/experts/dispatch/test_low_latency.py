"""ep_dispatch with ``max_tokens_per_rank``: one launch, in which tokens leave before anything has been counted."""

import pytest
import torch

from tdkernels import EpConfig
from tdkernels.launch import RankError
from tdkernels.ops.experts.dispatch.low_latency import can_be_low_latency
from tdkernels.ops.experts.dispatch.request import RoutingShape
from tests.ops.experts.dispatch import low_latency_cases, low_latency_rank_cases
from tests.ops.experts.dispatch.cases import SMALL
from tests.ops.experts.dispatch.low_latency_rank_cases import DISAGREEMENTS, KNOWN
from tests.ops.experts.dispatch.oracle import BF16, FP16, FP32
from tests.ops.experts.dispatch.rank_cases import check_killed
from tests.ops.experts.dispatch.test_dispatch import BITS, CONFIGS, FULL_RANK, ON_CPU, SPECS
from tests.support.ranks import DEVICE, dies, fresh_ranks, on_ranks

ON_GPU = DEVICE == "cuda"


@pytest.mark.parametrize("world_size, config, spec", [
    (*ranks_and_config, spec) for ranks_and_config, specs in ON_CPU.items() for spec in (SPECS if ON_GPU else specs)
])
def test_everything(world_size, config, spec):
    on_ranks(world_size, low_latency_cases.computes, SPECS[spec], CONFIGS[config], 4)


@pytest.mark.parametrize("world_size", [1, 3])
def test_any_bits_are_moved(world_size):
    on_ranks(world_size, low_latency_cases.moves_any_bits, BITS)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("width, dtype", [(1, BF16), (127, FP32), (129, BF16), (600, FP16)], ids=str)
def test_quantized(world_size, width, dtype):
    on_ranks(world_size, low_latency_cases.quantizes, width, dtype, SMALL if width > 256 else None)


def test_many_choices():
    on_ranks(2, low_latency_cases.counts_many)


@pytest.mark.parametrize("config, most, k", [
    (EpConfig(**SMALL, direct_tokens=0), 7, 2), (EpConfig(**SMALL, direct_tokens=7), 8, 2),
], ids=["never", "too many"])
def test_the_other_way(config, most, k):
    on_ranks(2, low_latency_cases.takes_the_other_way, config, most, k)


def test_what_can_be_direct():
    """What is compared grows with choices and experts, and a rank has no more than 1024 signals."""

    def can(most, k, experts, ranks):
        shape = RoutingShape("op", most, k, experts, ranks, max_tokens_per_rank=most)
        return can_be_low_latency(EpConfig(direct_tokens=1024), shape)

    assert can(1024, 8, 256, 8) and can(1, 8, 1024, 8)
    assert not can(1025, 8, 256, 8)
    assert not can(1, 16, 1024, 8) and not can(1, 512, 8, 8)
    assert "direct_tokens must be" in EpConfig(direct_tokens=1025).illegal(torch.device("cpu"))
    assert "direct_tokens must be" in EpConfig(direct_tokens=True).illegal(torch.device("cpu"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_halves(world_size):
    on_ranks(world_size, low_latency_cases.comes_in_halves, EpConfig(**SMALL))


@pytest.mark.parametrize("world_size", [1, 3])
def test_more_than_the_capacity(world_size):
    on_ranks(world_size, low_latency_cases.refuses_what_is_too_much, FULL_RANK)


@pytest.mark.parametrize("halves", [False, True])
def test_nothing_comes_back_of_what_was_too_much(halves):
    on_ranks(2, low_latency_cases.nothing_comes_back_of_what_was_too_much, halves)


@pytest.mark.parametrize("wrong, where, id_dtype", [
    (-2, 0, torch.int64), ((1 << 32) + 1, 1, torch.int64), (9, 0, torch.int32)
], ids=str)
def test_wrong_ids(wrong, where, id_dtype):
    on_ranks(3, low_latency_cases.refuses_wrong_ids, wrong, where, id_dtype)


EITHER = [EpConfig(**SMALL), EpConfig(**SMALL, direct_tokens=0)]


@pytest.mark.parametrize("config", EITHER, ids=["direct", "counted"])
def test_more_tokens_than_were_promised(config):
    on_ranks(3, low_latency_cases.refuses_too_many_tokens, config)


@pytest.mark.parametrize("config", EITHER, ids=["direct", "counted"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("how", ["calls", "halves", "backward"])
def test_who_was_told_at_once_leaves_the_others_in_step(how, world_size, config):
    on_ranks(world_size, low_latency_cases.leaves_the_others_in_step, config, how)


def test_bad_input():
    on_ranks(2, low_latency_cases.refuses)


# ---- between the ranks ----


@pytest.mark.parametrize("world_size, calls", [(2, 12), (3, 6), (4, 3)])
def test_stress(world_size, calls):
    on_ranks(world_size, low_latency_rank_cases.endures, *((500, 200) if ON_GPU else (calls, 6)), seed=world_size)


@pytest.mark.parametrize("world_size, calls", [(2, 6), (3, 4)] if ON_GPU else [(3, 4)])
def test_no_rank_overtakes_its_peers_data(world_size, calls):
    on_ranks(world_size, low_latency_rank_cases.outruns_its_peers, calls * (20 if ON_GPU else 1))


def test_memory_grows():
    on_ranks(2, low_latency_rank_cases.grows, [(1, 3), ([70, 3, 0, 6], 5), (2, 300), (3, 4)])


def test_subgroups():
    on_ranks(3, low_latency_rank_cases.uses_subgroups)


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_disagreement_is_named_on_every_rank(what):
    on_ranks(3, low_latency_rank_cases.disagrees, what)


@pytest.mark.parametrize("what", KNOWN)
def test_known_but_different_calls_never_give_a_result(what):
    on_ranks(3, low_latency_rank_cases.is_not_fooled_by_a_known_plan, what)


@pytest.mark.parametrize("world_size", [2, 3])
def test_killed_rank(world_size):
    with fresh_ranks(world_size) as pool, pytest.raises(RankError) as caught:
        pool.run(low_latency_rank_cases.loses_rank_1, dies, 1.5)
    check_killed(caught, world_size, 1.5)


def test_what_others_sent_is_right_when_one_has_given_up():
    assert on_ranks(3, low_latency_rank_cases.comes_when_rank_0_has_given_up) == ["missed 1", "right", "right"]
