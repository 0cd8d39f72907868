"""Select combinations of test parameters: all on GPUs; on CPU ranks, which are slow, a covering subset.

A bug that shows in one combination nearly always shows in all combinations that share one or two of its values.
"""

import itertools
import math
import os
from collections import Counter

import torch

from tests.support.ranks import DEVICE

EVERYTHING = DEVICE == "cuda"
THOROUGH = EVERYTHING or bool(os.environ.get("TDKERNELS_TEST_THOROUGH"))
MAYBE_ON_GPUS = EVERYTHING or DEVICE == "auto" and torch.cuda.is_available()


def pairs(*axes, everything=EVERYTHING):
    """Return combinations that together contain every pair of values of two axes; fewer than the full product."""
    if everything or len(axes) < 3:
        return list(itertools.product(*axes))
    combinations = list(itertools.product(*(range(len(axis)) for axis in axes)))
    pairs_of = {combination: {*itertools.combinations(enumerate(combination), 2)} for combination in combinations}
    missing, chosen = set().union(*pairs_of.values()), []
    while missing:
        chosen.append(max(combinations, key=lambda combination: len(pairs_of[combination] & missing)))
        missing -= pairs_of[chosen[-1]]
    return [tuple(axis[i] for axis, i in zip(axes, combination)) for combination in sorted(chosen)]


def each_value(combinations):
    """Return the indices of combinations ({name: value}) that together contain every value of every name.

    Of equally good combinations it prefers those whose values have been chosen less often, so that each value of one
    name meets different values of the others.
    """
    missing = {pair for combination in combinations for pair in combination.items()}
    chosen, uses = [] if missing else list(range(len(combinations))), Counter()
    while missing:
        chosen.append(max(range(len(combinations)), key=lambda i: _merit(combinations[i], missing, uses)))
        missing -= set(combinations[chosen[-1]].items())
        uses.update(combinations[chosen[-1]].items())
    return sorted(chosen)


def _merit(combination, missing, uses):
    return len(missing & set(combination.items())), -sum(uses[pair] for pair in combination.items())


def joined(combinations, together=()):
    """Join names whose values do not all occur together, such as operators and their configs, and those ``together``.

    Returns combinations of the joined names, for ``each_value``.
    """
    names = list(combinations[0]) if combinations else []
    group = {name: (name,) for name in names}
    for one, other in itertools.combinations(names, 2):
        if group[one] != group[other] and ({one, other} <= {*together} or not _is_product(combinations, one, other)):
            group |= dict.fromkeys(group[one] + group[other], group[one] + group[other])
    return [{names: tuple(one[name] for name in names) for names in group.values()} for one in combinations]


def _is_product(combinations, *names):
    """Return whether every value of one name occurs with every value of the other one."""
    found = {tuple(combination[name] for name in names) for combination in combinations}
    return len(found) == math.prod(len(set(values)) for values in zip(*found))


def turns(values, others, each=1, everything=EVERYTHING):
    """Return every value (a tuple) joined with ``each`` of the tuples in ``others``, which are used in turn.

    For values that must all be tested, but not with each of ``others``.
    """
    turn = itertools.cycle(others)
    number = len(others) if everything else each
    return [(*value, *next(turn)) for value in values for _ in range(number)]


def at_once(values, separately=MAYBE_ON_GPUS):
    """Return lists of values for a test that starts ranks for each list, which dominates its time on the CPU.

    One list; on GPUs one list per value, because there ``tdkernels.synchronize`` raises the first error of any group,
    and the first value of a list may leave one.
    """
    return [[value] for value in values] if separately else [list(values)]
