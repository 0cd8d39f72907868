"""AG-GEMM: forward and every gradient against the unsharded computation."""

import pytest

from tdkernels import Tiles
from tests.ops import dense
from tests.ranks import on_ranks

OPERATOR = "ag_gemm"
WORLD_SIZES = [1, 2, 3, 4]
BF16, FP16, FP32 = dense.DTYPES
CONFIGS = {
    "default": {},
    "torch": {"method": "torch"},
    "small tiles, one pushing program": {"tiles": Tiles(16, 16, 16, 1, 4, 2), "num_comm_sms": 1},
    "three pushing programs, chunks of two tiles": {"tiles": Tiles(32, 64, 16), "num_comm_sms": 3, "chunk_tiles": 2},
    "chunks longer than a shard": {"tiles": Tiles(16, 128, 32, 2, 4, 1), "chunk_tiles": 9},
    "copy engine": {"transport": "copy_engine"},
    "copy engine, small tiles": {"transport": "copy_engine", "tiles": Tiles(16, 32, 64)},
    "copy engine, chunks of two tiles": {"transport": "copy_engine", "tiles": Tiles(32, 16, 16), "chunk_tiles": 2},
}


@pytest.mark.parametrize("dtype", dense.DTYPES, ids=str)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_shapes(world_size, dtype):
    on_ranks(world_size, dense.computes, OPERATOR, dtype, dense.SHAPES)


@pytest.mark.parametrize("world_size, dtype", [(2, FP32), (3, BF16), (4, FP16)], ids=str)
def test_every_element_of_small_integers(world_size, dtype):
    shapes = dense.MINIMAL_SHAPES + dense.SHAPES
    on_ranks(world_size, dense.computes, OPERATOR, dtype, shapes, bias=False, exact=True)


@pytest.mark.parametrize("dtype", dense.DTYPES, ids=str)
def test_larger_than_any_tile(dtype):
    on_ranks(2, dense.computes, OPERATOR, dtype, dense.LARGE_SHAPES)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("world_size, dtype", [(2, BF16), (3, FP32), (4, FP16)], ids=str)
def test_configs(world_size, dtype, config):
    shapes = [(40, 37, 50), (24, 136, 48)]
    on_ranks(world_size, dense.computes, OPERATOR, dtype, shapes, **CONFIGS[config])


@pytest.mark.parametrize("config", CONFIGS)
def test_minimal_shapes_in_every_config(config):
    on_ranks(3, dense.computes, OPERATOR, BF16, dense.MINIMAL_SHAPES, exact=True, **CONFIGS[config])


@pytest.mark.parametrize("layout", dense.LAYOUTS)
@pytest.mark.parametrize("operand", ["x", "weight", "dy"])
def test_layouts(operand, layout):
    on_ranks(2, dense.computes_with_layout, OPERATOR, BF16, operand, layout)


def test_strided_bias():
    on_ranks(2, dense.computes_with_strided_bias, OPERATOR, FP16)


def test_expanded_gradient():
    on_ranks(2, dense.takes_an_expanded_gradient, OPERATOR)


@pytest.mark.parametrize("batch, seq", [(2, 7), (4, 1)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_leading_dimensions(world_size, batch, seq):
    on_ranks(world_size, dense.computes_with_leading_dims, OPERATOR, BF16, batch, seq)


@pytest.mark.parametrize("changes", [{}, {"method": "torch"}], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_rows(world_size, changes):
    on_ranks(world_size, dense.computes_nothing, OPERATOR, BF16, changes)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_subset_of_gradients(world_size, dtype):
    on_ranks(world_size, dense.computes_only_the_gradients_asked_for, OPERATOR, dtype)


@pytest.mark.parametrize(
    "what",
    [
        dense.computes_without_grad, dense.uses_an_output_twice, dense.feeds_one_x_to_two_calls,
        dense.goes_backward_twice, dense.recomputes_in_a_checkpoint, dense.obeys_autocast,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
@pytest.mark.parametrize("world_size", [1, 2])
def test_autograd(world_size, what):
    on_ranks(world_size, what, OPERATOR)


def test_second_derivatives_are_refused():
    on_ranks(1, dense.refuses_second_derivatives, OPERATOR)


@pytest.mark.parametrize("config", ["default", "three pushing programs, chunks of two tiles", "copy engine"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_same_bits_every_time(dtype, config):
    on_ranks(3, dense.repeats_its_bits, OPERATOR, dtype, **CONFIGS[config])


@pytest.mark.parametrize("dtype", dense.DTYPES, ids=str)
def test_one_rank_is_plain_linear(dtype):
    on_ranks(1, dense.is_plain_linear_on_one_rank, OPERATOR, dtype)
