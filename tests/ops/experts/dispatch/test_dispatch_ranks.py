"""Synchronization between ranks in ep_dispatch and ep_combine: memory reuse, groups, disagreement, lost peers."""

import pytest

from tdkernels.launch import RankError
from tests.ops.experts.dispatch import rank_cases
from tests.ops.experts.dispatch.rank_cases import CACHED_CALLS, DISAGREEMENTS, check_killed
from tests.support.ranks import DEVICE, dies, fresh_ranks, on_ranks

ON_GPU = DEVICE == "cuda"


@pytest.mark.parametrize("world_size, calls", [(2, 12), (3, 6), (4, 3)])
def test_stress(world_size, calls):
    """A GPU runs 500 calls with more tokens in the time that the interpreter takes for a few calls."""
    on_ranks(world_size, rank_cases.stress, *((500, 300) if ON_GPU else (calls, 6)), seed=world_size)


@pytest.mark.parametrize("world_size, calls", [(2, 6), (3, 4)] if ON_GPU else [(3, 4)])
def test_no_rank_overtakes_its_peers_data(world_size, calls):
    on_ranks(world_size, rank_cases.runs_ahead_of_peers, calls * (20 if ON_GPU else 1))


def test_slow_rank():
    on_ranks(2, rank_cases.waits_for_a_slow_rank)


def test_workspace_grows():
    on_ranks(2, rank_cases.grows_workspace, [(1, 3), ([70, 3, 0, 6], 5), (2, 300), (3, 4)])


def test_subgroups():
    on_ranks(4, rank_cases.uses_subgroups)


def test_dimension_of_a_mesh():
    on_ranks(4, rank_cases.uses_a_mesh)


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_disagreement_is_reported_on_every_rank(what):
    on_ranks(3, rank_cases.reports_disagreement, what)


@pytest.mark.parametrize("what", ["width", "dtype", "config"])
def test_disagreement_in_combine(what):
    on_ranks(3, rank_cases.reports_disagreement_in_combine, what)


def test_operator_mismatch():
    on_ranks(3, rank_cases.reports_operator_mismatch)


@pytest.mark.parametrize("what", CACHED_CALLS)
def test_mixed_cached_calls_return_no_result(what):
    on_ranks(3, rank_cases.detects_mismatch_of_cached_plans, what)


def test_mixed_cached_combines_return_no_result():
    on_ranks(3, rank_cases.detects_mismatch_of_cached_combine_plans)


@pytest.mark.parametrize("world_size, when", [(3, "counts"), (2, "dispatch"), (2, "combine")])
def test_killed_rank(world_size, when):
    with fresh_ranks(world_size) as pool, pytest.raises(RankError) as caught:
        pool.run(rank_cases.loses_rank_1, dies, when, 1.5)
    check_killed(caught, world_size, 1.5)


def test_no_forwarding_after_a_timeout():
    """Without the counts of rank 1, rank 0 sends no tokens. In a combine it has sent its rows before it times out."""
    assert on_ranks(3, rank_cases.times_out_on_rank_0, "counts") == ["missed 1", "missed 0", "missed 0"]
    assert on_ranks(3, rank_cases.times_out_on_rank_0, "combine") == ["missed 1", "right", "right"]
