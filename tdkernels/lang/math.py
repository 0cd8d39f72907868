"""Conversions and dot products that handle bf16 correctly in the interpreter, and a sigmoid with few instructions.

Triton's interpreter stores bf16 as its bits, multiplies those bits, and truncates when it converts to bf16.
"""

import triton.language as tl

from tdkernels.lang.kernel import jit
from tdkernels.lang.targets import target


@jit
def to_float32(x):
    """Convert ``x`` to fp32. Exact."""
    if target() == "interpreter" and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif target() == "interpreter" and x.dtype == tl.float8e5:
        return (x.to(tl.uint8, bitcast=True).to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif target() == "interpreter" and x.dtype == tl.float8e4nv:
        return from_e4m3(x.to(tl.uint8, bitcast=True))
    else:
        return x.to(tl.float32)


@jit
def from_float32(x, DTYPE: tl.constexpr):
    """Convert fp32 ``x`` to ``DTYPE``, rounding to nearest even."""
    if target() == "interpreter" and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, 0x7FC0, rounded)  # rounding could turn a NaN into infinity
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) for fp32 x.

    On NVIDIA GPUs the result is 0 below -87.3, where it would be less than 2**-126. ``tl.exp`` and a division compute
    such numbers, too, and take 8 more instructions for each element.
    """
    if target() == "cuda":
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;"
            " rcp.approx.ftz.f32 $0, t; }",  # exp(-x) is 2 ** (-1.442695 * x)
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@jit
def dot(a, b, acc, PRECISION: tl.constexpr, IMPRECISE_K: tl.constexpr = None):
    """Return ``tl.dot(a, b, acc)`` with an fp32 accumulator.

    Args:
        a: left operand.
        b: right operand.
        acc: fp32 accumulator.
        PRECISION: ``input_precision`` of ``tl.dot``.
        IMPRECISE_K: for fp8 on sm_90, whose tensor cores accumulate with fewer bits than fp32: number of elements of K
            after which the result is added to ``acc`` in fp32. None: the tensor cores accumulate all of K.
    """
    if target() == "interpreter":
        # numpy's matmul in fp32 adds in an order that depends on the CPU and on the position of a row in its tile. In
        # fp64 the order changes only the last bits, which rounding to fp32 removes except in very rare cases.
        wide_a, wide_b = to_float32(a).to(tl.float64), to_float32(b).to(tl.float64)
        return acc + tl.dot(wide_a, wide_b, out_dtype=tl.float64).to(tl.float32)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE_K)


@jit
def from_e4m3(codes, CONVERTS: tl.constexpr = False):
    """Convert the bits of float8_e4m3fn (uint8) to fp32. Exact.

    Args:
        codes: uint8.
        CONVERTS: use the GPU's conversion instruction, as for ``to_e4m3``. False: convert with integer arithmetic.
    """
    if CONVERTS:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # As fp16, exponent and mantissa give 2**-8 times the value, also for subnormal numbers.
        bits = codes.to(tl.uint16)
        half = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True)
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@jit
def to_e4m3(x, CONVERTS: tl.constexpr = False):
    """Convert fp32 ``x`` to float8_e4m3fn, rounding to nearest even and saturating at ±448.

    NaN stays NaN but may lose its sign.

    Args:
        x: fp32.
        CONVERTS: use the GPU's conversion instruction. Exact on NVIDIA from sm_90 on: on sm_89 Triton rounds to fp16
            first, and AMD's gfx942 has a different e4m3 format. False: convert with integer arithmetic.

    Returns:
        The bits, as uint8.
    """
    if CONVERTS:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return _to_e4m3_by_integers(x)


@jit
def _to_e4m3_by_integers(x):
    """Convert with integer arithmetic, see ``to_e4m3``."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) >> 20).to(tl.int32) - ((127 - 7) << 3)
    # Below 2**-6, e4m3 values are 2**-9 apart, as fp32 values are at 2**14: the addition rounds.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, tl.minimum(normal, 0x7E))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | (bits >> 24 & 0x80).to(tl.int32)).to(tl.uint8)
