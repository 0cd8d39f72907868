"""Device functions for values in e4m3 with one fp32 scale per group of 128, and for rows of such values.

The scale of a group is its largest finite magnitude over 448, the largest value of e4m3. So the values of a group may
have any magnitude, and their error is relative to the element or to the group, see ``ops.dense.wire``. An element that
is not finite becomes NaN and does not change the other elements of its group.

A packed row of ``k`` values is k codes of one byte, then from the next multiple of 16 bytes on ceil(k / 128) scales.
Rows begin at multiples of 16 bytes (``packed_row_bytes``).
"""

from typing import TYPE_CHECKING

import triton.language as tl

from tdkernels import lang as td
from tdkernels.rounding import cdiv, next_power_of_2, round_up

if TYPE_CHECKING:
    import torch

GROUP = tl.constexpr(128)  # elements under one scale
_LARGEST = tl.constexpr(448.0)  # of e4m3
_SMALLEST = tl.constexpr(2.0**-118)  # a smaller magnitude would make the factor infinite


def packed_row_bytes(k: int) -> int:
    """Return the bytes of a packed row of ``k`` values."""
    return round_up(round_up(k, 16) + 4 * cdiv(k, GROUP.value), 16)


def row_block(k: int, device: "torch.device") -> tuple[int, int]:
    """Return (columns of a row of ``k`` values that a program processes at a time, its number of warps)."""
    block = min(next_power_of_2(max(k, GROUP.value)), 1024 if device.type == "cpu" else 4096)
    return block, max(block // 512, 1)


@td.jit
def scale_of(most):
    """Return (factor, scale) of groups with these largest magnitudes: codes = x * factor, x = codes * scale."""
    most = tl.where(most > 0, tl.maximum(most, _SMALLEST), _LARGEST)
    largest = tl.full(most.shape, _LARGEST, tl.float32)
    return tl.div_rn(largest, most), tl.div_rn(most, largest)


@td.jit
def quantize_groups(x, CONVERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Quantize fp32 ``x`` [BLOCK]; return (codes, uint8 [BLOCK], scales, fp32 [BLOCK / 128]).

    CONVERTS: as for ``td.to_e4m3``.
    """
    groups = tl.reshape(x, (BLOCK // GROUP, GROUP))
    magnitude = tl.abs(groups)
    finite = magnitude < float("inf")  # false for NaN
    factor, scales = scale_of(td.max_of(tl.where(finite, magnitude, 0.0), 1))
    codes = td.to_e4m3(tl.where(finite, groups * factor[:, None], float("nan")), CONVERTS)
    return tl.reshape(codes, (BLOCK,)), scales


@td.jit
def dequantize_groups(codes, scales, CONVERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return codes [BLOCK] times the scales of their groups [BLOCK / 128], in fp32."""
    values = tl.reshape(td.from_e4m3(codes, CONVERTS), (BLOCK // GROUP, GROUP))
    return tl.reshape(values * scales[:, None], (BLOCK,))


@td.jit
def load_quantized(codes_at, scales_at, left, there, CONVERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Load ``left`` codes (at most BLOCK) and their scales; return their values in fp32 [BLOCK], zeros after them.

    codes_at, scales_at: Addresses (int64); ``codes_at`` is a multiple of 16. If ``there`` is false, nothing is loaded.
    """
    offs, group = tl.arange(0, BLOCK), tl.arange(0, BLOCK // GROUP)
    codes = tl.load(td.pointer_to(codes_at, tl.uint8) + offs, mask=(offs < left) & there, other=0)
    scales_ptr = td.pointer_to(scales_at, tl.float32, False)
    scales = tl.load(scales_ptr + group, mask=(group * GROUP < left) & there, other=0.0)
    return dequantize_groups(codes, scales, CONVERTS, BLOCK)


@td.jit
def quantized_part_of(
    source, me, ranks, at, part_bytes, left, own, CONVERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return a block of the part of rank ``source`` in fp32: ``own`` if it is this rank, zeros if it is not a rank.

    ``at``: addresses of the codes and of the scales of the block of rank 0. Those of rank r are ``r * part_bytes``
    later. The other arguments are those of ``load_quantized``.
    """
    codes_at, scales_at = at
    there = (me != source) & (ranks > source)
    before = source * part_bytes
    part = load_quantized(codes_at + before, scales_at + before, left, there, CONVERTS, BLOCK)
    return tl.where(me == source, own, part)


@td.jit
def store_quantized(codes_at, scales_at, codes, scales, left, there, BLOCK: tl.constexpr):
    """Store the first ``left`` codes and their scales; addresses and ``there`` as for ``load_quantized``."""
    offs, group = tl.arange(0, BLOCK), tl.arange(0, BLOCK // GROUP)
    tl.store(td.pointer_to(codes_at, tl.uint8) + offs, codes, mask=(offs < left) & there)
    scales_ptr = td.pointer_to(scales_at, tl.float32, False)
    tl.store(scales_ptr + group, scales, mask=(group * GROUP < left) & there)


@td.jit
def block_of_rows(item, k, row_bytes, BLOCK: tl.constexpr):
    """Locate block number ``item`` of rows of ``k`` values, each divided into blocks of BLOCK columns.

    Returns:
        (row, first column, offset of the codes of the block in the packed rows, offset of its scales).
    """
    blocks = (k + BLOCK - 1) // BLOCK
    row, column = (item // blocks).to(tl.int64), item % blocks * BLOCK
    packed = row * row_bytes
    return row, column, packed + column, packed + (k + 15) // 16 * 16 + column // GROUP * 4
