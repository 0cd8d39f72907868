"""Pipelined forms: GEMMs of several shards, and parts that are sent together."""

import contextlib

import pytest
import torch

from tdkernels.ops.collectives.async_all_gather import AsyncAllGather
from tdkernels.ops.collectives.async_reduce_scatter import AsyncReduceScatter
from tdkernels.ops.dense.ag_gemm import pipelined
from tests.ops.dense import cases
from tests.support.ranks import on_ranks

BF16, _, FP32 = cases.DTYPES
SHAPES = [(41, 37, 50), (24, 136, 48), (64, 24, 40)]  # the rows of a shard are a multiple of 8 in the last one
PARTS = {"method": "parts"}


@contextlib.contextmanager
def recorded(owner, name):
    """Yield a list of the positional arguments of all calls of a method."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        original = getattr(owner, name)

        def call(self, *args, **kwargs):
            calls.append(args)
            return original(self, *args, **kwargs)

        patch.setattr(owner, name, call)
        yield calls


def multiplies_groups(operator, dtype, first_steps):
    with pytest.MonkeyPatch.context() as patch, recorded(AsyncAllGather, "wait") as waits:
        patch.setattr(pipelined, "_GROUPS_FROM", 0.0)
        cases.computes(operator, dtype, SHAPES, **PARTS)
    assert [first for first, *_ in waits] == first_steps * len(SHAPES)


@pytest.mark.parametrize("operator, dtype", [("ag_gemm", FP32), ("gemm_rs", BF16)], ids=str)
@pytest.mark.parametrize("world_size, first_steps", [(2, [1]), (3, [1, 2]), (5, [1, 2, 4])], ids=str)
def test_groups_of_shards(operator, dtype, world_size, first_steps):
    on_ranks(world_size, multiplies_groups, operator, dtype, first_steps)


def test_small_gemms_wait_for_each_shard():
    on_ranks(3, waits_for_each_shard)


def waits_for_each_shard():
    with recorded(AsyncAllGather, "wait") as waits:
        cases.computes("ag_gemm", FP32, SHAPES, **PARTS)
    assert [first for first, *_ in waits] == [1, 2] * len(SHAPES)


@pytest.mark.parametrize("sources, adjacent, ranges", [
    ([3, 2], True, [(2, 4)]), ([0, 7, 6, 5], True, [(0, 1), (5, 8)]), ([3, 2], False, [(2, 3), (3, 4)]), ([], True, []),
])
def test_ranges(sources, adjacent, ranges):
    assert pipelined._ranges(sources, adjacent) == ranges


def sends_halves(owners_by_rank):
    rank = torch.distributed.get_rank()
    with recorded(AsyncReduceScatter, "send_all") as calls:
        cases.computes("ag_gemm", BF16, [SHAPES[0]], **PARTS)
    assert [list(parts) for parts, in calls] == owners_by_rank[rank]


@pytest.mark.parametrize("owners_by_rank", [
    [[[1], []], [[0], []]],
    [[[2], [1]], [[2], [0]], [[0, 1], []]],
    [[[3, 4], [1, 2]], [[4, 3], [2, 0]], [[3, 4], [0, 1]], [[0, 1, 2], [4]], [[1, 2, 0], [3]]],
], ids=len)
def test_the_other_half_is_sent_first(owners_by_rank):
    """The backward of ag_gemm. In each step, ranks of one half send to different owners as far as possible."""
    on_ranks(len(owners_by_rank), sends_halves, owners_by_rank)
