"""Device functions that normalize rows: RMSNorm and LayerNorm, with the result in the dtype of the rows or in fp8.

    RMSNorm      y = r / sqrt(mean(r**2) + eps) * weight + bias
    LayerNorm    y = (r - mean(r)) / sqrt(var(r) + eps) * weight + bias

All arithmetic is in fp32. A row of at most BLOCK elements stays in registers; a longer one is read again from memory
for each pass. With fp8, y is rounded to the dtype of the rows first, so codes and scales are those of ``quantize_fp8``.
"""

from typing import NamedTuple

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.fp8_codes import magnitude_bits, scale_of_bits, scaled_codes


class Norm(NamedTuple):
    """What a kernel computes: the constexpr argument ``NORM``.

    Attributes:
        is_layer_norm: LayerNorm instead of RMSNorm.
        has_residual: Whether a residual is added before the norm.
        has_bias: Whether a bias is added after the norm.
        aligned: Whether rows are a multiple of 16 elements.
        tree: Whether ``all_reduce_rms_norm`` and ``all_reduce_layer_norm`` add by a tree (``reduce_in_tree``).
    """

    is_layer_norm: bool
    has_residual: bool
    has_bias: bool
    aligned: bool
    tree: bool = False


@td.jit
def load_if(ptr, offs, mask, EXISTS: tl.constexpr):
    """Return the elements at ``ptr + offs``, zeros where ``mask`` is not set; fp32 zeros if they do not exist."""
    if EXISTS:
        return tl.load(ptr + offs, mask=mask, other=0.0)
    else:
        return tl.full(offs.shape, 0.0, tl.float32)


@td.jit
def _reciprocal_deviation(sum_of_squares, hidden, eps):
    """Return 1 / sqrt(mean of squares + eps)."""
    return tl.rsqrt(sum_of_squares / tl.cast(hidden, tl.float32) + eps)


@td.jit
def _scaled(r, mean, rstd, weight, bias, NORM: tl.constexpr):
    """Return y in fp32 for elements of a row and of weight and bias."""
    y = (r - mean) * rstd * td.to_float32(weight) if NORM.is_layer_norm else r * rstd * td.to_float32(weight)
    return y + td.to_float32(bias) if NORM.has_bias else y


@td.jit
def _rounded(y, DTYPE: tl.constexpr):
    """Return fp32 values rounded to DTYPE, in fp32."""
    return td.to_float32(td.from_float32(y, DTYPE))


@td.jit
def _code_pointers(y_ptr):
    """Return a pointer to fp8 codes as a pointer to uint8."""
    return y_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)


@td.jit
def _store_scale(scale_ptr, row, bits, there, FORMAT: tl.constexpr):
    """Store the scale of a row whose largest magnitude has these bits, if ``there``; return it, [1]."""
    scale = scale_of_bits(tl.full((1,), 0, tl.int32) + bits, FORMAT)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale, mask=there)
    return scale


@td.jit
def _store_stats(stats_ptr, row, mean, rstd, there):
    """Store mean and reciprocal of the deviation of a row, if ``there``."""
    tl.store(stats_ptr + 2 * row, mean, mask=there)
    tl.store(stats_ptr + 2 * row + 1, rstd, mask=there)


@td.jit
def normalize_registers(
    r, row, offs, mask, stored, first, weight, bias, eps, y_ptr, scale_ptr, stats_ptr, hidden,
    NORM: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr,
):
    """Normalize a row in registers, and store the columns in ``stored``.

    Args:
        r: The row in fp32, zeros where ``mask`` is not set.
        row: Number of the row, int64.
        offs: Column of each element.
        mask: Columns that exist.
        stored: Columns that this program stores.
        first: Whether this program stores the scale and the statistics of the row.
        weight: From ``load_if``.
        bias: From ``load_if``.
        eps: Added to the mean of squares.
        y_ptr: The results, [rows, hidden], or their fp8 codes.
        scale_ptr: The scales of the codes, [rows]. Not used without fp8.
        stats_ptr: Mean (0 for RMSNorm) and reciprocal of the deviation, [rows, 2].
        hidden: Number of elements of a row.
        NORM: See ``Norm``.
        FORMAT: The fp8 format of y, or None.
        DTYPE: The dtype of the rows.
    """
    mean = tl.full((), 0.0, tl.float32)
    if NORM.is_layer_norm:
        mean = td.sum_of(r, 0) / tl.cast(hidden, tl.float32)
    centered = tl.where(mask, r - mean, 0.0) if NORM.is_layer_norm else r
    rstd = _reciprocal_deviation(td.sum_of(centered * centered, 0), hidden, eps)
    _store_stats(stats_ptr, row, mean, rstd, first)
    y = _scaled(r, mean, rstd, weight, bias, NORM)
    if FORMAT is None:
        tl.store(y_ptr + row * hidden + offs, td.from_float32(y, DTYPE), mask=stored)
    else:
        y = tl.where(mask, _rounded(y, DTYPE), 0.0)
        scale = _store_scale(scale_ptr, row, td.max_of(magnitude_bits(y), 0), first, FORMAT)
        codes = scaled_codes(y, scale, FORMAT, DTYPE)
        tl.store(_code_pointers(y_ptr) + row * hidden + offs, codes, mask=stored)


@td.jit
def _row_statistics(r_ptr, offs, hidden, eps, NORM: tl.constexpr, BLOCK: tl.constexpr):
    """Return (mean, reciprocal of the deviation) of a row in memory."""
    total = tl.full((BLOCK,), 0.0, tl.float32)
    squares = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, hidden, BLOCK):
        r = td.to_float32(tl.load(r_ptr + start + offs, mask=offs < hidden - start, other=0.0))
        total += r
        squares += r * r
    mean = tl.full((), 0.0, tl.float32)
    if NORM.is_layer_norm:
        mean = td.sum_of(total, 0) / tl.cast(hidden, tl.float32)
        squares = tl.full((BLOCK,), 0.0, tl.float32)
        for start in range(0, hidden, BLOCK):
            mask = offs < hidden - start
            r = td.to_float32(tl.load(r_ptr + start + offs, mask=mask, other=0.0))
            centered = tl.where(mask, r - mean, 0.0)
            squares += centered * centered
    return mean, _reciprocal_deviation(td.sum_of(squares, 0), hidden, eps)


@td.jit
def _block_of_y(
    r_ptr, start, offs, hidden, mean, rstd, weight_ptr, bias_ptr, NORM: tl.constexpr, DTYPE: tl.constexpr
):
    """Return (y of a block of a row as DTYPE, its mask)."""
    mask = offs < hidden - start
    r = td.to_float32(tl.load(r_ptr + start + offs, mask=mask, other=0.0))
    weight = tl.load(weight_ptr + start + offs, mask=mask, other=0.0)
    bias = load_if(bias_ptr, start + offs, mask, NORM.has_bias)
    return td.from_float32(_scaled(r, mean, rstd, weight, bias, NORM), DTYPE), mask


@td.jit
def normalize_memory(
    r_ptr, row, weight_ptr, bias_ptr, eps, y_ptr, scale_ptr, stats_ptr, hidden,
    NORM: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Normalize a row of more than BLOCK elements at ``r_ptr``, which this program stored; store all of it.

    The other arguments are those of ``normalize_registers``.
    """
    tl.debug_barrier()  # the row may have been stored by other threads
    offs = tl.arange(0, BLOCK)
    mean, rstd = _row_statistics(r_ptr, offs, hidden, eps, NORM, BLOCK)
    _store_stats(stats_ptr, row, mean, rstd, True)
    if FORMAT is None:
        for start in range(0, hidden, BLOCK):
            y, mask = _block_of_y(r_ptr, start, offs, hidden, mean, rstd, weight_ptr, bias_ptr, NORM, DTYPE)
            tl.store(y_ptr + row * hidden + start + offs, y, mask=mask)
    else:
        largest = tl.full((BLOCK,), 0, tl.int32)
        for start in range(0, hidden, BLOCK):
            y, mask = _block_of_y(r_ptr, start, offs, hidden, mean, rstd, weight_ptr, bias_ptr, NORM, DTYPE)
            largest = tl.maximum(largest, magnitude_bits(tl.where(mask, td.to_float32(y), 0.0)))
        scale = _store_scale(scale_ptr, row, td.max_of(largest, 0), True, FORMAT)
        for start in range(0, hidden, BLOCK):
            y, mask = _block_of_y(r_ptr, start, offs, hidden, mean, rstd, weight_ptr, bias_ptr, NORM, DTYPE)
            y = tl.where(mask, td.to_float32(y), 0.0)
            codes = scaled_codes(y, scale, FORMAT, DTYPE)
            tl.store(_code_pointers(y_ptr) + row * hidden + start + offs, codes, mask=mask)
