"""The order of methods in the rounds of a measurement."""

from collections import Counter
from itertools import pairwise

import pytest

from tdkernels.autotune.order import balanced_orders


def followed(orders):
    """Return {(name, the next one): how often} within the rounds."""
    return Counter(pair for order in orders for pair in pairwise(order))


@pytest.mark.parametrize("count", range(16))
def test_each_method_runs_once_in_a_round(count):
    names = [f"method {number}" for number in range(count)]
    for rounds in (1, 7, 10, 2 * count + 3):
        orders = balanced_orders(names, rounds)
        assert len(orders) == rounds and all(sorted(order) == sorted(names) for order in orders)
        assert orders == balanced_orders(names, rounds), "it must be the same on all ranks"


@pytest.mark.parametrize("count", range(2, 15))
def test_each_method_follows_each_other_one_equally_often(count):
    rounds = 2 * count if count % 2 else count
    for repetitions in (1, 2):
        found = followed(balanced_orders(range(count), repetitions * rounds))
        assert len(found) == count * (count - 1)
        assert set(found.values()) == {repetitions * (2 if count % 2 else 1)}


@pytest.mark.parametrize("count, rounds", [(4, 3), (10, 7), (14, 10), (14, 14)])
def test_no_method_follows_another_one_twice_in_few_rounds(count, rounds):
    assert set(followed(balanced_orders(range(count), rounds)).values()) == {1}


@pytest.mark.parametrize("count", range(3, 15))
def test_no_method_follows_itself(count):
    orders = balanced_orders(range(count), 20)
    assert all(one[-1] != other[0] for one, other in pairwise(orders))
