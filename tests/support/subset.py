"""Select combinations of test parameters: all on GPUs; on CPU ranks, which are slow, a covering subset.

A bug that shows in one combination nearly always shows in all combinations that share one or two of its values.
"""

import itertools
import os

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
