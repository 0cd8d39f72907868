"""Reductions and scans along an axis that also run in the interpreter.

``tl.sum`` and similar functions exist for the compiler only.
"""

import triton.language as tl

from tdkernels.lang.kernel import jit


@jit
def sum_of(x, AXIS: tl.constexpr = 0):
    """Return the sum of ``x`` along an axis, in the type of ``x``; the axis is removed."""
    return tl.reduce(x, AXIS, tl.standard._sum_combine).to(x.dtype)


@jit
def max_of(x, AXIS: tl.constexpr = 0):
    """Return the maximum of ``x`` along an axis; the axis is removed."""
    return tl.reduce(x, AXIS, tl.standard._elementwise_max)


@jit
def running_sum(x, AXIS: tl.constexpr = 0):
    """Return the inclusive prefix sum of ``x`` along an axis, in the type of ``x``."""
    return tl.associative_scan(x, AXIS, tl.standard._sum_combine).to(x.dtype)


@jit
def compact_indices(there):
    """Number the selected elements consecutively, so that a loop can skip the others.

    Args:
        there: a mask.

    Returns:
        (indices, count): 0, 1, ... for the selected elements and -1 for the others; the number of selected elements.
    """
    there = there.to(tl.int32)
    return tl.where(there != 0, running_sum(there, 0) - 1, -1), sum_of(there, 0)


@jit
def gather_lane(values, indices, index):
    """Return the value whose entry in ``indices`` equals ``index``, gathered from all threads of the program.

    Args:
        values: integers of -1 or more.
        indices: one index per value, such as the first result of ``compact_indices``.
        index: the index to look for.

    Returns:
        The value, or -1 if no entry of ``indices`` equals ``index``.
    """
    return sum_of(tl.where(indices == index, values + 1, 0), 0) - 1
