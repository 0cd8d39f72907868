"""The dense operators with scaled fp8 operands, against the dequantized computation in fp64."""

import pytest
import torch

from tdkernels import Tiles
from tests.ops.dense import scaled_cases as cases
from tests.ops.dense.test_dense import ONE_SHOT_EXCHANGE, ONE_SHOT_TRANSPORT
from tests.support.dense_oracle import OPERATORS
from tests.support.ranks import on_ranks
from tests.support.subset import pairs

each_operator = pytest.mark.parametrize("operator", OPERATORS)
SCALINGS = [("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("row", "tensor"), ("block", "block")]
SHAPES = [(40, 48, 64), (37, 29, 208), (5, 130, 272)]  # rows, n, k of a rank
EVEN = [(rows * 12, n, k) for rows, n, k in SHAPES]  # for gemm_rs, whose rows the ranks divide
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


@pytest.mark.parametrize("operator, config", [(name, config) for name in OPERATORS for config in CONFIGS[name]], ids=str)
@pytest.mark.parametrize("scaling", ["row", "block"])
def test_configs(operator, config, scaling):
    on_ranks(2, cases.computes, operator, shapes_of(operator), (scaling, scaling), **config)


@each_operator
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32], ids=str)
def test_output_dtypes(operator, out_dtype):
    options = {"out_dtype": out_dtype, "dtypes": (cases.E5M2, cases.E4M3)}
    on_ranks(2, cases.computes, operator, shapes_of(operator)[:2], options=options, fast=True)
