"""Experts with fp8 weights: ep_moe with scales, and the operators it is made of."""

import pytest

from tests.ops.experts.ep_moe import fp8_cases as cases
from tests.support.ranks import on_ranks
from tests.support.subset import THOROUGH, pairs

BOUNDS = {"exact": {}, "max_tokens": {"max_tokens": 96}, "max_tokens_per_rank": {"max_tokens_per_rank": 11}}


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("world_size, width", [(1, 272), (2, 144), (3, 128)])
def test_tokens_are_multiplied_as_sent(world_size, width, bound):
    on_ranks(world_size, cases.multiplies_tokens_as_sent, cases.UNEVEN, width, BOUNDS[bound])


@pytest.mark.parametrize(
    "sizes, dtypes, quantize",
    pairs([(1, 128, 128), (2, 144, 80), (3, 272, 144)], cases.DTYPES, [None, "fp8"], everything=THOROUGH), ids=str,
)
def test_forward(sizes, dtypes, quantize):
    (world_size, width, hidden), (dtype, weight_dtype) = sizes, dtypes
    on_ranks(world_size, cases.computes, cases.UNEVEN, width, hidden, dtype, weight_dtype, quantize)


@pytest.mark.parametrize("world_size, scalings, quantize", [
    (2, ("row", "row"), None), (3, ("row", "expert"), "fp8"), (2, ("expert", "block"), "fp8"),
    (1, ("block", "row"), None),
])
def test_other_scales(world_size, scalings, quantize):
    on_ranks(world_size, cases.computes, cases.UNEVEN, 272, 144, *cases.DTYPES[0], quantize, scalings)


@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_no_tokens(quantize):
    on_ranks(2, cases.computes, 0, 144, 80, *cases.DTYPES[0], quantize)


@pytest.mark.parametrize("what", [
    cases.respects_capacity, cases.computes_with_configs, cases.accumulates_fast, cases.takes_interleaved_weights,
    cases.rejects_gradients, cases.compiles, cases.converts_codes_for_fnuz_weights, cases.rejects_invalid_arguments,
], ids=lambda f: f.__name__)
def test_calls(what):
    on_ranks(2, what)
