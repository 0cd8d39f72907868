"""ep_moe against the layer that is not divided, forward and every gradient."""

import pytest

from tests.ops.experts.dispatch.oracle import BF16, FP16, FP32
from tests.ops.experts.ep_moe import cases
from tests.ops.experts.ep_moe.cases import UNEVEN
from tests.support.ranks import DEVICE, on_ranks

ON_GPU = DEVICE == "cuda"
either_way = pytest.mark.parametrize("config", ["default", "fused", "torch"])

# Tokens of the ranks, choices, experts of each rank, H and I. Ids of "any" are dropped here and there.
SPECS = {
    "weights in bf16": dict(tokens=8, k=2, experts_each=2, width=32, hidden=16, ids="distinct", weights=BF16),
    "uneven": dict(tokens=UNEVEN, k=3, experts_each=3, width=33, hidden=13, dtype=FP16, seed=1),
    "fp32": dict(tokens=UNEVEN, k=2, experts_each=2, width=40, hidden=24, dtype=FP32, seed=3),
    "all to one": dict(tokens=[12, 4, 0, 3], k=2, experts_each=2, width=16, hidden=8, ids="one", seed=4),
    "no tokens": dict(tokens=0, k=2, experts_each=2, width=16, hidden=8, seed=5),
    "all dropped": dict(tokens=[2, 0, 1, 3], k=2, experts_each=2, width=16, hidden=8, ids="none", seed=6),
}

# The interpreter takes long, so CPU ranks are not asked everything everywhere.
ON_CPU = {
    (1, "default"): ["fp32"],
    (2, "default"): list(SPECS),
    (1, "fused"): ["fp32"],
    (2, "fused"): list(SPECS),
    (3, "fused"): ["fp32"],
    (3, "per expert, torch's product"): ["fp32"],
    (4, "default"): ["uneven"],
    (4, "fused"): ["uneven"],
    (1, "torch"): ["fp32"],
    (3, "torch"): ["weights in bf16", "fp32", "all to one", "no tokens", "all dropped"],
}


def spec_for(config, spec):
    """torch's product wants bf16 on a GPU, and rows of so many bytes."""
    spec = SPECS[spec]
    if not ON_GPU or config in ("default", "fused"):
        return spec
    if spec["width"] % 8 or spec["hidden"] % 8:
        pytest.skip("torch._grouped_mm takes no such rows")
    return spec | {"dtype": BF16}


@pytest.mark.parametrize("world_size, config, spec", [
    (*ranks_and_config, spec) for ranks_and_config, specs in ON_CPU.items() for spec in (SPECS if ON_GPU else specs)
])
def test_everything(world_size, config, spec):
    on_ranks(world_size, cases.computes, spec_for(config, spec), config)


def test_torch_needs_no_symmetric_memory():
    on_ranks(2, cases.needs_no_symmetric_memory, SPECS["fp32"])


@either_way
def test_three_calls(config):
    on_ranks(2, cases.is_called_again, config)


@pytest.mark.parametrize("quantize", [None, "fp8"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_few_tokens(world_size, quantize):
    on_ranks(world_size, cases.sends_few_tokens, quantize)


# The last: no more rows than can come at all.
BOUNDED = {"uneven": (UNEVEN, "any"), "no tokens": (0, "any"), "all to the last rank": (5, "last")}


@pytest.mark.parametrize("world_size, spec", [
    *((2, spec) for spec in BOUNDED), *((ranks, "uneven") for ranks in ((1, 3, 4) if ON_GPU else (1, 3)))
])
def test_overlapping_with_a_bound_on_tokens(world_size, spec):
    on_ranks(world_size, cases.overlaps_with_a_bound, *BOUNDED[spec])


@either_way
def test_interleaved_weights(config):
    on_ranks(2, cases.takes_interleaved_weights, config)


@either_way
def test_capacity(config):
    on_ranks(2, cases.keeps_to_a_capacity, config)


@pytest.mark.parametrize("world_size, width", [(1, 128), (2, 200)])
def test_quantized(world_size, width):
    on_ranks(world_size, cases.sends_codes, width)


def test_only_what_is_wanted():
    on_ranks(2, cases.computes_what_is_wanted)


@either_way
def test_autocast(config):
    on_ranks(2, cases.casts_as_autocast_says, config)


@either_way
def test_subgroup(config):
    on_ranks(3, cases.computes_in_a_subgroup, config)


def test_only_what_is_wanted_overlapping():
    on_ranks(2, cases.overlaps_only_what_is_wanted)


@either_way
def test_wrong_ids(config):
    on_ranks(2, cases.refuses_wrong_ids, config)


@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_input(world_size):
    on_ranks(world_size, cases.refuses)
