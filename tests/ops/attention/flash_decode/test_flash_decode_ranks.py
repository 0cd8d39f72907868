"""flash_decode between the ranks: the same bits whenever, disagreement, peers that fail."""

import pytest

from tdkernels import PeerTimeoutError
from tdkernels.launch import RankError
from tests.ops.attention.flash_decode import rank_cases
from tests.ops.attention.flash_decode.rank_cases import DISAGREEMENTS, KINDS, KNOWN
from tests.support.ranks import DEVICE, dies, fresh_ranks, on_ranks

ON_GPU = DEVICE == "cuda"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="takes too long without a GPU")

# Keys of all ranks.
LARGE = {
    "long": dict(batch=1, heads=96, kv_heads=12, dim=128, keys=1 << 14, lens="full", seed=4),
    "ragged": dict(batch=13, heads=32, kv_heads=8, dim=128, keys=6000, seed=5),
    "paged": dict(batch=64, heads=32, kv_heads=8, dim=128, keys=2000, page=16, seed=6),
    "latent": dict(batch=16, heads=128, kv_heads=1, dim=576, value_dim=512, keys=4000, latent=True, page=64, seed=7),
    "tokens": dict(batch=8, heads=32, kv_heads=4, dim=64, keys=2000, tokens=4, window=1500, soft_cap=20.0, seed=8),
}


@pytest.mark.parametrize("world_size, calls", [(1, 20), (2, 60), (3, 60), (4, 60)] if ON_GPU else [(2, 10), (3, 3)])
def test_the_same_bits(world_size, calls):
    on_ranks(world_size, rank_cases.repeats, KINDS, calls, seed=world_size)


@needs_gpu
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", LARGE)
def test_the_same_bits_of_many_keys(world_size, kind):
    spec = dict(LARGE[kind], keys=LARGE[kind]["keys"] // world_size)
    on_ranks(world_size, rank_cases.repeats, [(spec, "default")], 20, seed=world_size, backward=False)


@pytest.mark.parametrize("world_size, calls", [(2, 100), (3, 100)] if ON_GPU else [(2, 6), (3, 4)])
def test_no_rank_overtakes_its_peers_data(world_size, calls):
    on_ranks(world_size, rank_cases.outruns_its_peers, calls)


def test_slow_rank():
    on_ranks(2, rank_cases.waits_for_a_slow_rank)


@pytest.mark.parametrize("world_size", [2, 4] if ON_GPU else [2])
def test_memory_is_reused_by_other_shapes(world_size):
    on_ranks(world_size, rank_cases.grows)


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_disagreement_is_named_on_every_rank(what):
    on_ranks(3, rank_cases.disagrees, what)


def test_rooms_may_differ():
    on_ranks(2, rank_cases.takes_rooms_that_differ)


@pytest.mark.parametrize("what", KNOWN)
def test_known_but_different_calls_never_give_a_result(what):
    on_ranks(2, rank_cases.is_not_fooled_by_a_known_plan, what)


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
    assert on_ranks(3, rank_cases.comes_when_rank_0_has_given_up) == ["missed 1", "right", "right"]
