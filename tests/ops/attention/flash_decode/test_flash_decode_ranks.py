"""Interaction of ranks in flash_decode: determinism, disagreement, failing peers."""

import pytest

from tdkernels import PeerTimeoutError
from tdkernels.launch import RankError
from tests.ops.attention.flash_decode import rank_cases
from tests.ops.attention.flash_decode.rank_cases import CACHED, DISAGREEMENTS, KINDS
from tests.support.ranks import DEVICE, dies, fresh_ranks, on_ranks

ON_GPU = DEVICE == "cuda"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="takes too long without a GPU")

# ``keys`` counts all ranks.
LARGE = {
    "long": dict(batch=1, heads=96, kv_heads=12, dim=128, keys=1 << 14, lens="full", seed=4),
    "ragged": dict(batch=13, heads=32, kv_heads=8, dim=128, keys=6000, seed=5),
    "paged": dict(batch=64, heads=32, kv_heads=8, dim=128, keys=2000, page=16, seed=6),
    "latent": dict(batch=16, heads=128, kv_heads=1, dim=576, value_dim=512, keys=4000, latent=True, page=64, seed=7),
    "tokens": dict(batch=8, heads=32, kv_heads=4, dim=64, keys=2000, tokens=4, window=1500, soft_cap=20.0, seed=8),
}


@pytest.mark.parametrize("world_size, calls", [(1, 20), (2, 60), (3, 60), (4, 60)] if ON_GPU else [(2, 4), (3, 2)])
def test_determinism(world_size, calls):
    on_ranks(world_size, rank_cases.is_deterministic, KINDS, calls, seed=world_size)


@needs_gpu
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", LARGE)
def test_determinism_with_many_keys(world_size, kind):
    spec = dict(LARGE[kind], keys=LARGE[kind]["keys"] // world_size)
    on_ranks(world_size, rank_cases.is_deterministic, [(spec, "default")], 20, seed=world_size, backward=False)


@pytest.mark.parametrize("world_size, calls", [(2, 100), (3, 100)] if ON_GPU else [(2, 6), (3, 4)])
def test_ranks_running_ahead(world_size, calls):
    on_ranks(world_size, rank_cases.runs_ahead_of_peers, calls)


def test_slow_rank():
    on_ranks(2, rank_cases.waits_for_a_slow_rank)


@pytest.mark.parametrize("world_size", [2, 4] if ON_GPU else [2])
def test_workspace_is_reused_by_other_shapes(world_size):
    on_ranks(world_size, rank_cases.computes_growing_shapes)


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_disagreement_raises_on_every_rank(name):
    on_ranks(3, rank_cases.reports_disagreement, name)


def test_capacities_may_differ():
    on_ranks(2, rank_cases.supports_different_capacities)


@pytest.mark.parametrize("name", CACHED)
def test_mismatch_of_cached_plans_is_detected(name):
    on_ranks(2, rank_cases.detects_mismatch_of_cached_plans, name)


def test_killed_rank():
    with fresh_ranks(2) as pool, pytest.raises(RankError) as caught:
        pool.run(rank_cases.loses_rank_1, dies, 0.7)
    exceptions = caught.value.exceptions
    assert isinstance(exceptions[1], ChildProcessError)
    error = exceptions[0]
    assert type(error) is PeerTimeoutError, repr(error)
    assert (error.operator, error.rank, error.peer, error.timeout_s) == ("flash_decode", 0, 1, 0.7)
    assert error.seen < error.expected


def test_late_rank():
    assert on_ranks(3, rank_cases.delays_rank_1) == ["missed 1", "right", "right"]
