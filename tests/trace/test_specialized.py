"""Traces of the warp-specialized kernels, on Hopper: several partitions of a program record events of a work item."""

from collections import Counter
from itertools import groupby

import pytest
import torch

import tdkernels
from tdkernels import Tiles
from tdkernels.autotune.tunable import tunable
from tdkernels.trace import Recorder, record
from tdkernels.trace.recording import record_operator
from tdkernels.trace.summary import arrivals
from tdkernels.trace.timeline import make_trace
from tests.ops.dense.specialized_support import on_hopper
from tests.support.ranks import device, on_ranks

TILES = {"block_m": 128, "block_n": 256, "block_k": 64, "num_stages": 3}
DIRECT = {"transport": "direct", "warp_specialize": True, "tiles": TILES}
SHAPE = 1100, 800, 1536  # M, N, K; not multiples of a tile
# Changes to the default config; numbers of work items of two ranks, by their kinds after "starts".
VARIANTS = {
    "gemm_rs": (DIRECT, {("multiplies", "stores"): 20, ("multiplies", "pushes"): 20, ("waits", "sums"): 20 * 16}),
    "gemm_ar": ({**DIRECT, "exchange": "two_shot"}, {
        ("multiplies", "stores"): 18, ("multiplies", "pushes"): 18, ("waits", "sums"): 18 * 16,
        ("waits", "receives"): 18 * 4,
    }),
    "ag_gemm": ({"warp_specialize": True, "tiles": TILES, "num_comm_sms": 8}, None),
}
each_operator = pytest.mark.parametrize("operator", VARIANTS)


def kinds_of_items(intervals):
    """Return {kinds of a work item after "starts": number of such items}."""
    found = Counter()
    for _, members in groupby(intervals, key=lambda interval: interval.program):
        starts, *kinds = (interval.kind for interval in members)
        assert starts == "starts"
        found[tuple(kinds)] += 1
    return found


@on_hopper
@each_operator
def test_every_work_item_is_recorded(operator):
    changes, expected = VARIANTS[operator]
    trace = make_trace(on_ranks(2, record_operator, operator, SHAPE, torch.bfloat16, changes, 2))
    assert "warp_specialize=True" in trace.about["config"]
    for rank, intervals in enumerate(trace.ranks):
        found = kinds_of_items(intervals)
        if expected is None:
            assert set(found) <= {("multiplies", "stores"), ("waits", "multiplies", "stores"), ("pushes",)}
            assert found["pushes",] > 0
        else:
            assert found == expected
        first, last, _ = arrivals(trace, rank)
        assert 0 < first <= last <= max(interval.end for interval in trace.ranks[1 - rank])


@on_hopper
@pytest.mark.parametrize("operator", ["gemm_rs", "gemm_ar"])
def test_splits_are_recorded(operator):
    changes = VARIANTS[operator][0]  # 12 tiles with four splits each
    trace = make_trace(on_ranks(2, record_operator, operator, (400, 528, 8192), torch.bfloat16, changes, 2))
    for intervals in trace.ranks:
        found = kinds_of_items(intervals)
        assert found["multiplies",] == 36 and found["multiplies", "stores"] == found["multiplies", "pushes"] == 6


@on_hopper
@pytest.mark.parametrize("operator, required, others", [
    # Items wait until a program has seen the tokens of their stage. With few tiles each program has one.
    ("moe_ag_gemm", {("waits", "multiplies", "stores"), ("pushes",)}, {("multiplies", "stores")}),
    ("moe_gemm_rs", {("multiplies", "stores"), ("waits", "joins", "pushes"), ("waits", "sums")}, {("waits",)}),
])
def test_every_work_item_of_experts_is_recorded(operator, required, others):
    changes, shape = {"warp_specialize": True, "tiles": TILES}, (1100, 768, 1536, 4, 2)  # tokens, N, K, experts, k
    trace = make_trace(on_ranks(2, record_operator, operator, shape, torch.bfloat16, changes, 2))
    assert "warp_specialize=True" in trace.about["config"]
    for rank, intervals in enumerate(trace.ranks):
        found = kinds_of_items(intervals).keys()
        assert required <= found <= required | others
        assert trace.is_by_warps(rank)


@on_hopper
@each_operator
def test_results_have_the_same_bits(operator):
    on_ranks(2, has_the_same_bits, operator)


def has_the_same_bits(operator):
    changes = {**VARIANTS[operator][0], "tiles": Tiles(**TILES)}
    config = tunable(operator).config_class(**changes)
    x = torch.randn(550 if operator == "ag_gemm" else 1100, 768, device=device(), dtype=torch.bfloat16)
    weight = torch.randn(400 if operator == "ag_gemm" else 800, 768, device=device(), dtype=torch.bfloat16)
    call = getattr(tdkernels, operator)
    expected = call(x, weight, config=config)
    with record(Recorder()) as recorder:
        found = call(x, weight, config=config)
    assert torch.equal(found, expected) and recorder.events[..., 0].any()
    assert torch.equal(call(x, weight, config=config), expected)
