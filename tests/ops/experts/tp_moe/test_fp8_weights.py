"""tp_moe with fp8 weights."""

import pytest

from tests.ops.experts.tp_moe import fp8_cases as cases
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("world_size, config, spec", [
    *((2, config, "bf16") for config in cases.CONFIGS), (2, "default", "fp16, e5m2"), (2, "torch", "fp16, e5m2"),
    *((2, "default", spec) for spec in ("fp32, interleaved", "not activated", "no tokens")),
    (1, "default", "fp16, e5m2"), (3, "default", "fp32, interleaved"), (3, "three stages", "bf16"),
    (2, "torch", "not activated"), (2, "torch", "no tokens"),
    (2, "three stages", "row-wise"), (3, "default", "row-wise, interleaved"), (2, "torch", "row-wise"),
    (2, "default", "block-wise, then row-wise"), (1, "default", "by expert"), (2, "default", "by expert"),
])
def test_forward(world_size, config, spec):
    on_ranks(world_size, cases.computes, cases.SPECS[spec], config)


@pytest.mark.parametrize("scaling", ["block", "row", "expert"])
def test_stages_equal_group_gemm(scaling):
    on_ranks(2, cases.stages_equal_group_gemm, scaling)


@pytest.mark.parametrize("what", [
    cases.sends_codes, cases.accumulates_fast, cases.rejects_gradients, cases.compiles, cases.rejects_invalid_arguments,
    cases.reports_disagreement, cases.reports_different_scalings,
], ids=lambda f: f.__name__)
def test_calls(what):
    on_ranks(2, what)
