"""ag_gemm and gemm_rs with wire compression, against the uncompressed computation in fp64."""

import pytest
import torch

from tests.ops.dense import wire_call_cases as call_cases
from tests.ops.dense import wire_cases as cases
from tests.ops.dense.wire_cases import BF16, FP16, FP32
from tests.support.ranks import DEVICE, on_ranks
from tests.support.subset import pairs

OPERATORS = ["ag_gemm", "gemm_rs"]
SHAPES = [(13, 9, 70), (24, 130, 256), (5, 257, 129), (1, 1, 1)]  # rows, n, k of a rank
each_operator = pytest.mark.parametrize("operator", OPERATORS)


@pytest.mark.parametrize("world_size, dtype, operator", pairs([1, 2, 3], [BF16, FP16, FP32], OPERATORS), ids=str)
def test_error_bound(world_size, dtype, operator):
    on_ranks(world_size, cases.computes, operator, dtype, SHAPES)


@each_operator
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_chunks(pieces, operator):
    on_ranks(3, cases.computes, operator, BF16, [(40, 20, 150), (3, 5, 7)], pieces)


@each_operator
@pytest.mark.parametrize("world_size, dtype", [(2, BF16), (3, FP32)], ids=str)
def test_every_bit(world_size, dtype, operator):
    on_ranks(world_size, cases.is_exact, operator, dtype, (17, 140, 12), 2)


@each_operator
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_error_is_that_of_fp8(dtype, operator):
    on_ranks(2, cases.compresses, operator, dtype)


@each_operator
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_bytes_on_the_wire(dtype, operator):
    on_ranks(2, cases.sends_packed_rows, operator, dtype)


@pytest.mark.parametrize("dtype, k", [(BF16, 300), (FP16, 128), (FP32, 1029)], ids=str)
def test_gathered_x_is_quantized(dtype, k):
    on_ranks(2, cases.gathers_quantized_rows, dtype, k)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_special_values_of_partials(dtype):
    on_ranks(3, cases.keeps_special_values, dtype)


@pytest.mark.parametrize("world_size, pieces, operator", pairs([1, 2, 3], [None, 2], OPERATORS), ids=str)
def test_gradients(world_size, pieces, operator):
    on_ranks(world_size, cases.has_gradients_of_the_uncompressed_operator, operator, FP32, pieces)


@pytest.mark.parametrize("world_size", [1, 2])
def test_lists_and_dim(world_size):
    on_ranks(world_size, cases.supports_lists_and_dim, FP32)


@each_operator
def test_layouts(operator):
    on_ranks(2, cases.supports_any_layout, operator)


@each_operator
def test_reproducibility(operator):
    on_ranks(3, cases.is_reproducible, operator)


@each_operator
def test_call_cache(operator):
    on_ranks(2, call_cases.caches_calls_by_wire, operator)


@each_operator
@pytest.mark.parametrize("world_size", [1, 2])
def test_empty_operands(world_size, operator):
    on_ranks(world_size, call_cases.supports_empty_operands, operator)


@each_operator
def test_autocast(operator):
    on_ranks(2, call_cases.follows_autocast, operator)


@each_operator
@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_arguments(world_size, operator):
    on_ranks(world_size, call_cases.rejects, operator)


@each_operator
def test_disagreement(operator):
    on_ranks(3, call_cases.reports_disagreement, operator)


@each_operator
def test_mismatch_of_cached_calls(operator):
    on_ranks(2, call_cases.detects_mismatch_of_cached_calls, operator)


def test_several_nodes():
    on_ranks(4, call_cases.across_nodes, 2)


def test_torch_compile():
    on_ranks(2, call_cases.compiles)


def test_opcheck():
    on_ranks(2, call_cases.passes_opcheck)


@pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="CUDA graphs need GPUs")
def test_cuda_graph():
    on_ranks(2, call_cases.replays_in_a_cuda_graph)
