"""Selected parameter combinations cover every pair of values, and are fewer than all."""

import itertools

import pytest

from tests.support.subset import at_once, each_value, joined, pairs, turns

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


def test_each_value_is_chosen():
    combinations = [{"a": a, "b": b, "c": c} for a, b, c in itertools.product("xyz", [1, 2], [None, 1])]
    chosen = [combinations[i] for i in each_value(combinations)]
    assert len(chosen) == 3
    for name in "abc":
        assert {one[name] for one in chosen} == {one[name] for one in combinations}
    assert each_value([{"a": 1}, {"a": 2}, {"a": 3}]) == [0, 1, 2]
    assert each_value([{}]) == [0] and each_value([]) == []


def test_values_meet_different_values():
    combinations = [{"operator": operator, "check": check} for operator, check in itertools.product("abc", range(6))]
    operators = [combinations[i]["operator"] for i in each_value(combinations)]
    assert sorted(operators) == list("aabbcc")


def test_dependent_names_are_joined():
    configs = [("ag_gemm", "push"), ("ag_gemm", "one shot"), ("gemm_rs", "direct")]
    combinations = [
        {"ranks": ranks, "operator": operator, "config": config}
        for ranks, (operator, config) in itertools.product([1, 2], configs)
    ]
    assert {tuple(one) for one in joined(combinations)} == {(("ranks",), ("operator", "config"))}
    assert {one["operator", "config"] for one in joined(combinations)} == set(configs)
    assert len(each_value(joined(combinations))) == 3
    assert len(each_value(joined(combinations, together=("ranks", "operator")))) == 6
    assert joined([]) == [] and joined([{}]) == [{}]


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
