"""Which combinations of parameters a test is asked: all of them on GPUs; on CPU ranks, which take long, a selection.

What breaks in one combination nearly always breaks in all that share a value or two with it.
"""

import itertools
import os

import torch

from tests.support.ranks import DEVICE

EVERYTHING = DEVICE == "cuda"
THOROUGH = EVERYTHING or bool(os.environ.get("TDKERNELS_TEST_THOROUGH"))
MAYBE_ON_GPUS = EVERYTHING or DEVICE == "auto" and torch.cuda.is_available()


def pairs(*axes, everything=EVERYTHING):
    """Combinations of a value of each axis that hold, between them, every two values of two axes; few for that."""
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
    """Every value, which is a tuple, with ``each`` of the tuples in ``others``; these take turns, so all of them come.

    For values of which each has to be asked, but not everywhere.
    """
    turn = itertools.cycle(others)
    number = len(others) if everything else each
    return [(*value, *next(turn)) for value in values for _ in range(number)]


def at_once(values, separately=MAYBE_ON_GPUS):
    """Lists of values for a test that starts ranks for each list: to start them takes the CPU longer than all else.

    One list, or on GPUs one for each value: there ``tdkernels.synchronize`` raises the first error of any group, and
    after the first value of such a list there may be one.
    """
    return [[value] for value in values] if separately else [list(values)]
