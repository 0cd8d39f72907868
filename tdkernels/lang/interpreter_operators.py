"""Faster operators of tensors in Triton's interpreter.

Triton computes ``a + b`` by about 20 Python calls and up to four numpy operations. Here the types of the operands
select the type of the result and one numpy operation. If numpy and Triton do not agree on operands of these types,
Triton's own operator computes the result.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from tdkernels.lang.interpreter_operands import INTEGERS, fits

_FLOATS = {kind.name for kind in (tl.float16, tl.float32, tl.float64)}  # numpy has no bf16 and fp8
_SIGNED = {kind.name for kind in (tl.int8, tl.int16, tl.int32, tl.int64)}


def _handle(data: np.ndarray, element: tl.dtype) -> TensorHandle:
    """Return ``TensorHandle(data, element)``, whose constructor checks the size of the elements."""
    made = TensorHandle.__new__(TensorHandle)
    made.data, made.dtype, made.attr = data, element, {}
    return made


def _common(left, right):
    """Return the type of the elements after a promotion in which numpy and Triton agree, else None."""
    if left.name == right.name:
        return left if left.name in INTEGERS or left.name in _FLOATS else None
    if left.name in _SIGNED and right.name in _SIGNED:
        return max(left, right, key=lambda kind: kind.primitive_bitwidth)
    return None


def _result_type(element, *operands):
    """Return the type of an operation on operands of some types, with these elements; None if Triton computes it."""
    shapes = [list(kind.shape) for kind in operands if kind.is_block()]
    if not shapes:
        return element
    if len(set(map(len, shapes))) > 1:
        return None
    sizes = [set(each) - {1} for each in zip(*shapes)]
    if any(len(each) > 1 for each in sizes):
        return None
    return tl.block_type(element, [max(each, default=1) for each in sizes])


def _operand(value, like):
    """Return (type, numpy operand) of a tensor, or of a number beside the tensor ``like``; None if numpy cannot use it.

    A number beside a pointer is an offset.
    """
    if type(value) is tl.tensor:
        return value.type, value.handle.data
    element = like.dtype
    if fits(value, element):
        return element, value
    if element.is_ptr() and type(value) is int and fits(value, tl.int64):
        return tl.int64, np.array([value], dtype=np.int64)
    return None


# ---- binary operators: functions (types of elements) -> (type of elements of the result, numpy operation) or None ----


def _arithmetic(compute):
    def find(left, right):
        element = _common(left, right)
        return None if element is None else (element, compute)

    return find


def _integer(compute):
    def find(left, right):
        element = _common(left, right)
        return (element, compute) if element is not None and element.name in INTEGERS else None

    return find


def _bitwise(compute):
    def find(left, right):
        if left.name == right.name == tl.int1.name:
            return left, compute
        return _integer(compute)(left, right)

    return find


def _comparison(compute):
    def find(left, right):
        return None if _common(left, right) is None else (tl.int1, compute)

    return find


def _addition(left, right):
    if not left.is_ptr() or right.name not in INTEGERS:
        return _arithmetic(np.add)(left, right)
    size = max(left.element_ty.primitive_bitwidth // 8, 1)
    return left, lambda pointers, offsets: pointers + np.uint64(size) * offsets.astype(np.uint64)


def _reversed(find):
    def reversed_find(left, right):
        found = find(right, left)
        return found and (found[0], lambda one, other: found[1](other, one))

    return reversed_find


def _quotient(left, right):
    """Divide integers, rounding toward zero, as GPUs do."""
    return (left - np.fmod(left, right)) // right


_FIND: dict[str, Callable[[Any, Any], Any]] = {
    "__add__": _addition, "__sub__": _arithmetic(np.subtract), "__mul__": _arithmetic(np.multiply),
    "__radd__": _arithmetic(np.add), "__rsub__": _reversed(_arithmetic(np.subtract)),
    "__rmul__": _arithmetic(np.multiply), "__floordiv__": _integer(_quotient), "__mod__": _integer(np.fmod),
    "__and__": _bitwise(np.bitwise_and), "__or__": _bitwise(np.bitwise_or), "__xor__": _bitwise(np.bitwise_xor),
    "__lshift__": _integer(np.left_shift), "__rshift__": _integer(np.right_shift),
    "__lt__": _comparison(np.less), "__le__": _comparison(np.less_equal), "__gt__": _comparison(np.greater),
    "__ge__": _comparison(np.greater_equal), "__eq__": _comparison(np.equal), "__ne__": _comparison(np.not_equal),
}
OPERATORS = tuple(_FIND)


def with_fast_operator(name: str, operator: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap an operator of ``tl.tensor``, whose integer operations are not checked for overflow.

    Args:
        name: a name in ``OPERATORS``.
        operator: Triton's operator, with the interpreter's semantic.
    """
    find, known = _FIND[name], {}

    def result_of(left, right):
        """Return (type of the result, numpy operation) for operands of two types, or None."""
        found = find(left.scalar, right.scalar)
        if found is None or (result := _result_type(found[0], left, right)) is None:
            return None
        return result, found[1]

    def fast(self, other):
        operand = _operand(other, self)
        if operand is None:
            return operator(self, other)
        key = self.type.name, operand[0].name
        if key not in known:
            known[key] = result_of(self.type, operand[0])
        found = known[key]
        if found is None:
            return operator(self, other)
        result, compute = found
        return tl.tensor(_handle(compute(self.handle.data, operand[1]), result.scalar), result)

    return fast


def with_fast_cast(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method ``cast`` of a TritonSemantic."""
    known: dict[tuple[str, str], Any] = {}
    sources, targets = {tl.int1.name, *INTEGERS, *_FLOATS}, {*INTEGERS, *_FLOATS}

    def result_of(kind, element):
        """Return (type of the result, its numpy dtype), or None."""
        if kind.scalar.name not in sources or element.name not in targets:
            return None
        return _result_type(element, kind), interpreter._get_np_dtype(element)

    def fast(tensor, to, rounding=None):
        element, key = to.scalar, (tensor.type.name, to.scalar.name)
        if tensor.dtype.name == element.name:
            return tensor
        if key not in known:
            known[key] = result_of(tensor.type, element)
        if known[key] is None or rounding is not None:
            return cast(tensor, to, rounding)
        result, np_dtype = known[key]
        return tl.tensor(_handle(tensor.handle.data.astype(np_dtype), element), result)

    return fast


def with_fast_where(where: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method ``where`` of a TritonSemantic, in which one operand may be a number."""
    known: dict[tuple[str, str, str], Any] = {}

    def result_of(condition, left, right):
        if condition.scalar.name != tl.int1.name or left.scalar.name != right.scalar.name or left.scalar.is_ptr():
            return None
        return _result_type(left.scalar, condition, left, right)

    def fast(condition, x, y):
        like = x if type(x) is tl.tensor else y
        operands = [_operand(value, like) for value in (x, y)] if type(like) is tl.tensor else [None]
        if None in operands:
            return where(condition, x, y)
        (left, one), (right, other) = operands
        key = condition.type.name, left.name, right.name
        if key not in known:
            known[key] = result_of(condition.type, left, right)
        result = known[key]
        if result is None:
            return where(condition, x, y)
        return tl.tensor(_handle(np.where(condition.handle.data, one, other), result.scalar), result)

    return fast


def splat(kind: tl.block_type, scalar: TensorHandle) -> TensorHandle:
    """Replace ``InterpreterBuilder.create_splat``, which returns a block with all elements equal to a scalar.

    Triton's own gives the block the type of the scalar's handle. If the scalar is the result of a comparison, that is
    the type of the operands instead of int1. From Triton 3.9 on, atomic operations do not accept integers as a mask.
    """
    return _handle(np.full(kind.shape, scalar.data, dtype=interpreter._get_np_dtype(kind)), kind.scalar)
