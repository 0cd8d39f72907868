"""tp_moe, moe_ag_gemm and moe_gemm_rs against the unsharded layer."""

import pytest

from tests.ops.experts.tp_moe import cases
from tests.ops.experts.tp_moe.oracle import BF16, FP16, FP32
from tests.support.ranks import DEVICE, on_ranks

ON_GPU = DEVICE == "cuda"

# Tokens and channels of a rank, assignments per token, experts and H. Some ids of "any" are -1.
SPECS = {
    "weights in bf16": dict(tokens=20, k=2, experts=4, width=24, hidden=8, ids="distinct", weights=BF16),
    "odd": dict(tokens=37, k=2, experts=3, width=33, hidden=13, seed=1),
    "all experts": dict(tokens=5, k=3, experts=3, width=17, hidden=3, dtype=FP16, ids="distinct", seed=2),
    "interleaved": dict(tokens=7, k=2, experts=2, width=20, hidden=5, activation="swiglu_interleaved", seed=3),
    "fp32": dict(tokens=9, k=2, experts=3, width=19, hidden=7, dtype=FP32, seed=4),
    "not activated": dict(tokens=24, k=1, experts=2, width=12, hidden=6, dtype=FP16, activation=None, seed=5),
    "all to one": dict(tokens=80, k=1, experts=4, width=9, hidden=4, ids="one", seed=6),
    "experts without tokens": dict(tokens=18, k=2, experts=9, width=8, hidden=2, ids="few", seed=7),
    "wider than a work item": dict(tokens=2, k=2, experts=2, width=600, hidden=2, activation=None, seed=8),
    "all dropped": dict(tokens=3, k=2, experts=2, width=9, hidden=4, ids="none", seed=9),
    "no tokens": dict(tokens=0, k=2, experts=2, width=9, hidden=4, seed=10),
    # With so few elements plain torch may be exact by chance, so this case uses exact values.
    "one of everything": dict(
        tokens=1, k=1, experts=1, width=1, hidden=1, dtype=FP32, ids="distinct", activation=None, exact=True, seed=49
    ),
}

# The interpreter is slow, so CPU ranks run only some of the combinations.
CPU_CASES = {
    (1, "default"): ["interleaved", "all dropped", "no tokens", "one of everything"],
    (1, "one stage"): ["odd"],
    (2, "default"): ["weights in bf16", "fp32", "not activated", "wider than a work item", "all dropped", "no tokens"],
    (2, "two stages"): ["odd"],
    (2, "three stages"): ["all to one"],
    (2, "tall tiles"): ["experts without tokens"],
    (2, "torch"): ["fp32", "interleaved", "no tokens"],
    (3, "eight stages"): ["all to one"],
    (3, "three stages"): ["one of everything"],
    (3, "torch"): ["all dropped"],
    (4, "default"): ["all experts"],
}


def spec_for(config, spec):
    """Return the spec, in bf16 if torch's grouped GEMM needs it; skip widths that torch does not support."""
    spec = SPECS[spec]
    if not ON_GPU or config != "torch":
        return spec
    if spec["width"] % 8 or spec["hidden"] % 8:
        pytest.skip("torch._grouped_mm does not support these widths")
    return spec | {"dtype": BF16}


@pytest.mark.parametrize("world_size, config, spec", [
    (world_size, config, spec) for world_size in (1, 2, 3, 4) for config in cases.CONFIGS for spec in SPECS
    if ON_GPU or spec in CPU_CASES.get((world_size, config), ())
])
def test_forward_and_gradients(world_size, config, spec):
    on_ranks(world_size, cases.computes, spec_for(config, spec), config)


@pytest.mark.parametrize("world_size, config, spec", [
    (1, "one stage", "odd"), (2, "default", "all experts"), (3, "eight stages", "odd"), (2, "torch", "not activated"),
    (3, "three stages", "experts without tokens"),
])
def test_gate_up_stage(world_size, config, spec):
    spec = {name: value for name, value in spec_for(config, spec).items() if name != "activation"}
    on_ranks(world_size, cases.computes_gate_up_stage, spec, config)


@pytest.mark.parametrize("config", ["default", "torch"])
def test_one_routing_for_two_down_stages(config):
    on_ranks(2, cases.reuses_routing_for_two_down_stages, dict(tokens=5, k=2, experts=2, width=16, hidden=8), config)


@pytest.mark.parametrize("what", cases.AUTOGRAD, ids=lambda f: f.__name__)
def test_autograd(what):
    on_ranks(2, what)


@pytest.mark.parametrize("world_size", [1, 2])
def test_layouts(world_size):
    on_ranks(world_size, cases.takes_any_layout)


def test_subgroup():
    on_ranks(3, cases.computes_in_a_subgroup)


@pytest.mark.parametrize("world_size", [1, 3])
def test_invalid_ids(world_size):
    on_ranks(world_size, cases.rejects_invalid_ids)


@pytest.mark.parametrize("world_size", [2, 3])
def test_early_invalid_id_error_keeps_ranks_in_step(world_size):
    on_ranks(world_size, cases.early_invalid_id_error_keeps_ranks_in_step)


@pytest.mark.parametrize("world_size", [1, 2])
def test_invalid_arguments(world_size):
    on_ranks(world_size, cases.rejects_invalid_arguments)
