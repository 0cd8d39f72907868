"""ep_dispatch and ep_combine in multi-node groups: test bodies of single-node groups, and multi-node ones."""

import pytest
import torch

from tdkernels import EpConfig
from tests.ops.experts.dispatch import (
    cases,
    limit_cases,
    low_latency_cases,
    multinode_cases,
    phase_cases,
    rank_cases,
    torch_backend_cases,
)
from tests.ops.experts.dispatch.oracle import BF16, FP16, FP32
from tests.ops.experts.dispatch.test_dispatch import BITS, CONFIGS, FULL_RANK, FULL_STAGE, SMALL, SPECS
from tests.support.ranks import DEVICE, on_ranks
from tests.support.simulated_nodes import on_nodes, thorough

ON_GPU = DEVICE == "cuda"
PER_EXPERT = CONFIGS["per expert"]
emulated_only = pytest.mark.skipif(ON_GPU, reason="patches interpreted kernels or the emulated network")


# Two ranks cover what needs no relay, and what should also run on a machine with two GPUs.
FORWARD_AND_GRADIENTS = [
    (4, 2, "small", "uneven"), (4, 2, "per expert", "k equals experts"),
    (2, 1, "per expert", "rows of several blocks"), (2, 1, "default", "all to one"), (2, 1, "default", "no tokens"),
    (3, 1, "wide chunks", "k of 1"), (4, 1, "default", "all dropped"),
]
SEPARATE_PHASES = [(4, 2, "default", {"max_tokens": 60})]
if ON_GPU:
    FORWARD_AND_GRADIENTS += [(2, 1, config, spec) for config in ("default", "per expert") for spec in SPECS]
    SEPARATE_PHASES += [(2, 1, "per expert", {}), (2, 1, "small", {"quantize": "fp8"})]


@pytest.mark.parametrize("world_size, local, config, spec", FORWARD_AND_GRADIENTS)
def test_forward_and_gradients(world_size, local, config, spec):
    on_ranks(world_size, on_nodes, local, cases.computes, SPECS[spec], CONFIGS[config])


@thorough
@pytest.mark.parametrize("world_size, local, combine", [(4, 2, "per_rank"), (2, 1, "per_expert")])
def test_error_bound(world_size, local, combine):
    changes = {**SMALL, "combine": combine}
    on_ranks(world_size, on_nodes, local, cases.is_within_error_bound, BF16, changes)


@pytest.mark.parametrize("world_size, local, dtype, combine", [
    (4, 2, BF16, "per_rank"), (4, 2, FP16, "per_expert"), (3, 1, BF16, "per_rank"),
], ids=str)
def test_reduction_order(world_size, local, dtype, combine):
    on_ranks(world_size, on_nodes, local, cases.reduces_in_fixed_order, dtype, {**SMALL, "combine": combine})


@thorough
def test_any_bits():
    on_ranks(2, on_nodes, 1, cases.moves_any_bits, BITS if ON_GPU else BITS[:4], SMALL)


@thorough
def test_combine_with_other_weights():
    on_ranks(4, on_nodes, 2, cases.combine_takes_other_weights, PER_EXPERT)


@thorough
def test_handle_is_reused():
    on_ranks(2, on_nodes, 1, cases.reuses_the_handle, None)


@thorough
def test_layer_equals_unsharded_layer():
    on_ranks(2, on_nodes, 1, cases.matches_unsharded_layer, "combine", 0, None)


@thorough
def test_counts_of_many_tiles():
    """A separate launch adds up the counts; here on rank 0."""
    spec = dict(tokens=[34, 2], k=33, experts_each=33, width=3, dtype=FP32, seed=9)
    on_ranks(2, on_nodes, 1, cases.dispatches_tokens, spec)


@pytest.mark.parametrize("world_size, local", [(4, 2), (2, 1)] if ON_GPU else [(4, 2)])
def test_quantized_and_scales(world_size, local):
    on_ranks(world_size, on_nodes, local, cases.quantizes, 129, BF16, SMALL)
    on_ranks(world_size, on_nodes, local, cases.sends_scales, [(FP32, (5,)), (torch.uint8, ())], None)


@thorough
def test_capacity():
    on_ranks(2, on_nodes, 1, limit_cases.respects_capacity, PER_EXPERT)


@pytest.mark.parametrize("world_size, local, spec, limit", [(4, 2, FULL_RANK, 0), (3, 1, FULL_STAGE, 1)], ids=str)
def test_overflow(world_size, local, spec, limit):
    on_ranks(world_size, on_nodes, local, limit_cases.rejects_overflow, spec, limit)


def test_torch_needs_no_symmetric_memory():
    on_ranks(4, on_nodes, 2, torch_backend_cases.needs_no_symmetric_memory, SPECS["uneven"])


@emulated_only
def test_overflow_sends_nothing():
    on_ranks(4, on_nodes, 2, multinode_cases.sends_nothing_on_overflow)


@thorough
def test_invalid_ids():
    on_ranks(3, on_nodes, 1, limit_cases.rejects_invalid_ids, 100, 1, torch.int64, None)


@pytest.mark.parametrize("world_size, local, config, options", SEPARATE_PHASES, ids=str)
def test_separate_send_and_receive(world_size, local, config, options):
    on_ranks(world_size, on_nodes, local, phase_cases.sends_and_receives_separately, CONFIGS[config], options)


# ---- between the ranks ----


@emulated_only
@pytest.mark.parametrize("world_size, local", [(4, 2), (3, 1)])
def test_token_is_sent_once_per_node(world_size, local):
    on_ranks(world_size, on_nodes, local, multinode_cases.sends_once_per_node, local)


@pytest.mark.parametrize("world_size, local, combine", [(4, 2, "per_rank"), (2, 1, "per_expert")])
def test_any_network_order(world_size, local, combine):
    on_ranks(world_size, on_nodes, local, multinode_cases.is_correct_for_any_network_order, combine)


def test_bitwise_deterministic_for_any_network_order():
    on_ranks(4, on_nodes, 2, multinode_cases.is_bitwise_deterministic)


def test_memory_reuse():
    on_ranks(4, on_nodes, 2, multinode_cases.reuses_poisoned_memory)


@thorough
@pytest.mark.parametrize("world_size, local", [(4, 2), (2, 1)] if ON_GPU else [(4, 2)])
def test_no_rank_overtakes_its_peers_data(world_size, local):
    on_ranks(world_size, on_nodes, local, rank_cases.runs_ahead_of_peers, 30 if ON_GPU else 2)


@thorough
def test_stress():
    on_ranks(2, on_nodes, 1, rank_cases.stress, *((200, 300) if ON_GPU else (4, 6)), 0)


@thorough
def test_slow_rank():
    on_ranks(2, on_nodes, 1, rank_cases.waits_for_a_slow_rank)


@emulated_only
def test_slow_sender():
    on_ranks(4, on_nodes, 2, multinode_cases.waits_for_all_chunks)


# Rank 1 is missing. Rank 0 is its peer on the node, rank 3 its peer on the rail. Rank 2 times out on the relaying rank.
@pytest.mark.parametrize("when, peers", [
    ("counts", [1, None, 3, 1]), ("tokens", [1, None, 3, 1]), ("sums", [1, None, 0, 1]),
])
def test_missing_rank(when, peers):
    assert on_ranks(4, multinode_cases.times_out_on_missing_rank, 2, 1, when) == peers


@pytest.mark.parametrize("short_timeout_rank, when, outcomes", [
    (3, "counts", ["missed 2", "missed 3", "missed 3", "missed 1"]),
    (3, "tokens", ["right", "right", "missed 3", "missed 1"]),
    (0, "sums", ["missed 1", "right", "missed 0", "right"]),
])
def test_no_forwarding_after_a_timeout(short_timeout_rank, when, outcomes):
    """Rank 1 is late, and a rank that relays its data times out first."""
    assert on_ranks(4, multinode_cases.times_out_on_late_rank, 2, 1, short_timeout_rank, when) == outcomes


def test_disagreement():
    on_ranks(2, multinode_cases.reports_disagreement, 1)


@pytest.mark.parametrize("world_size, local, how", [(4, 2, "calls"), (2, 1, "separate phases"), (3, 1, "backward")])
def test_early_error_keeps_other_ranks_in_step(world_size, local, how):
    on_ranks(world_size, on_nodes, local, low_latency_cases.keeps_other_ranks_in_step, EpConfig(**SMALL), how)
