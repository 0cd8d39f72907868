"""all_reduce with quantization, against sums in fp64 and, bit for bit, against plain torch."""

import pytest
import torch

from tests.ops.collectives import quantized_cases as cases
from tests.ops.collectives.quantized_cases import LONG_CHUNKS, SMALL_CHUNKS
from tests.support.ranks import on_ranks
from tests.support.subset import pairs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(1,), (5, 7), (127,), (3, 512), (1537,), (3, 11, 129)]
CONFIGS = [None, SMALL_CHUNKS, LONG_CHUNKS]


@pytest.mark.parametrize("world_size, dtype, changes", pairs([1, 2, 3, 4], [BF16, FP16, FP32], CONFIGS), ids=str)
def test_values(world_size, dtype, changes):
    on_ranks(world_size, cases.computes, dtype, SHAPES, changes)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_error_is_that_of_fp8(dtype):
    on_ranks(2, cases.has_the_error_of_fp8, dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_special_values(dtype):
    on_ranks(3, cases.keeps_special_values, dtype)


@pytest.mark.parametrize("dtype, factor", [(BF16, 1 / 2), (FP32, 1 / 4)], ids=str)
def test_bytes_on_the_wire(dtype, factor):
    on_ranks(2, cases.is_bounded_by_the_wire, dtype, factor)


def test_layouts():
    on_ranks(2, cases.supports_any_layout)


def test_gradient():
    on_ranks(2, cases.has_the_gradient_of_the_uncompressed_operator)


@pytest.mark.parametrize("changes", CONFIGS, ids=str)
def test_memory_is_reused_in_any_order(changes):
    on_ranks(3, cases.reuses_memory_in_any_order, changes)


@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_arguments(world_size):
    on_ranks(world_size, cases.rejects)


def test_disagreement():
    on_ranks(3, cases.reports_disagreement)


def test_mismatch_of_cached_calls():
    on_ranks(2, cases.detects_mismatch_of_cached_calls)


def test_several_nodes():
    on_ranks(4, cases.rejects_several_nodes, 2)
