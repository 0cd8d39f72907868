"""Conversion of fp32 to any fp8 format: device functions for codes and for the scale of a group of elements.

A group with a NaN has the scale NaN. The largest magnitude is therefore a maximum of the bits of fp32 numbers without
their sign: these are ordered as the numbers are, and NaN is the largest.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from tdkernels import lang as td


class Format(NamedTuple):
    """An fp8 format: the constexpr argument ``FORMAT``.

    Attributes:
        mantissa: Bits of the mantissa.
        bias: Bias of the exponent.
        largest: Largest finite value.
        last_code: Code of the largest finite value.
        fnuz: Whether the code 0x80 is NaN instead of -0.
        by_instruction: Whether the GPU's conversion instruction is used instead of integer arithmetic.
    """

    mantissa: int
    bias: int
    largest: float
    last_code: int
    fnuz: bool
    by_instruction: bool


_FORMATS = {
    torch.float8_e4m3fn: Format(3, 7, 448.0, 0x7E, False, False),
    torch.float8_e5m2: Format(2, 15, 57344.0, 0x7B, False, False),
    torch.float8_e4m3fnuz: Format(3, 8, 240.0, 0x7F, True, False),
    torch.float8_e5m2fnuz: Format(2, 16, 57344.0, 0x7F, True, False),
}
FP8_DTYPES = tuple(_FORMATS)


def format_for(dtype: torch.dtype, by_instruction: bool) -> Format:
    """Return the Format of a float8 dtype. ``by_instruction``: the GPU converts to the formats of the OCP."""
    return _FORMATS[dtype]._replace(by_instruction=by_instruction and not _FORMATS[dtype].fnuz)


@td.jit
def _to_codes_by_integers(x, FORMAT: tl.constexpr):
    """Convert fp32 to fp8 codes in int32: round to nearest even, saturate. NaN loses its sign."""
    SHIFT: tl.constexpr = 23 - FORMAT.mantissa
    HALF: tl.constexpr = (1 << (SHIFT - 1)) - 1
    REBIAS: tl.constexpr = (127 - FORMAT.bias) << FORMAT.mantissa
    SMALLEST_NORMAL: tl.constexpr = (128 - FORMAT.bias) << 23  # the bits of 2**(1 - bias)
    # Below it, codes are as far apart as fp32 values at this power of two: adding it rounds.
    ROUNDING_BITS: tl.constexpr = (127 + 24 - FORMAT.bias - FORMAT.mantissa) << 23
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + HALF + ((magnitude >> SHIFT) & 1) >> SHIFT).to(tl.int32) - REBIAS
    rounding = tl.full(x.shape, ROUNDING_BITS, tl.int32)
    small = (tl.abs(x) + rounding.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - rounding
    code = tl.where(magnitude < SMALLEST_NORMAL, small, tl.minimum(normal, FORMAT.last_code))
    sign = (bits >> 24 & 0x80).to(tl.int32)
    if FORMAT.fnuz:
        code = tl.where(code == 0, 0, code | sign)
        return tl.where(magnitude > 0x7F800000, 0x80, code)
    else:
        return tl.where(magnitude > 0x7F800000, 0x7F, code | sign)


@td.jit
def _to_codes(x, FORMAT: tl.constexpr):
    """Convert fp32 to fp8 codes in uint8: round to nearest even, saturate. The sign of a NaN is undefined."""
    if not FORMAT.by_instruction:
        return _to_codes_by_integers(x, FORMAT).to(tl.uint8)
    elif FORMAT.mantissa == 3:
        return td.to_e4m3(x, True)
    else:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)


@td.jit
def magnitude_bits(x):
    """Return the bits of |x| in int32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@td.jit
def scale_of_bits(bits, FORMAT: tl.constexpr):
    """Return the scale of a group with the bits of its largest magnitude."""
    largest = bits.to(tl.float32, bitcast=True)
    return tl.div_rn(largest, tl.full(largest.shape, FORMAT.largest, tl.float32))


# A divisor outside of this range is multiplied by a power of two, so that no remainder underflows.
_LEAST_DIVISOR, _LARGEST_DIVISOR, _FACTOR = tl.constexpr(2.0**-80), tl.constexpr(2.0**80), tl.constexpr(2.0**100)
_SATURATES = tl.constexpr(2.0**20)  # above the largest value of all formats


@td.jit
def _quotient(x, scale, DTYPE: tl.constexpr, BOUNDED: tl.constexpr):
    """Return a number with the same code as x / scale. Arguments as for ``scaled_codes``, but ``scale`` is not 0.

    The compiler's division has a branch for each element and takes so many instructions that they, and not the memory,
    would limit a kernel. Here the reciprocal is computed once for each scale. Its product with x is corrected by the
    remainder. In the following, u is one unit in the last place of the quotient.

    The first correction gives the exact quotient to 2**-22 u, then rounded. So it rounds another way than the division
    only if the exact quotient is that close to the middle between two numbers of fp32. A code can only depend on that
    if one of these two is in the middle between two codes, c, which has 5 significant bits. For an x of 11 significant
    bits, a search over all x and c finds one quotient closer than 2**-12 u to c + u / 2 or c - u / 2: that of a power
    of two and a scale of 2 - 2**-23 times another. There the reciprocal is rounded up, and the correction exact. For an
    x of 24 bits the second correction gives the rounded quotient, since the reciprocal is correctly rounded, and the
    first correction gives a number next to the exact quotient (Markstein, "Computation of elementary functions on the
    IBM RISC System/6000 processor", 1990).

    A quotient below 2**-20 may be another one below 2**-20. The sign is always that of x / scale, also of 0.
    """
    if td.target() == "cuda":
        magnitude = tl.abs(scale)
        factor = tl.where(magnitude < _LEAST_DIVISOR, _FACTOR, 1.0)
        factor = tl.where(magnitude > _LARGEST_DIVISOR, 1.0 / _FACTOR, factor)
        divisor = magnitude * factor
        # x and the reciprocal are negated. So remainders need no negation, which would be 0 - x and lose the sign of 0.
        reciprocal = tl.div_rn(tl.full(divisor.shape, -1.0, tl.float32), divisor)
        divisor = tl.where(divisor == float("inf"), 0.0, divisor)  # otherwise the remainder would be NaN
        x = x * tl.where(scale < 0, factor, -factor)
        first = x * reciprocal
        quotient = tl.fma(tl.fma(first, divisor, x), reciprocal, first)
        if DTYPE == tl.float32:
            quotient = tl.fma(tl.fma(quotient, divisor, x), reciprocal, quotient)
        if not BOUNDED:  # the remainder of an infinite product is not finite
            quotient = tl.where(tl.abs(first) < _SATURATES, quotient, first)
        return quotient
    else:  # the interpreter rounds the product in tl.fma; not measured on AMD
        return tl.div_rn(x, scale)


@td.jit
def scaled_codes(x, scale, FORMAT: tl.constexpr, DTYPE: tl.constexpr, BOUNDED: tl.constexpr = True):
    """Return the codes of x / scale, rounded to nearest even as a number of fp32 first; 0 where the scale is 0.

    Args:
        x: fp32.
        scale: Can be broadcast to x.
        FORMAT: The format.
        DTYPE: The dtype from which x was converted. Numbers of bf16 and fp16 need fewer instructions.
        BOUNDED: Whether the scale is that of a group with x, so that no quotient is too large for fp32.
    """
    is_zero = scale == 0
    quotient = _quotient(x, tl.where(is_zero, 1.0, scale), DTYPE, BOUNDED)
    return _to_codes(tl.where(is_zero, 0.0, quotient), FORMAT)
