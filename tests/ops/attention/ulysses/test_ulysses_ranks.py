"""Interaction of ranks in ulysses_qkv and ulysses_out: determinism, disagreement, failing peers."""

import pytest

from tdkernels import PeerTimeoutError
from tdkernels.launch import RankError
from tests.ops.attention.ulysses import rank_cases
from tests.ops.attention.ulysses.cases import BF16, OPERATORS
from tests.ops.attention.ulysses.rank_cases import CACHED, DISAGREEMENTS, KINDS, MISSED
from tests.support.ranks import DEVICE, fresh_ranks, on_ranks
from tests.support.subset import at_once

ON_GPU = DEVICE == "cuda"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="takes too long without a GPU")


@pytest.mark.parametrize("world_size, kinds, calls", [
    (world_size, KINDS, 80) for world_size in (2, 3, 4)
] if ON_GPU else [(2, KINDS, 4), (3, KINDS[2:], 2)])
def test_determinism(world_size, kinds, calls):
    on_ranks(world_size, rank_cases.is_deterministic, kinds, calls, seed=world_size)


@needs_gpu
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_determinism_with_many_tiles(world_size):
    kinds = [((operator, BF16, 1024, 512, 768), "default") for operator in OPERATORS]
    on_ranks(world_size, rank_cases.is_deterministic, kinds, 30, seed=world_size)


# In the interpreter, 40 positions give more tiles than the first wave has.
@pytest.mark.parametrize("world_size, operator, config, positions, calls", [
    (world_size, operator, config, 40, 100) for world_size in (2, 3) for operator in OPERATORS
    for config in ("pulled at once", "pushed")
] if ON_GPU else [
    (2, "ulysses_qkv", "default", 20, 8), (3, "ulysses_qkv", "pushed", 20, 3), (2, "ulysses_out", "default", 20, 8),
    (3, "ulysses_out", "pulled at once", 40, 3),
])
def test_ranks_running_ahead(world_size, operator, config, positions, calls):
    on_ranks(world_size, rank_cases.runs_ahead_of_peers, operator, config, positions, calls)


@pytest.mark.parametrize("config", ["default", "pushed"])
def test_slow_rank(config):
    on_ranks(2, rank_cases.waits_for_a_slow_rank, config)


def test_subgroup():
    on_ranks(3, rank_cases.computes_in_a_subgroup)


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_disagreement_raises_on_every_rank(name):
    on_ranks(3, rank_cases.reports_disagreement, name)


@pytest.mark.parametrize("operator, name", [
    (operator, name) for operator in OPERATORS for name in CACHED
    if ON_GPU or name == ("sequences" if operator == "ulysses_qkv" else "n") or name == "transport"
])
def test_mismatch_of_cached_plans_is_detected(operator, name):
    on_ranks(2, rank_cases.detects_mismatch_of_cached_plans, operator, name)


@pytest.mark.parametrize("missed_calls", at_once(MISSED), ids=str)
def test_killed_rank(missed_calls):
    with fresh_ranks(2, grace_s=60.0) as pool, pytest.raises(RankError) as caught:
        pool.run(rank_cases.loses_rank_1, missed_calls, 0.7)
    assert isinstance(caught.value.exceptions[1], ChildProcessError)
    assert caught.value.exceptions[0] is None, caught.value.exceptions[0]
    for missed, error in zip(missed_calls, caught.value.results[0], strict=True):
        assert type(error) is PeerTimeoutError, repr(error)
        assert (error.operator, error.rank, error.peer, error.timeout_s) == (missed, 0, 1, 0.7)
        assert error.seen < error.expected
