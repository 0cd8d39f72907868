"""Arithmetic in which the interpreter needs help with bf16: it keeps its bits, multiplies those, and truncates."""

import triton.language as tl

from tdkernels.lang.kernel import jit
from tdkernels.lang.targets import target


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


@jit
def to_e4m3(x, CONVERTS: tl.constexpr = False):
    """The bits (uint8) of fp32 ``x`` in float8_e4m3fn, rounded to nearest even; beyond ±448 the largest number.

    By integers, unless the GPU ``CONVERTS``: NVIDIA's do from sm_89 on; AMD's gfx942 has another e4m3. What was no
    number remains none, but may lose its sign.
    """
    if CONVERTS:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return _to_e4m3_by_integers(x)


@jit
def _to_e4m3_by_integers(x):
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) >> 20).to(tl.int32) - ((127 - 7) << 3)
    # Below 2**-6 numbers are 2**-9 apart, as they are at 2**14 in fp32: the addition rounds.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, tl.minimum(normal, 0x7E))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | (bits >> 24 & 0x80).to(tl.int32)).to(tl.uint8)
