"""Sums along an axis. ``tl.sum`` and its like are made for the compiler only; these run in the interpreter as well."""

import triton.language as tl

from tdkernels.lang.kernel import jit


@jit
def sum_of(x, AXIS: tl.constexpr = 0):
    """``x`` without an axis: the sum along it, in the type of ``x``."""
    return tl.reduce(x, AXIS, tl.standard._sum_combine).to(x.dtype)


@jit
def max_of(x, AXIS: tl.constexpr = 0):
    """``x`` without an axis: the largest along it."""
    return tl.reduce(x, AXIS, tl.standard._elementwise_max)


@jit
def running_sum(x, AXIS: tl.constexpr = 0):
    """The sum of all up to here, along an axis, this one included."""
    return tl.associative_scan(x, AXIS, tl.standard._sum_combine).to(x.dtype)


@jit
def compact_indices(there):
    """(the turn 0, 1, … of each element that is ``there``, -1 of the others; how many there are): to skip others."""
    there = there.to(tl.int32)
    return tl.where(there != 0, running_sum(there, 0) - 1, -1), sum_of(there, 0)


@jit
def gather_lane(values, indices, index):
    """The value (-1 or more) at an index, from all of a program's threads; -1 if ``indices`` have no such one."""
    return sum_of(tl.where(indices == index, values + 1, 0), 0) - 1
