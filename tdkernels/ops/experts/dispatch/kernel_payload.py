"""Device functions for tokens in staging memory: layout of a slot, and load, store and quantization of row blocks.

A slot has the items of a token's row, its scales, K row numbers (-1: not on this rank) and K weights.

If PAYLOAD.gradient is set, x is the gradient of a weighted sum of rows. The gradient of a row is x times its weight,
and the gradient of the weight is the dot product of x with the row.
"""

from typing import NamedTuple

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.fp8_groups import scale_of

QUANTUM = tl.constexpr(128)  # channels under one scale
# Nonzero values of PAYLOAD.quantize: the conversion to fp8.
BY_INTEGERS = tl.constexpr(1)  # with integer operations
BY_INSTRUCTION = tl.constexpr(2)  # with the GPU's instruction


class Payload(NamedTuple):
    """Element types and block sizes of rows: the constexpr argument ``PAYLOAD`` of the dispatch kernels.

    Args:
        source: Type of an element of a row before it is sent.
        item: Type of an element of a row in a slot and in the output.
        scale: Type of a scale, or of the words in which scales are moved.
        quantize: 0 for no quantization, or BY_INTEGERS or BY_INSTRUCTION.
        gradient: Whether the rows are gradients, see the module.
        aligned: Whether rows begin at multiples of 16 bytes.
        block: Elements of a row that a program moves at a time, a power of two.
        scale_block: Scales, or words of scales, that a program moves at a time, a power of two.
    """

    source: tl.dtype
    item: tl.dtype
    scale: tl.dtype
    quantize: int
    gradient: bool
    aligned: bool
    block: int
    scale_block: int


@td.jit
def slot_parts(row_bytes, scale_bytes, K: tl.constexpr):
    """Return (offset of the scales in a slot, offset of the row numbers, bytes of a slot); see ``slot_memory``."""
    scales_begin = (tl.cast(row_bytes, tl.int64) + 15) // 16 * 16
    places_begin = scales_begin + (tl.cast(scale_bytes, tl.int64) + 15) // 16 * 16
    return scales_begin, places_begin, (places_begin + 8 * K + 127) // 128 * 128


@td.jit
def staged_bytes(size, PAYLOAD: tl.constexpr):
    """Return (bytes of a row, bytes of its scales) in a slot, for size = (items, scale words)."""
    items, scale_words = size
    return items * (PAYLOAD.item.primitive_bitwidth // 8), scale_words * (PAYLOAD.scale.primitive_bitwidth // 8)


@td.jit
def read_block(x, scales, block, items, scale_words, there, PAYLOAD: tl.constexpr, STAGED: tl.constexpr):
    """Load a block of the row at address ``x`` and of its scales at address ``scales``; return (items, scales).

    The row is quantized if PAYLOAD says so, except if it is STAGED, that is in a slot. If ``there`` is false, nothing
    is loaded.
    """
    BLOCK: tl.constexpr = PAYLOAD.block
    SCALE: tl.constexpr = PAYLOAD.scale
    SOURCE: tl.constexpr = PAYLOAD.item if STAGED else PAYLOAD.source
    ALIGNED: tl.constexpr = True if STAGED else PAYLOAD.aligned
    QUANTIZE: tl.constexpr = 0 if STAGED else PAYLOAD.quantize
    offs = block * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(td.pointer_to(x, SOURCE, ALIGNED) + offs, mask=(offs < items) & there, other=0)
    if QUANTIZE:
        quanta = tl.reshape(td.to_float32(row), (BLOCK // QUANTUM, QUANTUM))
        factor, quanta_scales = scale_of(td.max_of(tl.abs(quanta), 1))
        codes = td.to_e4m3(quanta * factor[:, None], QUANTIZE == BY_INSTRUCTION)
        return tl.reshape(codes, (BLOCK,)), quanta_scales
    else:
        word = block * PAYLOAD.scale_block + tl.arange(0, PAYLOAD.scale_block)
        return row, tl.load(scales.to(tl.pointer_type(SCALE)) + word, mask=(word < scale_words) & there, other=0)


@td.jit
def write_block(
    row, row_scales, to, scales_to, block, items, scale_words, PAYLOAD: tl.constexpr, ALIGNED: tl.constexpr
):
    """Store a block of a row at address ``to`` and of its scales at ``scales_to``. ALIGNED: rows are aligned to 16."""
    offs = block * PAYLOAD.block + tl.arange(0, PAYLOAD.block)
    tl.store(td.pointer_to(to, PAYLOAD.item, ALIGNED) + offs, row, mask=offs < items)
    word = block * PAYLOAD.scale_block + tl.arange(0, PAYLOAD.scale_block)
    tl.store(scales_to.to(tl.pointer_type(PAYLOAD.scale)) + word, row_scales, mask=word < scale_words)


@td.jit
def spread(here, weights, row, row_scales, block, size, outputs, PAYLOAD: tl.constexpr):
    """Store a block of a token in all of its rows on this rank.

    ``here`` has the row numbers, -1 for assignments to other ranks. ``size`` is (items, scale words) of a row.
    ``outputs`` is (rows_ptr, row_scales_ptr, row_weights_ptr, expert_rows_ptr, dots_ptr).
    """
    items, scale_words = size
    rows_ptr, scales_ptr, _, expert_rows_ptr, dots_ptr = outputs
    ITEM: tl.constexpr = PAYLOAD.item
    ALIGNED: tl.constexpr = PAYLOAD.aligned
    BLOCK: tl.constexpr = PAYLOAD.block
    ITEM_BYTES: tl.constexpr = ITEM.primitive_bitwidth // 8
    turns, count = td.compact_indices(here >= 0)
    for turn in range(count):
        place = td.gather_lane(here, turns, turn).to(tl.int64)
        to = rows_ptr.to(tl.int64) + place * items * ITEM_BYTES
        if PAYLOAD.gradient:
            offs = block * BLOCK + tl.arange(0, BLOCK)
            gradient = td.to_float32(row)
            weight = td.sum_of(tl.where(turns == turn, weights, 0.0), 0)
            tl.store(td.pointer_to(to, ITEM, ALIGNED) + offs, td.from_float32(gradient * weight, ITEM), offs < items)
            if dots_ptr is not None:
                row_at = expert_rows_ptr.to(tl.int64) + place * items * ITEM_BYTES
                expert_row = tl.load(td.pointer_to(row_at, ITEM, ALIGNED) + offs, mask=offs < items, other=0)
                dot = td.sum_of(gradient * td.to_float32(expert_row), 0)
                if block > 0:
                    dot += tl.load(dots_ptr + place)
                tl.store(dots_ptr + place, dot)
        else:
            scales_to = scales_ptr.to(tl.int64) + place * scale_words * (PAYLOAD.scale.primitive_bitwidth // 8)
            write_block(row, row_scales, to, scales_to, block, items, scale_words, PAYLOAD, ALIGNED)
