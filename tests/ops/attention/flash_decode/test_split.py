"""Method "split" of flash_decode on latent caches: on Hopper at full width with ``latent_kernel``, else small cases."""

import pytest
import torch

from tests.ops.attention.flash_decode import split_cases
from tests.ops.attention.flash_decode.oracle import BF16, FP16
from tests.support.ranks import DEVICE, on_ranks
from tests.support.subset import turns

ON_HOPPER = DEVICE != "cpu" and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
HEADS = 64 if ON_HOPPER else 3
PROGRAMS = [0, 1, 7, 132, 500] if ON_HOPPER else [0, 50]
# (heads, query tokens). Each is compiled, which takes most of the time. A tile has 64 query rows.
SHAPES = [(16, None), (16, 3), (64, None), (64, 2), (100, 3), (128, None), (128, 2)] if ON_HOPPER else [(3, 2)]
TYPES = [(BF16, torch.int32), (FP16, torch.int64)]


@pytest.mark.parametrize("heads, tokens, dtype, lens_dtype", turns(SHAPES, TYPES, everything=False), ids=str)
def test_shapes(heads, tokens, dtype, lens_dtype):
    on_ranks(1, split_cases.computes, heads, tokens, dtype, lens_dtype, PROGRAMS)


@pytest.mark.parametrize("world_size", [2, 3, 4] if ON_HOPPER else [3])
def test_ranks(world_size):
    on_ranks(world_size, split_cases.computes, HEADS, None, BF16, torch.int32, PROGRAMS[::2])


@pytest.mark.parametrize("world_size", [1, 2])
def test_many_sequences(world_size):
    on_ranks(world_size, split_cases.computes_many_sequences, 300 if ON_HOPPER else 9, HEADS)


@pytest.mark.parametrize("programs", [0, 7] if ON_HOPPER else [30])
def test_long_sequence(programs):
    on_ranks(1, split_cases.computes_a_long_sequence, 8192 if ON_HOPPER else 650, HEADS, programs)


def test_pages():
    on_ranks(1, split_cases.computes_pages, HEADS, [32, 96, 16] if ON_HOPPER else [32, 48])


@pytest.mark.parametrize("check", [
    split_cases.computes_with_any_scale, split_cases.supports_strides, split_cases.supports_queries_anywhere,
    split_cases.clamps_lengths, split_cases.supports_changing_lens, split_cases.supports_calls_in_a_row,
    split_cases.falls_back,
], ids=lambda check: check.__name__)
def test_calls(check):
    on_ranks(1, check, HEADS)


ROPE = [
    (16, 3, FP16, "tensor"), (64, None, BF16, None), (64, 2, BF16, "one"), (100, 3, BF16, "head"),
    (128, None, FP16, "tensor"), (128, 2, BF16, "tensor"),
] if ON_HOPPER else [(3, 2, BF16, "tensor"), (3, None, FP16, None)]


@pytest.mark.parametrize("heads, tokens, dtype, scales", ROPE, ids=str)
def test_rope(heads, tokens, dtype, scales):
    on_ranks(1, split_cases.computes_with_rope, heads, tokens, dtype, scales, PROGRAMS)


def test_pages_with_rope():
    on_ranks(1, split_cases.computes_pages_with_rope, HEADS, [32, 96, 16] if ON_HOPPER else [32])


@pytest.mark.parametrize("check", [
    split_cases.computes_with_any_scale_of_keys, split_cases.supports_one_buffer_for_both,
    split_cases.supports_calls_in_a_row_with_rope, split_cases.checks_rope,
], ids=lambda check: check.__name__)
def test_calls_with_rope(check):
    on_ranks(1, check, HEADS)


@pytest.mark.parametrize("world_size, tokens", [(1, 2), (2, None)])
def test_gradients(world_size, tokens):
    on_ranks(world_size, split_cases.computes_gradients, HEADS, tokens)


@pytest.mark.parametrize("world_size", [1, 2])
def test_empty_batch(world_size):
    on_ranks(world_size, split_cases.supports_empty_batch)


def test_compile():
    on_ranks(2, split_cases.supports_compile)
