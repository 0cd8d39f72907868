"""ep_dispatch and ep_combine between the ranks: memory used again, groups, disagreement, peers that fail."""

import pytest

from tdkernels.launch import RankError
from tests.ops.experts.dispatch import rank_cases
from tests.ops.experts.dispatch.rank_cases import DISAGREEMENTS, KNOWN, check_killed
from tests.support.ranks import DEVICE, dies, fresh_ranks, on_ranks

ON_GPU = DEVICE == "cuda"


@pytest.mark.parametrize("world_size, calls", [(2, 12), (3, 6), (4, 3)])
def test_stress(world_size, calls):
    """A GPU makes 500 calls and more tokens in the time that the interpreter takes for these."""
    on_ranks(world_size, rank_cases.endures, *((500, 300) if ON_GPU else (calls, 6)), seed=world_size)


@pytest.mark.parametrize("world_size, calls", [(2, 6), (3, 4)] if ON_GPU else [(3, 4)])
def test_no_rank_overtakes_its_peers_data(world_size, calls):
    on_ranks(world_size, rank_cases.outruns_its_peers, calls * (20 if ON_GPU else 1))


def test_slow_rank():
    on_ranks(2, rank_cases.waits_for_a_slow_rank)


def test_memory_grows():
    on_ranks(2, rank_cases.grows, [(1, 3), ([70, 3, 0, 6], 5), (2, 300), (3, 4)])


def test_subgroups():
    on_ranks(4, rank_cases.uses_subgroups)


def test_dimension_of_a_mesh():
    on_ranks(4, rank_cases.uses_a_mesh)


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_disagreement_is_named_on_every_rank(what):
    on_ranks(3, rank_cases.disagrees, what)


@pytest.mark.parametrize("what", ["width", "dtype", "config"])
def test_disagreement_in_combine(what):
    on_ranks(3, rank_cases.disagrees_in_combine, what)


def test_disagreement_in_the_operator():
    on_ranks(3, rank_cases.disagrees_in_the_operator)


@pytest.mark.parametrize("what", KNOWN)
def test_known_but_different_calls_never_give_a_result(what):
    on_ranks(3, rank_cases.is_not_fooled_by_a_known_plan, what)


def test_known_but_different_combines_never_give_a_result():
    on_ranks(3, rank_cases.combine_is_not_fooled_by_a_known_plan)


@pytest.mark.parametrize("world_size, when", [(3, "counts"), (2, "dispatch"), (2, "combine")])
def test_killed_rank(world_size, when):
    with fresh_ranks(world_size) as pool, pytest.raises(RankError) as caught:
        pool.run(rank_cases.loses_rank_1, dies, when, 1.5)
    check_killed(caught, world_size, 1.5)


def test_what_was_given_up_is_not_passed_on():
    """Rank 0 does not learn where tokens go, so nobody gets any; of a combine its own part had long been sent."""
    assert on_ranks(3, rank_cases.comes_when_rank_0_has_given_up, "counts") == ["missed 1", "missed 0", "missed 0"]
    assert on_ranks(3, rank_cases.comes_when_rank_0_has_given_up, "combine") == ["missed 1", "right", "right"]
