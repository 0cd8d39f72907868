"""Arithmetic in which the interpreter needs help with bf16: it keeps its bits, multiplies those, and truncates."""

import triton.language as tl

from tdkernels.lang._jit import jit
from tdkernels.lang._target import target


@jit
def to_float32(x):
    """``x`` in fp32; exact."""
    if target() == "interpreter" and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@jit
def from_float32(x, DTYPE: tl.constexpr):
    """fp32 ``x`` in ``DTYPE``, rounded to nearest even."""
    if target() == "interpreter" and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, 0x7FC0, rounded)  # rounding a NaN up could make it infinite
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """``tl.dot(a, b, acc)`` with an fp32 accumulator."""
    if target() == "interpreter":
        return tl.dot(to_float32(a), to_float32(b), acc, input_precision=PRECISION)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)
