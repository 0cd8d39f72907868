"""ep_dispatch and ep_combine in groups on several nodes: what is asked of any group, and what of these alone."""

import pytest
import torch

from tdkernels import EpConfig
from tests.ops.experts.dispatch import cases, low_latency_cases, multinode_cases, rank_cases
from tests.ops.experts.dispatch.oracle import BF16, FP16, FP32
from tests.ops.experts.dispatch.test_dispatch import BITS, CONFIGS, FULL_RANK, FULL_STAGE, SMALL, SPECS
from tests.support.ranks import DEVICE, on_ranks
from tests.support.simulated_nodes import on_nodes, thorough

ON_GPU = DEVICE == "cuda"
PER_EXPERT = CONFIGS["per expert"]
emulated_only = pytest.mark.skipif(ON_GPU, reason="looks into what is interpreted or emulated")


# Two ranks are asked what does not need a relay, and what a machine of two GPUs is to be asked as well.
EVERYTHING = [
    (4, 2, "small", "uneven"), (4, 2, "per expert", "as many choices as experts"),
    (2, 1, "per expert", "rows of several blocks"), (2, 1, "default", "all to one"), (2, 1, "default", "no tokens"),
    (3, 1, "wide chunks", "one choice"), (4, 1, "default", "all dropped"),
]
HALVES = [(4, 2, "default", {"max_tokens": 60})]
if ON_GPU:
    EVERYTHING += [(2, 1, config, spec) for config in ("default", "per expert") for spec in SPECS]
    HALVES += [(2, 1, "per expert", {}), (2, 1, "small", {"quantize": "fp8"})]


@pytest.mark.parametrize("world_size, local, config, spec", EVERYTHING)
def test_everything(world_size, local, config, spec):
    on_ranks(world_size, on_nodes, local, cases.computes, SPECS[spec], CONFIGS[config])


@thorough
@pytest.mark.parametrize("world_size, local, combine", [(4, 2, "per_rank"), (2, 1, "per_expert")])
def test_error_is_that_of_torch(world_size, local, combine):
    changes = {**SMALL, "combine": combine}
    on_ranks(world_size, on_nodes, local, cases.is_within_the_bound, BF16, changes)


@pytest.mark.parametrize("world_size, local, dtype, combine", [
    (4, 2, BF16, "per_rank"), (4, 2, FP16, "per_expert"), (3, 1, BF16, "per_rank"),
], ids=str)
def test_sums_are_in_the_order_of_ranks_and_nodes(world_size, local, dtype, combine):
    on_ranks(world_size, on_nodes, local, cases.adds_in_order, dtype, {**SMALL, "combine": combine})


@thorough
def test_any_bits_are_moved():
    on_ranks(2, on_nodes, 1, cases.moves_any_bits, BITS if ON_GPU else BITS[:4], SMALL)


@thorough
def test_weights_of_the_combine():
    on_ranks(4, on_nodes, 2, cases.combine_takes_other_weights, PER_EXPERT)


@thorough
def test_handle_is_used_again():
    on_ranks(2, on_nodes, 1, cases.uses_the_handle_again, None)


@thorough
def test_layer():
    on_ranks(2, on_nodes, 1, cases.is_a_layer, "combine", 0, None)


@thorough
def test_counts_of_many_tiles():
    """A launch of its own adds them up: here on rank 0."""
    spec = dict(tokens=[34, 2], k=33, experts_each=33, width=3, dtype=FP32, seed=9)
    on_ranks(2, on_nodes, 1, cases.arrives, spec)


@pytest.mark.parametrize("world_size, local", [(4, 2), (2, 1)] if ON_GPU else [(4, 2)])
def test_codes_and_scales(world_size, local):
    on_ranks(world_size, on_nodes, local, cases.quantizes, 129, BF16, SMALL)
    on_ranks(world_size, on_nodes, local, cases.sends_scales_along, [(FP32, (5,)), (torch.uint8, ())], None)


@thorough
def test_capacity():
    on_ranks(2, on_nodes, 1, cases.keeps_to_a_capacity, PER_EXPERT)


@pytest.mark.parametrize("world_size, local, spec, which", [(4, 2, FULL_RANK, 0), (3, 1, FULL_STAGE, 1)], ids=str)
def test_more_than_the_capacity(world_size, local, spec, which):
    on_ranks(world_size, on_nodes, local, cases.refuses_what_is_too_much, spec, which)


def test_torch_needs_no_network_of_ours():
    on_ranks(4, on_nodes, 2, cases.needs_no_symmetric_memory, SPECS["uneven"])


@emulated_only
def test_what_does_not_fit_is_not_sent():
    on_ranks(4, on_nodes, 2, multinode_cases.sends_nothing_that_does_not_fit)


@thorough
def test_wrong_ids():
    on_ranks(3, on_nodes, 1, cases.refuses_wrong_ids, 100, 1, torch.int64, None)


@pytest.mark.parametrize("world_size, local, config, options", HALVES, ids=str)
def test_halves(world_size, local, config, options):
    on_ranks(world_size, on_nodes, local, cases.comes_in_halves, CONFIGS[config], options)


# ---- between the ranks ----


@emulated_only
@pytest.mark.parametrize("world_size, local", [(4, 2), (3, 1)])
def test_a_token_crosses_once_for_a_node(world_size, local):
    on_ranks(world_size, on_nodes, local, multinode_cases.crosses_once, local)


@pytest.mark.parametrize("world_size, local, combine", [(4, 2, "per_rank"), (2, 1, "per_expert")])
def test_any_order_of_the_network(world_size, local, combine):
    on_ranks(world_size, on_nodes, local, multinode_cases.is_right_on_every_network, combine)


def test_same_bits_whatever_the_network_does():
    on_ranks(4, on_nodes, 2, multinode_cases.repeats_its_bits)


def test_memory_is_reused():
    on_ranks(4, on_nodes, 2, multinode_cases.reuses_poisoned_memory)


@thorough
@pytest.mark.parametrize("world_size, local", [(4, 2), (2, 1)] if ON_GPU else [(4, 2)])
def test_no_rank_overtakes_its_peers_data(world_size, local):
    on_ranks(world_size, on_nodes, local, rank_cases.outruns_its_peers, 30 if ON_GPU else 2)


@thorough
def test_stress():
    on_ranks(2, on_nodes, 1, rank_cases.endures, *((200, 300) if ON_GPU else (4, 6)), 0)


@thorough
def test_slow_rank():
    on_ranks(2, on_nodes, 1, rank_cases.waits_for_a_slow_rank)


@emulated_only
def test_slow_sender():
    on_ranks(4, on_nodes, 2, multinode_cases.waits_for_every_part)


# Rank 1 is missing. Rank 0 is its node peer, 3 of its rail; 2 misses whoever should have passed on what 1 did not send.
@pytest.mark.parametrize("when, peers", [
    ("counts", [1, None, 3, 1]), ("tokens", [1, None, 3, 1]), ("sums", [1, None, 0, 1]),
])
def test_missing_rank(when, peers):
    assert on_ranks(4, multinode_cases.misses_a_rank, 2, 1, when) == peers


@pytest.mark.parametrize("impatient, when, answers", [
    (3, "counts", ["missed 2", "missed 3", "missed 3", "missed 1"]),
    (3, "tokens", ["right", "right", "missed 3", "missed 1"]),
    (0, "sums", ["missed 1", "right", "missed 0", "right"]),
])
def test_what_was_given_up_is_not_passed_on(impatient, when, answers):
    """Rank 1 is late, and one that would pass on what it sends has no patience."""
    assert on_ranks(4, multinode_cases.comes_when_another_has_given_up, 2, 1, impatient, when) == answers


def test_disagreement():
    on_ranks(2, multinode_cases.disagrees, 1)


@pytest.mark.parametrize("world_size, local, how", [(4, 2, "calls"), (2, 1, "halves"), (3, 1, "backward")])
def test_who_was_told_at_once_leaves_the_others_in_step(world_size, local, how):
    on_ranks(world_size, on_nodes, local, low_latency_cases.leaves_the_others_in_step, EpConfig(**SMALL), how)
