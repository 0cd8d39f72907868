"""Synchronization between ranks in fused ep_moe: memory reuse, disagreement, lost peers."""

import pytest

from tdkernels import PeerTimeoutError
from tdkernels.launch import RankError
from tests.ops.experts.ep_moe import rank_cases
from tests.support.ranks import DEVICE, dies, fresh_ranks, on_ranks

ON_GPU = DEVICE == "cuda"


@pytest.mark.parametrize("world_size, calls", [(2, 8), (3, 5), (4, 3)])
def test_stress(world_size, calls):
    on_ranks(world_size, rank_cases.stress, *((200, 300) if ON_GPU else (calls, 6)), seed=world_size)


def test_slow_rank():
    on_ranks(3, rank_cases.waits_for_a_slow_rank)


def test_workspace_grows():
    on_ranks(2, rank_cases.grows_workspace, [(9, 8), ([70, 13], 16), (11, 200), (9, 8)])


@pytest.mark.parametrize("world_size", [2, 3])
def test_unnoticed_overflow(world_size):
    on_ranks(world_size, rank_cases.reports_unnoticed_overflow, 70)


@pytest.mark.parametrize("world_size", [2, 3])
def test_early_overflow_error_keeps_ranks_in_step(world_size):
    on_ranks(world_size, rank_cases.early_overflow_error_keeps_ranks_in_step, [4] * 4)


@pytest.mark.parametrize("world_size", [2, 3])
def test_early_token_limit_error_keeps_ranks_in_step(world_size):
    on_ranks(world_size, rank_cases.early_token_limit_error_keeps_ranks_in_step)


@pytest.mark.parametrize("what", rank_cases.DISAGREEMENTS)
def test_disagreement_is_reported_on_every_rank(what):
    on_ranks(3, rank_cases.reports_disagreement, what)


def test_mixed_cached_calls_return_no_result():
    on_ranks(3, rank_cases.detects_mismatch_of_cached_plans)


@pytest.mark.parametrize("world_size, when", [(3, "counts"), (2, "rows"), (3, "rows"), (2, "sums")])
def test_killed_rank(world_size, when):
    with fresh_ranks(world_size) as pool, pytest.raises(RankError) as caught:
        pool.run(rank_cases.loses_rank_1, dies, when, 1.5)
    exceptions = caught.value.exceptions
    assert isinstance(exceptions[1], ChildProcessError)
    for rank in range(0, world_size, 2):
        error = exceptions[rank]
        assert type(error) is PeerTimeoutError, repr(error)
        assert (error.operator, error.rank, error.timeout_s) == ("ep_moe", rank, 1.5)
        assert error.seen < error.expected


def test_no_forwarding_after_a_timeout():
    assert on_ranks(3, rank_cases.times_out_on_rank_0) == ["missed 1", "missed 0", "missed 0"]
