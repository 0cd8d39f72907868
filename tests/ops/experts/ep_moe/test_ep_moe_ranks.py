"""ep_moe with its products hidden behind the ways, between the ranks: memory used again, disagreement, lost peers."""

import pytest

from tdkernels import PeerTimeoutError
from tdkernels.launch import RankError
from tests.ops.experts.ep_moe import rank_cases as asked
from tests.support.ranks import DEVICE, dies, fresh_ranks, on_ranks

ON_GPU = DEVICE == "cuda"


@pytest.mark.parametrize("world_size, calls", [(2, 8), (3, 5), (4, 3)])
def test_stress(world_size, calls):
    on_ranks(world_size, asked.endures, *((200, 300) if ON_GPU else (calls, 6)), seed=world_size)


def test_slow_rank():
    on_ranks(3, asked.waits_for_a_slow_rank)


def test_memory_grows():
    on_ranks(2, asked.grows, [(9, 8), ([70, 13], 16), (11, 200), (9, 8)])


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_overflow_that_the_host_sees_late(world_size):
    on_ranks(world_size, asked.overflows_unseen, 70)


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_that_was_told_of_an_overflow_leaves_the_others_in_step(world_size):
    on_ranks(world_size, asked.one_is_told_of_an_overflow, [4] * 4)


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_that_has_too_many_tokens_leaves_the_others_in_step(world_size):
    on_ranks(world_size, asked.one_has_too_many_tokens)


@pytest.mark.parametrize("what", asked.DISAGREEMENTS)
def test_disagreement_is_named_on_every_rank(what):
    on_ranks(3, asked.disagrees, what)


def test_known_but_different_calls_never_give_a_result():
    on_ranks(3, asked.is_not_fooled_by_a_known_plan)


@pytest.mark.parametrize("world_size, when", [(3, "counts"), (2, "rows"), (3, "rows"), (2, "sums")])
def test_killed_rank(world_size, when):
    with fresh_ranks(world_size) as pool, pytest.raises(RankError) as caught:
        pool.run(asked.loses_rank_1, dies, when, 1.5)
    exceptions = caught.value.exceptions
    assert isinstance(exceptions[1], ChildProcessError)
    for rank in range(0, world_size, 2):
        error = exceptions[rank]
        assert type(error) is PeerTimeoutError, repr(error)
        assert (error.operator, error.rank, error.timeout_s) == ("ep_moe", rank, 1.5)
        assert error.seen < error.expected


def test_what_was_given_up_is_not_passed_on():
    assert on_ranks(3, asked.comes_when_rank_0_has_given_up) == ["missed 1", "missed 0", "missed 0"]
