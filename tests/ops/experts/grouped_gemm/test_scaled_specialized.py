"""The warp-specialized kernel of group_gemm with scaled fp8 operands, on Hopper."""

import pytest
import torch

from tests.ops.dense.specialized_support import on_hopper
from tests.ops.experts.grouped_gemm import scaled_specialized_cases as cases
from tests.ops.experts.grouped_gemm.scaled_cases import E4M3, E5M2
from tests.support.ranks import on_ranks

BF16, FP16 = torch.bfloat16, torch.float16
# N, K: columns that end inside a tile and inside a block of scales, K inside a step.
SHAPES = [(272, 144), (512, 1024), (16, 16), (784, 400), (256, 2048)]
WHOLE_BLOCKS = [(256, 144), (512, 1024), (768, 400)]  # of gate and of up
SCALINGS = [("row", "row"), ("tensor", "tensor"), ("row", "expert"), ("tensor", "row"), ("row", "tensor")]


@on_hopper
@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_bits_of_the_plain_kernel(scaling, fast, activation):
    on_ranks(1, cases.has_the_bits_of_the_plain_kernel, scaling, activation, fast, SHAPES)


@on_hopper
@pytest.mark.parametrize("activation, shapes", [(None, SHAPES), ("swiglu", WHOLE_BLOCKS)])
def test_blocks(activation, shapes):
    on_ranks(1, cases.has_the_bits_of_the_plain_kernel, ("block", "block"), activation, False, shapes)


@on_hopper
@pytest.mark.parametrize("scaling, dtypes, out_dtype", [
    (("row", "row"), (E5M2, E5M2), FP16), (("block", "block"), (E5M2, E5M2), FP16),
    (("row", "row"), (E5M2, E4M3), BF16), (("block", "block"), (E4M3, E5M2), BF16),
])
def test_dtypes(scaling, dtypes, out_dtype):
    on_ranks(
        1, cases.has_the_bits_of_the_plain_kernel, scaling, None, False, SHAPES[:2], dtypes=dtypes, out_dtype=out_dtype
    )


@on_hopper
@pytest.mark.parametrize("scaling, activation, n, options", [
    (("block", "block"), "swiglu", 320, {}), (("row", "row"), "swiglu_interleaved", 512, {}),
    (("row", "row"), None, 520 + 4, {}), (("row", "row"), None, 512, {"out_dtype": torch.float32}),
])
def test_unsupported_operands(scaling, activation, n, options):
    on_ranks(
        1, cases.has_the_bits_of_the_plain_kernel, scaling, activation, False, [(n, 144)], expected=False, **options
    )


@on_hopper
@pytest.mark.parametrize("scaling, fast", [("row", True), ("row", False), ("block", False)])
def test_repeats(scaling, fast):
    on_ranks(1, cases.repeats, (scaling, scaling), fast)


@on_hopper
@pytest.mark.parametrize("scaling, options, specialized", [
    ("row", {}, True), ("block", {}, True), ("row", {"out_dtype": torch.float32}, False),
])
def test_default(scaling, options, specialized):
    on_ranks(1, cases.selects_by_default, (scaling, scaling), specialized, **options)


@on_hopper
@pytest.mark.parametrize("scaling", ["row", "block"])
def test_graph(scaling):
    on_ranks(1, cases.replays_in_a_graph, (scaling, scaling))
