"""ulysses_qkv and ulysses_out between the ranks: the same bits whenever, disagreement, peers that fail."""

import pytest

from tdkernels import PeerTimeoutError
from tdkernels.launch import RankError
from tests.ops.attention.ulysses import rank_cases as asked
from tests.ops.attention.ulysses.cases import BF16, OPERATORS
from tests.ops.attention.ulysses.rank_cases import DISAGREEMENTS, KINDS, KNOWN, LOST
from tests.support.ranks import DEVICE, fresh_ranks, on_ranks
from tests.support.subset import at_once

ON_GPU = DEVICE == "cuda"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="takes too long without a GPU")


@pytest.mark.parametrize("world_size, kinds, calls", [
    (world_size, KINDS, 80) for world_size in (2, 3, 4)
] if ON_GPU else [(2, KINDS, 6), (3, KINDS[2:], 3)])
def test_the_same_bits(world_size, kinds, calls):
    on_ranks(world_size, asked.repeats, kinds, calls, seed=world_size)


@needs_gpu
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_the_same_bits_of_many_tiles(world_size):
    kinds = [((operator, BF16, 1024, 512, 768), "default") for operator in OPERATORS]
    on_ranks(world_size, asked.repeats, kinds, 30, seed=world_size)


# Of 40 positions there are more tiles than the first wave has, in the interpreter.
@pytest.mark.parametrize("world_size, operator, config, positions, calls", [
    (world_size, operator, config, 40, 100) for world_size in (2, 3) for operator in OPERATORS
    for config in ("pulled at once", "pushed")
] if ON_GPU else [
    (2, "ulysses_qkv", "default", 20, 8), (3, "ulysses_qkv", "pushed", 20, 3), (2, "ulysses_out", "default", 20, 8),
    (3, "ulysses_out", "pulled at once", 40, 3),
])
def test_no_rank_overtakes_its_peers_data(world_size, operator, config, positions, calls):
    on_ranks(world_size, asked.outruns_its_peers, operator, config, positions, calls)


@pytest.mark.parametrize("config", ["default", "pushed"])
def test_slow_rank(config):
    on_ranks(2, asked.waits_for_a_slow_rank, config)


def test_subgroup():
    on_ranks(3, asked.computes_in_a_subgroup)


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_disagreement_is_named_on_every_rank(what):
    on_ranks(3, asked.disagrees, what)


@pytest.mark.parametrize("operator, what", [
    (operator, what) for operator in OPERATORS for what in KNOWN
    if ON_GPU or what == ("sequences" if operator == "ulysses_qkv" else "n") or what == "transport"
])
def test_known_but_different_calls_never_give_a_result(operator, what):
    on_ranks(2, asked.is_not_fooled_by_a_known_plan, operator, what)


@pytest.mark.parametrize("ways", at_once(LOST), ids=str)
def test_killed_rank(ways):
    with fresh_ranks(2, grace_s=60.0) as pool, pytest.raises(RankError) as caught:
        pool.run(asked.loses_rank_1, ways, 0.7)
    assert isinstance(caught.value.exceptions[1], ChildProcessError)
    assert caught.value.exceptions[0] is None, caught.value.exceptions[0]
    for way, error in zip(ways, caught.value.results[0], strict=True):
        assert type(error) is PeerTimeoutError, repr(error)
        assert (error.operator, error.rank, error.peer, error.timeout_s) == (way, 0, 1, 0.7)
        assert error.seen < error.expected
