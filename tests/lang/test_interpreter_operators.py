"""Fast operators of the interpreter: the results and errors are those of Triton's own operators."""

import itertools

import numpy as np
import pytest
import torch
import triton.language as tl
from triton import knobs

from tdkernels import lang as td
from tdkernels.lang.interpreter_operators import OPERATORS, with_fast_cast, with_fast_operator, with_fast_where
from tests.lang.test_interpreter_operands import FLOATS, INTEGERS, NUMBERS, POINTERS, SHAPES, operand

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy: division by zero, overflow, casts
KINDS = (*INTEGERS, *FLOATS, *POINTERS)
# Same number of dimensions, sizes that broadcast and that do not, and fewer dimensions.
PAIRS = [*itertools.product(SHAPES, repeat=2), ((2, 1), (1, 4)), ((1, 4), (2, 1)), ((4,), (2,)), ((1, 1), ())]


def outcome(function, *args):
    """Return the type, dtype and values of a result, or the error."""
    try:
        result = function(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    data = np.asarray(result.handle.data)
    return result.type.name, result.dtype.name, str(data.dtype), data.shape, repr(data.tolist())


def both(semantic, name):
    """Return (Triton's operator, the fast one)."""
    builtin = getattr(tl.tensor, name)

    def triton(self, other):
        return builtin(self, other, _semantic=semantic)

    return triton, with_fast_operator(name, triton)


@pytest.mark.parametrize("name", OPERATORS)
def test_tensors(semantic, name):
    triton, fast = both(semantic, name)
    for left, right in itertools.product(KINDS, repeat=2):
        shapes = PAIRS if left == right or left in POINTERS else [((), ()), ((4,), (4,)), ((4,), ())]
        for one, other in shapes:
            operands = operand(left, one), operand(right, other)
            assert outcome(fast, *operands) == outcome(triton, *operands), (left, right, one, other)


@pytest.mark.parametrize("name", OPERATORS)
def test_numbers(semantic, name):
    triton, fast = both(semantic, name)
    for kind, shape, number in itertools.product(KINDS, SHAPES[:2], (*NUMBERS, 1e300, float("inf"), float("nan"))):
        x = operand(kind, shape)
        assert outcome(fast, x, number) == outcome(triton, x, number), (kind, shape, number)


def test_negative_integers_and_special_floats(semantic):
    numbers = operand(tl.int32, (4,))
    numbers.handle.data = np.array([-7, -1, 2**31 - 1, -(2**31)], dtype=np.int32)
    floats = operand(tl.float32, (4,))
    floats.handle.data = np.array([np.nan, -0.0, np.inf, -np.inf], dtype=np.float32)
    for name in OPERATORS:
        triton, fast = both(semantic, name)
        for x, others in ((numbers, (numbers, 3, 31)), (floats, (floats, 0.0, 2.0, operand(tl.float32, ())))):
            for other in others:
                assert outcome(fast, x, other) == outcome(triton, x, other), (name, other)


def rejects(*_):
    raise AssertionError("Triton's own function ran")


def test_common_operations_do_not_need_triton():
    i, row, column = operand(tl.int32, (4,)), operand(tl.int64, (2, 1)), operand(tl.int32, (1, 4))
    pointers, x = operand(tl.pointer_type(tl.float16), (4,)), operand(tl.float32, (4,))
    for name, left, right in (
        ("__add__", i, 3), ("__add__", row, column), ("__add__", pointers, i),
        ("__add__", pointers, -1), ("__lt__", i, operand(tl.int32, ())),
        ("__mul__", x, 2.0), ("__rsub__", i, 1), ("__and__", operand(tl.int1, (4,)), operand(tl.int1, (4,))),
    ):
        with_fast_operator(name, rejects)(left, right)
    with_fast_cast(rejects)(i, tl.int64)
    with_fast_where(rejects)(operand(tl.int1, (4,)), x, 0.0)


def test_casts(semantic):
    fast = with_fast_cast(semantic.cast)
    for left, right in itertools.product((*KINDS, tl.pointer_type(tl.float32)), repeat=2):
        for shape, rounding in itertools.product(SHAPES[:3], (None, "rtne", "rtz")):
            x = operand(left, shape)
            expected = outcome(semantic.cast, x, right, rounding)
            if left.name == right.name:
                assert fast(x, right) is x
            else:
                assert outcome(fast, x, right, rounding) == expected, (left, right, shape, rounding)


@pytest.mark.parametrize("condition", [(), (4,), (2, 4), (2, 1)])
def test_where(semantic, condition):
    fast, mask = with_fast_where(semantic.where), operand(tl.int1, condition)
    for kind, (one, other) in itertools.product(KINDS, PAIRS):
        x, y = operand(kind, one), operand(kind, other)
        assert outcome(fast, mask, x, y) == outcome(semantic.where, mask, x, y), (kind, one, other)
    for kind, shape, number in itertools.product(KINDS, SHAPES, NUMBERS):
        x = operand(kind, shape)
        for operands in ((x, number), (number, x)):
            assert outcome(fast, mask, *operands) == outcome(semantic.where, mask, *operands), (kind, shape, number)
    x, y = operand(tl.int32, (4,)), operand(tl.int64, (4,))
    assert outcome(fast, mask, x, y) == outcome(semantic.where, mask, x, y)
    assert outcome(fast, mask, 1, 2) == outcome(semantic.where, mask, 1, 2)


@td.jit
def _masked_add_kernel(x_ptr, size, is_enabled):
    offs = tl.arange(0, 4)
    tl.atomic_add(x_ptr + offs, 1, mask=(offs < size) & (is_enabled != 0))


@pytest.mark.parametrize("debug", [False, True])
def test_mask_of_an_atomic_operation_may_contain_a_scalar(monkeypatch, debug):
    """With ``knobs.runtime.debug``, Triton's own operators compute the mask."""
    monkeypatch.setattr(knobs.runtime, "debug", debug)
    x = torch.zeros(4, dtype=torch.int32)
    for is_enabled in (0, 5):
        _masked_add_kernel[(1,)](x, 3, is_enabled)
    assert x.tolist() == [1, 1, 1, 0]
