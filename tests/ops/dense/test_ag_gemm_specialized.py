"""The warp-specialized kernel of ag_gemm, on Hopper; its config on other devices."""

import pytest
import torch

from tests.ops.dense import ag_gemm_specialized_cases as cases
from tests.ops.dense.specialized_support import ON_HOPPER, on_hopper
from tests.support.ranks import on_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(130, 272, 72), (256, 512, 1024), (1, 16, 8), (513, 784, 200), (140, 272, 2056)]


@on_hopper
@pytest.mark.parametrize("world_size, dtype, bias, transport", [
    (2, BF16, True, "push"), (2, FP16, False, "copy_engine"), (4, BF16, False, "push"), (3, FP16, True, "push"),
])
def test_values_and_gradients(world_size, dtype, bias, transport):
    on_ranks(world_size, cases.computes, dtype, SHAPES, bias, transport)


@on_hopper
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_transposed_weight(dtype):
    on_ranks(2, cases.computes_with_a_transposed_weight, dtype)


@on_hopper
@pytest.mark.parametrize("world_size, n", [(2, 528), (4, 2064)])
def test_backward_of_gemm_rs(world_size, n):
    on_ranks(world_size, cases.computes_the_backward_of_gemm_rs, BF16, n)


# On other devices the portable kernel runs, which sets and awaits the same signals.
@pytest.mark.parametrize("world_size, chunk_tiles", [(2, 1), (3, 2)])
def test_gathered_rows_with_several_signals(world_size, chunk_tiles):
    on_ranks(world_size, cases.keeps_the_gathered_rows, 136, 80, 1088, chunk_tiles, 2)


@on_hopper
@pytest.mark.parametrize("transport", ["push", "copy_engine"])
@pytest.mark.parametrize("dim, return_gathered", [(0, False), (1, False), (0, True)])
def test_several_weights(dim, return_gathered, transport):
    on_ranks(2, cases.computes_several_weights, dim, return_gathered, transport)


@on_hopper
def test_several_weights_in_slices():
    on_ranks(3, cases.computes_several_weights, 1, False, "push", 2056)


@on_hopper
@pytest.mark.parametrize("world_size", [2, 4])
def test_bits_of_the_plain_kernel(world_size):
    on_ranks(world_size, cases.has_the_bits_of_the_plain_kernel, 72)


@on_hopper
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_with_different_kernels(world_size):
    on_ranks(world_size, cases.has_the_bits_of_the_plain_kernel, 72, by_turns=True)


@on_hopper
@pytest.mark.parametrize("world_size, by_turns", [(2, False), (3, True), (4, False), (8, False)])
def test_tiles_across_shards(world_size, by_turns):
    on_ranks(world_size, cases.has_tiles_across_shards, 72, by_turns)


@on_hopper
def test_several_weights_with_tiles_across_shards():
    on_ranks(3, cases.computes_several_weights, 0, False, "push", 2056, (3, 48))


@on_hopper
@pytest.mark.parametrize("world_size, rows", [(2, 256), (3, 144)])
def test_graph(world_size, rows):
    on_ranks(world_size, cases.replays_in_a_graph, rows)


@on_hopper
@pytest.mark.parametrize("n, k", [(264, 72), (272, 70)])
def test_unsupported_operands(n, k):
    on_ranks(2, cases.falls_back, n, k, BF16)


@on_hopper
def test_one_rank_falls_back():
    on_ranks(2, cases.computes_with_an_unaligned_weight_on_a_rank)


@on_hopper
def test_short_segments():
    on_ranks(2, cases.falls_back_for_short_segments)


@pytest.mark.skipif(ON_HOPPER, reason="for other devices")
@pytest.mark.parametrize("world_size, k, dtype", [(2, 40, BF16), (3, 2100, FP32)], ids=str)
def test_other_devices(world_size, k, dtype):
    on_ranks(world_size, cases.falls_back, 48, k, dtype)
