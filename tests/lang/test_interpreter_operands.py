"""Fast checks of operands in the interpreter: the results and errors are those of Triton's own checks."""

import itertools

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import TensorHandle, _get_np_dtype

from tdkernels.lang.interpreter_operands import (
    with_fast_broadcast,
    with_fast_checks,
    with_fast_unwrap,
    with_identity,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in cast")

INTEGERS = (tl.int1, tl.int8, tl.uint8, tl.int16, tl.uint16, tl.int32, tl.uint32, tl.int64, tl.uint64)
FLOATS = (tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.float8e5, tl.float8e4nv)
POINTERS = (tl.pointer_type(tl.int32), tl.pointer_type(tl.float16))
NUMBERS = (0, 1, -1, 7, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**63, True, False, 0.0, 0.5, -3.0)
SHAPES = ((), (4,), (2, 4), (2, 1))
# allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod, as the operations of the language pass them
WAYS = {
    "add": (True, True, True, False), "sub": (True, False, True, False), "mul": (False, False, True, False),
    "div": (False, False, True, True), "and": (False, False, False, False), "compare": (True, True, True, False),
}


def operand(kind, shape):
    size = shape or (1,)
    data = np.arange(np.prod(size)).reshape(size).astype(_get_np_dtype(kind))
    return tl.tensor(TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)


def outcome(check, operands, way):
    """Return the types and the values of the checked operands, or the error."""
    try:
        results = check(*operands, *way)
    except Exception as error:
        return type(error).__name__, str(error)
    return [(one.type.name, one.dtype.name, one.handle.dtype.name, one.handle.data.tolist()) for one in results]


@pytest.mark.parametrize("name", WAYS)
def test_tensors(semantic, name):
    fast, kinds = with_fast_checks(semantic), (*INTEGERS, *FLOATS, *POINTERS)
    for left, right in itertools.product(kinds, repeat=2):
        shapes = itertools.product(SHAPES, repeat=2) if left == right or left in POINTERS else [((), ()), ((4,), (4,))]
        for one, other in shapes:
            operands = operand(left, one), operand(right, other)
            expected = outcome(semantic.binary_op_type_checking_impl, operands, WAYS[name])
            assert outcome(fast, operands, WAYS[name]) == expected, (left, right, one, other)


@pytest.mark.parametrize("name", WAYS)
def test_numbers(semantic, name):
    fast = with_fast_checks(semantic)
    for kind, shape, number in itertools.product((*INTEGERS, *FLOATS, *POINTERS), SHAPES[:2], NUMBERS):
        for operands in ((operand(kind, shape), number), (number, operand(kind, shape))):
            expected = outcome(semantic.binary_op_type_checking_impl, operands, WAYS[name])
            assert outcome(fast, operands, WAYS[name]) == expected, (kind, shape, number)
    assert outcome(fast, (2, 3), WAYS[name]) == outcome(semantic.binary_op_type_checking_impl, (2, 3), WAYS[name])


def test_tensors_that_need_nothing_are_returned(semantic):
    x, offsets = operand(tl.int32, (4,)), operand(tl.int64, (4,))
    pointers = operand(tl.pointer_type(tl.float32), (4,))

    def rejects(*_):
        raise AssertionError("Triton's checks ran")

    fast = with_fast_checks(type("Semantic", (), {
        "binary_op_type_checking_impl": rejects, "scalar_constant": semantic.scalar_constant,
        "builder": semantic.builder,
    }))
    assert fast(x, x) == (x, x) and fast(pointers, offsets, True, True) == (pointers, offsets)
    left, right = fast(x, 3)
    assert left is x and right.type == x.type and right.handle.data.tolist() == [3] * 4
    assert fast(3, operand(tl.int32, ()))[0].handle.data.tolist() == [3]


def test_broadcast(semantic):
    fast = with_fast_broadcast(semantic.broadcast_impl_value)
    for left, right in itertools.product((*SHAPES, (1,), (1, 1), (8, 4)), repeat=2):
        operands = operand(tl.int32, left), operand(tl.float32, right)
        expected = outcome(semantic.broadcast_impl_value, operands, ())
        assert outcome(fast, operands, ()) == expected, (left, right)
        if left == right:
            assert fast(*operands) == operands


def test_unwrap_and_equality():
    unwrap, equal = with_fast_unwrap(tl.core._unwrap_if_constexpr), with_identity(tl.dtype.__eq__)
    for value in (3, 0.5, True, None, "x", tl.int32, tl.constexpr(4), [tl.constexpr(4), 5], operand(tl.int32, ())):
        expected = tl.core._unwrap_if_constexpr(value)
        assert type(unwrap(value)) is type(expected)
        assert unwrap(value) is expected or unwrap(value) == expected
    for left, right in itertools.product((*INTEGERS, *FLOATS), repeat=2):
        for other in (right, tl.constexpr(right), right.name):
            assert equal(left, other) == tl.dtype.__eq__(left, other)
