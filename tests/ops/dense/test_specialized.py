"""The warp-specialized kernels of gemm_rs and gemm_ar, on Hopper; their configs on other devices."""

import pytest
import torch

from tests.ops.dense import specialized_cases as cases
from tests.ops.dense.specialized_support import ON_HOPPER, on_hopper
from tests.support.ranks import on_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(130, 272, 72), (256, 512, 1024), (1, 16, 8), (513, 784, 200)]
each_operator = pytest.mark.parametrize("operator", ["gemm_rs", "gemm_ar"])


@on_hopper
@each_operator
@pytest.mark.parametrize("world_size, dtype, bias", [
    (2, BF16, True), (2, FP16, False), (4, BF16, False), (3, FP16, True),
])
def test_values_and_gradients(operator, world_size, dtype, bias):
    on_ranks(world_size, cases.computes, operator, dtype, SHAPES, bias)


@on_hopper
@each_operator
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_transposed_weight(operator, dtype):
    on_ranks(2, cases.computes_with_a_transposed_weight, operator, dtype)


@on_hopper
def test_rows_of_segments():
    on_ranks(2, cases.computes_rows_of_segments)


@on_hopper
@each_operator
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_bits_of_the_plain_kernel(operator, world_size):
    on_ranks(world_size, cases.has_the_bits_of_the_plain_kernel, operator, 60)


@on_hopper
@pytest.mark.parametrize("world_size, by_turns", [(2, False), (3, True), (8, False)])
def test_tiles_of_two_ranks(world_size, by_turns):
    on_ranks(world_size, cases.sends_halves_of_tiles_to_two_ranks, 60, by_turns)


@on_hopper
@each_operator
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_with_different_kernels(operator, world_size):
    on_ranks(world_size, cases.has_the_bits_of_the_plain_kernel, operator, 30, by_turns=True)


@on_hopper
@each_operator
@pytest.mark.parametrize("world_size", [2, 3])
def test_split_k(operator, world_size):
    on_ranks(world_size, cases.splits_tiles_along_k, operator, 25)


@on_hopper
@each_operator
def test_split_k_on_some_ranks(operator):
    on_ranks(2, cases.splits_tiles_along_k, operator, 10, by_turns=True)


@on_hopper
@each_operator
def test_no_split_k_in_the_batch_invariant_mode(operator):
    on_ranks(2, cases.is_not_split_in_the_batch_invariant_mode, operator)


@on_hopper
@each_operator
def test_graph(operator):
    on_ranks(2, cases.replays_in_a_graph, operator)


@on_hopper
def test_tiles_of_two_ranks_in_a_graph():
    on_ranks(3, cases.replays_in_a_graph, "gemm_rs", 448, cases.PLAIN, 144)


@on_hopper
@each_operator
def test_split_k_in_a_graph(operator):
    on_ranks(2, cases.replays_split_k_in_a_graph, operator)


@on_hopper
@each_operator
@pytest.mark.parametrize("n, k", [(264, 72), (272, 70)])
def test_unsupported_operands(operator, n, k):
    on_ranks(2, cases.falls_back, operator, n, k, BF16)


@pytest.mark.skipif(ON_HOPPER, reason="for other devices")
@each_operator
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_other_devices(operator, dtype):
    on_ranks(2, cases.falls_back, operator, 48, 40, dtype)
