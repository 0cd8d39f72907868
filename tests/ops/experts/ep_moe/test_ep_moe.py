"""ep_moe: forward and all gradients against the unsharded layer."""

import pytest

from tdkernels.ops.experts.dispatch.counted import CountedRouting
from tdkernels.ops.experts.dispatch.request import RoutingShape
from tests.ops.experts.dispatch.oracle import BF16, FP16, FP32
from tests.ops.experts.ep_moe import cases
from tests.ops.experts.ep_moe.cases import UNEVEN
from tests.support.ranks import DEVICE, on_ranks

ON_GPU = DEVICE == "cuda"
each_config = pytest.mark.parametrize("config", ["default", "fused", "torch"])

# Tokens of the ranks, assignments per token, experts per rank, H and I. Some ids of "any" are -1.
SPECS = {
    "weights in bf16": dict(tokens=8, k=2, experts_each=2, width=32, hidden=16, ids="distinct", weights=BF16),
    "uneven": dict(tokens=UNEVEN, k=3, experts_each=3, width=33, hidden=13, dtype=FP16, seed=1),
    "fp32": dict(tokens=UNEVEN, k=2, experts_each=2, width=40, hidden=24, dtype=FP32, seed=3),
    "all to one": dict(tokens=[12, 4, 0, 3], k=2, experts_each=2, width=16, hidden=8, ids="one", seed=4),
    "no tokens": dict(tokens=0, k=2, experts_each=2, width=16, hidden=8, seed=5),
    "all dropped": dict(tokens=[2, 0, 1, 3], k=2, experts_each=2, width=16, hidden=8, ids="none", seed=6),
}

# The interpreter is slow, so CPU ranks run only some of the combinations.
CPU_CASES = {
    (1, "default"): ["fp32"],
    (2, "default"): list(SPECS),
    (1, "fused"): ["fp32"],
    (2, "fused"): list(SPECS),
    (3, "fused"): ["fp32"],
    (3, "per expert, torch GEMM"): ["fp32"],
    (4, "default"): ["uneven"],
    (4, "fused"): ["uneven"],
    (1, "torch"): ["fp32"],
    (3, "torch"): ["weights in bf16", "fp32", "all to one", "no tokens", "all dropped"],
}


def spec_for(config, spec):
    """Return the spec, in bf16 if torch's grouped GEMM needs it; skip widths that torch does not support."""
    spec = SPECS[spec]
    if not ON_GPU or config in ("default", "fused"):
        return spec
    if spec["width"] % 8 or spec["hidden"] % 8:
        pytest.skip("torch._grouped_mm does not support these widths")
    return spec | {"dtype": BF16}


@pytest.mark.parametrize("world_size, config, spec", [
    (*ranks_and_config, spec) for ranks_and_config, specs in CPU_CASES.items() for spec in (SPECS if ON_GPU else specs)
])
def test_forward_and_gradients(world_size, config, spec):
    on_ranks(world_size, cases.computes, spec_for(config, spec), config)


def test_torch_needs_no_symmetric_memory():
    on_ranks(2, cases.needs_no_symmetric_memory, SPECS["fp32"])


@each_config
def test_workspace_reuse(config):
    on_ranks(2, cases.reuses_workspaces, config)


@pytest.mark.parametrize("config", ["default", "fused"])
def test_launches_for_any_number_of_rows(config):
    on_ranks(2, cases.launches_for_any_number_of_rows, config)


@pytest.mark.parametrize("rows, expected", [
    (0, 0), (1, 16), (16, 16), (1000, 1008), (1024, 1024), (1025, 1056), (32768, 32768), (32769, 33792),
    (60000, 60416),
])
@pytest.mark.parametrize("max_tokens", [None, 100_000])
def test_spare_rows(rows, expected, max_tokens):
    routing = object.__new__(CountedRouting)
    routing.shape, routing.rows, routing.received = RoutingShape("ep_moe", 9, 2, 4, 2, max_tokens), rows, None
    routing.add_spare_rows()
    assert routing.rows == (expected if max_tokens is None else rows)


@pytest.mark.parametrize("quantize", [None, "fp8"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_low_latency_dispatch(world_size, quantize):
    on_ranks(world_size, cases.uses_low_latency_dispatch, quantize)


# In the last one, a rank receives the maximum number of rows.
TOKEN_BOUNDS = {"uneven": (UNEVEN, "any"), "no tokens": (0, "any"), "all to the last rank": (5, "last")}


@pytest.mark.parametrize("world_size, spec", [
    *((2, spec) for spec in TOKEN_BOUNDS), *((ranks, "uneven") for ranks in ((1, 3, 4) if ON_GPU else (1, 3)))
])
def test_fused_with_max_tokens_per_rank(world_size, spec):
    on_ranks(world_size, cases.computes_fused_with_max_tokens_per_rank, *TOKEN_BOUNDS[spec])


@each_config
def test_interleaved_weights(config):
    on_ranks(2, cases.takes_interleaved_weights, config)


@each_config
def test_capacity(config):
    on_ranks(2, cases.respects_capacity, config)


@pytest.mark.parametrize("world_size, width", [(1, 128), (2, 200)])
def test_quantized(world_size, width):
    on_ranks(world_size, cases.quantizes_tokens, width)


@pytest.mark.parametrize("bounds", [{}, {"max_tokens_per_rank": max(UNEVEN)}], ids=["exact", "bounded"])
def test_anomaly_detection(bounds):
    on_ranks(2, cases.can_detect_anomalies, bounds)


def test_only_required_gradients():
    on_ranks(2, cases.computes_only_required_gradients)


@pytest.mark.parametrize("world_size", [1, 2])
def test_saved_tensors(world_size):
    on_ranks(world_size, cases.saves_only_what_gradients_need)


def test_checkpoint():
    on_ranks(2, cases.recomputes_in_a_checkpoint)


@each_config
def test_autocast(config):
    on_ranks(2, cases.follows_autocast, config)


@each_config
def test_subgroup(config):
    on_ranks(3, cases.computes_in_a_subgroup, config)


def test_fused_only_required_gradients():
    on_ranks(2, cases.fused_computes_only_required_gradients)


@each_config
def test_invalid_ids(config):
    on_ranks(2, cases.rejects_invalid_ids, config)


@pytest.mark.parametrize("world_size", [1, 2])
def test_invalid_arguments(world_size):
    on_ranks(world_size, cases.rejects_invalid_arguments)
