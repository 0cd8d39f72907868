"""The order of methods in the rounds of a measurement.

A GPU at its power limit is faster after a method that left it partly idle than after a large GEMM. With a random order
and few rounds, one method can follow a slow one most of the time, and another one a fast one.
"""

import random
from collections.abc import Sequence
from itertools import pairwise

_SEED = 0  # the same order on all ranks
_TRIES = 1000


def balanced_orders(names: Sequence, rounds: int) -> list[list]:
    """Return an order of ``names`` for each round, in which each follows each other one about equally often.

    The orders of as many rounds as there are names form a balanced Latin square (E. J. Williams, 1949); an odd number
    of names needs twice as many. Fewer rounds are a part of it, in which no name follows another one twice.
    """
    if not names:
        return [[] for _ in range(rounds)]
    choice = random.Random(_SEED)
    found: list[list] = []
    while len(found) < rounds:
        square = _square(choice.sample(list(names), len(names)))
        found += _without_repetition(square, found[-1:], choice)
    return found[:rounds]


def _square(names):
    """Return orders of ``names`` in which each of them directly follows each other one equally often."""
    count = len(names)
    zigzag = [(place + 1) // 2 if place % 2 else -place // 2 for place in range(count)]  # 0, 1, -1, 2, -2, ...
    orders = [[names[(place + shift) % count] for place in zigzag] for shift in range(count)]
    return orders + [order[::-1] for order in orders] if count % 2 else orders


def _without_repetition(orders, before, choice):
    """Return the orders as a sequence in which none begins with the last name of the one before, if there is one."""
    for _ in range(_TRIES):
        shuffled = choice.sample(orders, len(orders))
        if all(one[-1] != other[0] for one, other in pairwise(before + shuffled)):
            break
    return shuffled
