"""ep_moe against the layer that is not divided, forward and every gradient."""

import pytest

from tests.ops import expert_layer
from tests.ops.expert_layer import UNEVEN
from tests.ops.routed import BF16, FP16, FP32
from tests.ranks import DEVICE, on_ranks

ON_GPU = DEVICE == "cuda"

# Tokens of the ranks, choices, experts of each rank, H and I. Ids of "any" are dropped here and there.
SPECS = {
    "distinct": dict(tokens=12, k=2, experts_each=2, width=32, hidden=16, ids="distinct"),
    "uneven": dict(tokens=UNEVEN, k=3, experts_each=3, width=33, hidden=13, dtype=FP16, seed=1),
    "weights in bf16": dict(tokens=12, k=2, experts_each=2, width=24, hidden=8, weights=BF16, seed=2),
    "fp32": dict(tokens=UNEVEN, k=2, experts_each=2, width=40, hidden=24, dtype=FP32, seed=3),
    "all to one": dict(tokens=[16, 8, 0, 3], k=2, experts_each=2, width=16, hidden=8, ids="one", seed=4),
    "no tokens": dict(tokens=0, k=2, experts_each=2, width=16, hidden=8, seed=5),
    "all dropped": dict(tokens=[2, 0, 1, 3], k=2, experts_each=2, width=16, hidden=8, ids="none", seed=6),
}

# The interpreter takes long, so CPU ranks are not asked everything everywhere.
ON_CPU = {
    (1, "default"): ["distinct", "fp32"],
    (2, "default"): list(SPECS),
    (3, "per expert, torch's product"): ["uneven", "all to one"],
    (4, "default"): ["uneven", "all to one"],
}


@pytest.mark.parametrize("world_size, config, spec", [
    (*ranks_and_config, spec) for ranks_and_config, specs in ON_CPU.items() for spec in (SPECS if ON_GPU else specs)
])  # fmt: skip
def test_everything(world_size, config, spec):
    if ON_GPU and "torch's" in config:  # whose product on a GPU is in bf16 only
        SPECS[spec] = SPECS[spec] | {"dtype": BF16}
    on_ranks(world_size, expert_layer.computes, SPECS[spec], config)


def test_three_calls():
    on_ranks(2, expert_layer.is_called_again)


def test_interleaved_weights():
    on_ranks(2, expert_layer.takes_interleaved_weights)


def test_capacity():
    on_ranks(2, expert_layer.keeps_to_a_capacity)


@pytest.mark.parametrize("world_size, width", [(1, 128), (2, 200)])
def test_quantized(world_size, width):
    on_ranks(world_size, expert_layer.sends_codes, width)


def test_only_what_is_wanted():
    on_ranks(2, expert_layer.computes_what_is_wanted)


def test_autocast():
    on_ranks(2, expert_layer.casts_as_autocast_says)


def test_subgroup():
    on_ranks(3, expert_layer.computes_in_a_subgroup)


def test_wrong_ids():
    on_ranks(2, expert_layer.refuses_wrong_ids)


@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_input(world_size):
    on_ranks(world_size, expert_layer.refuses)
