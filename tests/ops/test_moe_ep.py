"""ep_dispatch and ep_combine against what all ranks' operands give, forward and backward, and between the ranks."""

import pytest
import torch

from tests.ops import expert_parallel
from tests.ops.expert_parallel import SMALL, UNEVEN
from tests.ops.routed import BF16, FP16, FP32
from tests.ranks import on_ranks

FP8 = torch.float8_e4m3fn
PER_EXPERT = {**SMALL, "combine": "per_expert"}
WIDE_CHUNKS = {"num_senders": 1, "num_receivers": 1, "chunk_tokens": 3, "num_warps": 1}
CONFIGS = {"default": None, "small": SMALL, "per expert": PER_EXPERT, "wide chunks": WIDE_CHUNKS}
each_sum = pytest.mark.parametrize("config", ["default", "per expert"])

# Tokens of the ranks, choices, experts of each rank, sizes of rows.
SPECS = {
    "distinct": dict(tokens=5, k=2, experts_each=2, width=32, ids="distinct"),
    "uneven": dict(tokens=UNEVEN, k=3, experts_each=3, width=65, dtype=FP16, seed=1),
    "as many choices as experts": dict(tokens=3, k="all", experts_each=2, width=1, dtype=FP32, ids="any", seed=2),
    "one choice": dict(tokens=[0, 9, 1, 4], k=1, experts_each=1, width=7, weights=BF16, seed=3),
    "all to one": dict(tokens=[6, 2, 0, 3], k=2, experts_each=2, width=8, ids="one", seed=4),
    "rows of several blocks": dict(tokens=2, k=2, experts_each=2, width=200, dtype=FP32, seed=5),
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("world_size, config", [(1, "small"), (2, "default"), (3, "per expert"), (4, "small")])
def test_everything(world_size, config, spec):
    on_ranks(world_size, expert_parallel.computes, SPECS[spec], CONFIGS[config])


@pytest.mark.parametrize("combine", ["per_rank", "per_expert"])
@pytest.mark.parametrize("world_size, dtype", [(2, BF16), (3, FP16), (3, FP32), (4, BF16)], ids=str)
def test_error_is_that_of_torch(world_size, dtype, combine):
    on_ranks(world_size, expert_parallel.is_within_the_bound, dtype, {**SMALL, "combine": combine})


# Multiples of 1, 2, 4, 8 and 16 bytes, and rows of several blocks of 256 bytes.
BITS = [(BF16, 5), (FP8, 1), (FP8, 300), (torch.float8_e5m2, 6), (FP32, 70), (FP16, 64), (FP8, 12), (BF16, 12)]


@pytest.mark.parametrize("world_size, config", [(1, "default"), (2, "small"), (3, "wide chunks")])
def test_any_bits_are_moved(world_size, config):
    on_ranks(world_size, expert_parallel.moves_any_bits, BITS, CONFIGS[config])


@pytest.mark.parametrize("world_size", [1, 3])
def test_layouts(world_size):
    on_ranks(world_size, expert_parallel.takes_any_layout)


@each_sum
@pytest.mark.parametrize("world_size", [1, 3])
def test_weights_are_optional(world_size, config):
    on_ranks(world_size, expert_parallel.weights_are_optional, CONFIGS[config])


@each_sum
def test_combine_with_other_weights(config):
    on_ranks(2, expert_parallel.combine_takes_other_weights, CONFIGS[config])


@pytest.mark.parametrize("world_size", [1, 3])
def test_handle_is_used_again(world_size):
    on_ranks(world_size, expert_parallel.uses_the_handle_again)


def test_gradients_of_what_is_used_twice_add_up():
    on_ranks(3, expert_parallel.adds_up_gradients)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_that_nobody_needs_are_not_sent(world_size):
    on_ranks(world_size, expert_parallel.sends_only_what_is_asked_for)


def test_no_grad():
    on_ranks(2, expert_parallel.leaves_no_graph_under_no_grad)


@pytest.mark.parametrize("world_size", [1, 2])
def test_second_derivatives_are_refused(world_size):
    on_ranks(world_size, expert_parallel.refuses_second_derivatives)


@pytest.mark.parametrize("weights_in", ["dispatch", "experts", "combine"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_layer(world_size, weights_in):
    on_ranks(world_size, expert_parallel.is_a_layer, weights_in, world_size)


def test_same_bits_twice():
    on_ranks(3, expert_parallel.gives_the_same_bits)
