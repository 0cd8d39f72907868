"""The warp-specialized kernel of gemm_rs, on Hopper; its config on other devices."""

import pytest
import torch

from tests.ops.dense import specialized_cases as cases
from tests.ops.dense.specialized_support import ON_HOPPER, on_hopper
from tests.support.ranks import on_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(130, 272, 72), (256, 512, 1024), (1, 16, 8), (513, 784, 200)]


@on_hopper
@pytest.mark.parametrize("world_size, dtype, bias", [
    (2, BF16, True), (2, FP16, False), (4, BF16, False), (3, FP16, True),
])
def test_values_and_gradients(world_size, dtype, bias):
    on_ranks(world_size, cases.computes, dtype, SHAPES, bias)


@on_hopper
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_transposed_weight(dtype):
    on_ranks(2, cases.computes_with_a_transposed_weight, dtype)


@on_hopper
def test_rows_of_segments():
    on_ranks(2, cases.computes_rows_of_segments)


@on_hopper
@pytest.mark.parametrize("world_size", [2, 4])
def test_bits_of_the_plain_kernel(world_size):
    on_ranks(world_size, cases.has_the_bits_of_the_plain_kernel, 60)


@on_hopper
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_with_different_kernels(world_size):
    on_ranks(world_size, cases.has_the_bits_of_the_plain_kernel, 30, by_turns=True)


@on_hopper
def test_graph():
    on_ranks(2, cases.replays_in_a_graph)


@on_hopper
@pytest.mark.parametrize("n, k", [(264, 72), (272, 70)])
def test_unsupported_operands(n, k):
    on_ranks(2, cases.falls_back, n, k, BF16)


@pytest.mark.skipif(ON_HOPPER, reason="for other devices")
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_other_devices(dtype):
    on_ranks(2, cases.falls_back, 48, 40, dtype)
