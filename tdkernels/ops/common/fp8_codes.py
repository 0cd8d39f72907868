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


@td.jit
def scaled_codes(x, scale, FORMAT: tl.constexpr):
    """Return the codes of x / scale; 0 where the scale is 0. ``scale`` has the shape of x."""
    is_zero = scale == 0
    quotient = tl.div_rn(x, tl.where(is_zero, 1.0, scale))
    return _to_codes(tl.where(is_zero, 0.0, quotient), FORMAT)
