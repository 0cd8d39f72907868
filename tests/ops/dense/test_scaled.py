"""The dense operators with scaled fp8 operands, against the dequantized computation in fp64."""

import pytest
import torch

from tdkernels import Tiles
from tests.ops.dense import scaled_cases as cases
from tests.ops.dense.test_dense import ONE_SHOT_EXCHANGE, ONE_SHOT_TRANSPORT
from tests.support.dense_oracle import OPERATORS
from tests.support.ranks import on_ranks
from tests.support.subset import pairs, turns

each_operator = pytest.mark.parametrize("operator", OPERATORS)
SCALINGS = [("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("row", "tensor"), ("block", "block")]
SHAPES = [(40, 48, 64), (37, 29, 208), (5, 130, 272)]  # rows, n, k of a rank
EVEN = [(48, 48, 64), (36, 29, 208), (12, 130, 272)]  # for gemm_rs, whose rows the ranks divide
CONFIGS = {
    "ag_gemm": [
        {}, {"method": "torch"}, {"method": "parts"}, {"method": "parts", "pieces": 3}, {"transport": "copy_engine"},
        {"transport": "push", "num_comm_sms": 3}, {"transport": "push", "chunk_tiles": 2, "tiles": Tiles(16, 32, 64)},
        ONE_SHOT_TRANSPORT, {**ONE_SHOT_TRANSPORT, "tiles": Tiles(16, 32, 32, 1, 4, 2), "split_k": 2},
    ],
    "gemm_rs": [
        {}, {"method": "torch"}, {"method": "parts"}, {"method": "parts", "pieces": 3},
        {"transport": "forward", "tiles": Tiles(16, 128, 32), "item_tiles": 3}, {"transport": "direct"},
        {"transport": "direct", "tiles": Tiles(32, 64, 128)}, ONE_SHOT_TRANSPORT,
        {**ONE_SHOT_TRANSPORT, "tiles": Tiles(16, 32, 32, 1, 4, 2), "split_k": 2},
    ],
    "gemm_ar": [
        {}, {"method": "torch"}, {"exchange": "two_shot", "tiles": Tiles(16, 128, 32), "item_tiles": 3},
        {"exchange": "two_shot", "transport": "direct"}, ONE_SHOT_EXCHANGE,
        {**ONE_SHOT_EXCHANGE, "tiles": Tiles(16, 32, 32, 1, 4, 2), "split_k": 2},
    ],
}


def shapes_of(operator):
    return EVEN if operator == "gemm_rs" else SHAPES


@pytest.mark.parametrize("world_size, scaling, operator", pairs([1, 2, 3], SCALINGS, OPERATORS), ids=str)
def test_scalings(world_size, scaling, operator):
    on_ranks(world_size, cases.computes, operator, shapes_of(operator), scaling)


@pytest.mark.parametrize(
    "operator, config, scaling",
    turns([(op, config) for op in OPERATORS for config in CONFIGS[op]], [("row",), ("block",)]), ids=str,
)
def test_configs(operator, config, scaling):
    on_ranks(2, cases.computes, operator, shapes_of(operator), (scaling, scaling), **config)


@each_operator
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32], ids=str)
def test_output_dtypes(operator, out_dtype):
    options = {"out_dtype": out_dtype, "dtypes": (cases.E5M2, cases.E4M3)}
    on_ranks(2, cases.computes, operator, shapes_of(operator)[:2], options=options, fast=True)


SPECIAL = [
    ("ag_gemm", {}), ("ag_gemm", {"transport": "push", "num_comm_sms": 3}), ("ag_gemm", ONE_SHOT_TRANSPORT),
    ("gemm_rs", {}), ("gemm_rs", {"transport": "direct"}), ("gemm_rs", {**ONE_SHOT_TRANSPORT, "split_k": 2}),
    ("gemm_ar", {}), ("gemm_ar", {"exchange": "two_shot", "transport": "direct"}), ("gemm_ar", ONE_SHOT_EXCHANGE),
]


@pytest.mark.parametrize("operator, changes, scaling", turns(SPECIAL, [("row",), ("block",), ("tensor",)]), ids=str)
def test_special_values(operator, changes, scaling):
    on_ranks(2, cases.handles_special_values, operator, scaling, **changes)


@pytest.mark.parametrize("operator, changes, scaling", turns(SPECIAL, [("row",), ("block",)]), ids=str)
def test_same_bits(operator, changes, scaling):
    on_ranks(2, cases.same_bits, operator, EVEN[0] if operator == "gemm_rs" else SHAPES[0], scaling, **changes)


@each_operator
def test_four_ranks_and_minimal_shapes(operator):
    """One column, no full tile, and K of one code group."""
    rows = 8 if operator == "gemm_rs" else 2
    on_ranks(4, cases.computes, operator, [(rows, 1, 16), (4 * rows, 17, 144)])


@each_operator
def test_one_row_per_rank(operator):
    """A row-wise scale has the shape of a tensor-wise one, and so has a block-wise one for K of at most 128."""
    rows = 2 if operator == "gemm_rs" else 1
    for scaling, k in (("row", 16), ("block", 16), ("block", 144)):
        on_ranks(2, cases.computes, operator, [(rows, 17, k), (rows, 1, k)], (scaling, scaling))
