"""Synchronization between ranks in tp_moe and its stages: determinism, disagreement, lost peers."""

import pytest

from tdkernels import PeerTimeoutError
from tdkernels.launch import RankError
from tests.ops.experts.tp_moe import rank_cases
from tests.ops.experts.tp_moe.rank_cases import CACHED_CALLS, DISAGREEMENTS, KINDS
from tests.support.ranks import DEVICE, dies, fresh_ranks, on_ranks

ON_GPU = DEVICE == "cuda"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="takes too long without a GPU")

LARGE = [
    (dict(tokens=1000, k=3, experts=7, width=1000, hidden=260, seed=4), "default"),
    (dict(tokens=2048, k=4, experts=32, width=1024, hidden=256, ids="few", seed=5), "default"),
    (dict(tokens=2048, k=4, experts=32, width=1024, hidden=256, ids="any", seed=6), "default"),
]


@pytest.mark.parametrize("world_size, calls", [(2, 60), (3, 60), (4, 60)] if ON_GPU else [(2, 6), (3, 2)])
def test_bitwise_deterministic(world_size, calls):
    on_ranks(world_size, rank_cases.is_bitwise_deterministic, KINDS, calls, seed=world_size)


@needs_gpu
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", LARGE, ids=lambda kind: kind[0]["ids"] if "ids" in kind[0] else "odd")
def test_bitwise_deterministic_with_many_tiles(world_size, kind):
    on_ranks(world_size, rank_cases.is_bitwise_deterministic, [kind], 20, seed=world_size)


@pytest.mark.parametrize("world_size, calls", [(2, 100), (3, 100)] if ON_GPU else [(3, 4)])
def test_no_rank_overtakes_its_peers_data(world_size, calls):
    on_ranks(world_size, rank_cases.runs_ahead_of_peers, calls)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_of_the_workspace(world_size):
    on_ranks(world_size, rank_cases.takes_rows_from_the_workspace, KINDS[:2], 4)


def test_slow_rank():
    on_ranks(2, rank_cases.waits_for_a_slow_rank)


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_disagreement_is_reported_on_every_rank(what):
    on_ranks(3, rank_cases.reports_disagreement, what)


@pytest.mark.parametrize("what", ["width", "method"])
def test_disagreement_in_down_stage(what):
    on_ranks(3, rank_cases.reports_disagreement_in_down_stage, what)


def test_routings_with_other_chunks():
    on_ranks(2, rank_cases.takes_routings_with_other_chunks)
    on_ranks(3, rank_cases.reports_routings_with_other_chunks)


def test_operator_mismatch():
    on_ranks(3, rank_cases.reports_operator_mismatch)


@pytest.mark.parametrize("what", CACHED_CALLS)
def test_mixed_cached_calls_return_no_result(what):
    on_ranks(2, rank_cases.detects_mismatch_of_cached_plans, what)


@pytest.mark.parametrize("when, operator", [("rows", "moe_ag_gemm"), ("sums", "moe_gemm_rs")])
def test_killed_rank(when, operator):
    with fresh_ranks(2) as pool, pytest.raises(RankError) as caught:
        pool.run(rank_cases.loses_rank_1, dies, when, 1.5)
    exceptions = caught.value.exceptions
    assert isinstance(exceptions[1], ChildProcessError)
    error = exceptions[0]
    assert type(error) is PeerTimeoutError, repr(error)
    assert (error.rank, error.peer, error.timeout_s) == (0, 1, 1.5)
    # A kernel that rank 1 had launched on its GPU may have been killed with it.
    assert error.operator == operator or DEVICE == "cuda" and error.operator == "all_gather"
    assert error.seen < error.expected


def test_no_forwarding_after_a_timeout():
    """Without the tokens of rank 1, rank 0 has no sums for rank 2. It sends its own sums before it times out."""
    outcomes = {when: on_ranks(3, rank_cases.times_out_on_rank_0, when) for when in ("rows", "sums")}
    assert outcomes == {"rows": ["missed 1", "missed 0", "missed 0"], "sums": ["missed 1", "right", "right"]}
