"""Faster checks of the operands of a binary operation in Triton's interpreter.

Triton computes the common type of the operands, casts both to it, and broadcasts them, by about 30 Python calls. Most
operands of kernels need none of this: two tensors of one type, an integer tensor and a number, a pointer and offsets of
the same shape. All others take Triton's own path.
"""

from collections.abc import Callable
from typing import Any

import triton.language as tl

INTEGERS = {  # {name: (least value, greatest value)}; int1 has rules of its own
    kind.name: (kind.get_int_min_value(), kind.get_int_max_value())
    for kind in (tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64)
}
_NUMBERS = {int: set(INTEGERS), float: {tl.float32.name, tl.float64.name}}  # {Python type: tensors it is converted to}


def fits(value: Any, element: tl.dtype) -> bool:
    """Return whether Triton converts a number to ``element``, the type of the elements of the other operand."""
    kind = type(value)
    if kind not in _NUMBERS or element.name not in _NUMBERS[kind]:
        return False
    return kind is float or INTEGERS[element.name][0] <= value <= INTEGERS[element.name][1]


def have_same_shape(left: tl.dtype, right: tl.dtype) -> bool:
    """Return whether two types are both scalars, or blocks of one shape."""
    if not left.is_block() or not right.is_block():
        return left.is_block() == right.is_block()
    return list(left.shape) == list(right.shape)


def with_fast_checks(semantic: Any) -> Callable[..., tuple[Any, Any]]:
    """Return a replacement for the method ``binary_op_type_checking_impl`` of a TritonSemantic."""
    check, tensor = semantic.binary_op_type_checking_impl, tl.tensor

    def constant(value, like):
        """Return an integer as a tensor of the type of an integer tensor, or None if it does not fit."""
        element = like.scalar
        if not fits(value, element):
            return None
        one = semantic.scalar_constant(value, element)
        if like is element:
            return one
        return tensor(semantic.builder.create_splat(like.to_ir(semantic.builder), one.handle), like)

    def checked(lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        left, right = type(lhs), type(rhs)
        if left is tensor and right is tensor:
            if _are_compatible(lhs.type, rhs.type, allow_lhs_ptr, div_or_mod):
                return lhs, rhs
        elif arithmetic_check and left is tensor and right is int:
            other = constant(rhs, lhs.type)
            if other is not None:
                return lhs, other
        elif arithmetic_check and left is int and right is tensor:
            other = constant(lhs, rhs.type)
            if other is not None:
                return other, rhs
        return check(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return checked


def _are_compatible(left, right, allow_left_ptr, div_or_mod):
    """Return whether tensors of these types need no cast and no broadcast."""
    if left is right or left.name == right.name:
        element = left.scalar
        # Division uses fp32 for smaller types, fp8 only from Triton 3.9 on.
        return not element.is_ptr() and not (div_or_mod and element.is_floating() and element.primitive_bitwidth < 32)
    if not allow_left_ptr or not left.scalar.is_ptr() or right.scalar.name not in INTEGERS:
        return False
    return have_same_shape(left, right)


def with_fast_broadcast(broadcast: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap ``broadcast_impl_value``, which compares shapes element by element: most operands have the same shape."""
    known: dict[tuple[str, str], bool] = {}

    def broadcasted(lhs, rhs):
        key = lhs.type.name, rhs.type.name
        if key not in known:
            known[key] = have_same_shape(lhs.type, rhs.type)
        return (lhs, rhs) if known[key] else broadcast(lhs, rhs)

    return broadcasted


def with_fast_unwrap(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap ``_unwrap_if_constexpr``: most of its arguments are not constexpr."""
    plain = {tl.tensor, int, bool, float, str, tl.dtype, tl.block_type, tl.pointer_type, type(None)}

    def unwrapped(value):
        return value if type(value) in plain else unwrap(value)

    return unwrapped


def with_identity(equals: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Wrap ``dtype.__eq__``: the types of the language are single objects."""

    def __eq__(self, other):
        return self is other or equals(self, other)

    return __eq__
