"""Selected parameter combinations cover every pair of values, and are fewer than all."""

import itertools

import pytest

from tests.support.subset import at_once, pairs, turns

AXES = [[1, 2, 3, 4], ["a", "b", "c"], [None, {}, []], [5, 6]]


def test_pairs_cover_every_two_values():
    chosen = pairs(*AXES, everything=False)
    everything = list(itertools.product(*AXES))
    assert all(combination in everything for combination in chosen)
    assert 12 <= len(chosen) <= 15
    for (i, one), (j, other) in itertools.combinations(enumerate(AXES), 2):
        for value, with_value in itertools.product(one, other):
            assert any(c[i] is value and c[j] is with_value for c in chosen), (value, with_value)


@pytest.mark.parametrize("axes, everything", [(AXES, True), (AXES[:2], False), (AXES[:1], False)])
def test_pairs_returns_all_on_gpus_and_for_one_or_two_axes(axes, everything):
    assert pairs(*axes, everything=everything) == list(itertools.product(*axes))


def test_turns():
    values, others = [("a", 0), ("b", 1), ("c", 2), ("d", 3)], [(1,), (2,), (3,)]
    assert turns(values, others, everything=False) == [("a", 0, 1), ("b", 1, 2), ("c", 2, 3), ("d", 3, 1)]
    two_each = turns(values, others, 2, everything=False)
    assert [other for *_, other in two_each] == [1, 2, 3, 1, 2, 3, 1, 2]
    assert {tuple(value) for *value, _ in two_each} == set(values)
    assert sorted(turns(values, others, everything=True)) == [(*v, *o) for v in values for o in others]


def test_at_once():
    assert at_once("abc", separately=False) == [["a", "b", "c"]]
    assert at_once("abc", separately=True) == [["a"], ["b"], ["c"]]
