"""Sums of all ranks' partials, in fp32 and in rank order, so that the same inputs give the same bits."""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.gemm_tile import from_fragment_layout, to_fragment_layout, with_bias

# Columns of an accumulator that are summed at a time: one group of ``to_fragment_layout``.
_COLUMNS = tl.constexpr(32)


@td.jit
def reduce_in_rank_order(
    parts, part_bytes, offs, mask, own, me, RANKS: tl.constexpr, DTYPE: tl.constexpr, SKIPPED: tl.constexpr = 0
):
    """All ranks' partials added in fp32, in rank order; ours is at hand in fp32, rank r's at parts + r * part_bytes.

    SKIPPED: elements of each partial before those that are summed. They are not added to ``parts``, as Triton 3.8 turns
    an address plus a constant into a pointer plus a constant, and forgets how that pointer was aligned.

    Four of them are read at a time, for a read takes far longer than the addition; and with the number of ranks known
    there is no loop, so that the reads of what is summed next can begin before this sum is done.
    """
    total = tl.full(own.shape, 0.0, tl.float32)
    for first in tl.static_range(0, RANKS, 4):
        part0 = _partial_of(first, parts, part_bytes, offs, mask, own, me, RANKS, DTYPE, SKIPPED)
        part1 = _partial_of(first + 1, parts, part_bytes, offs, mask, own, me, RANKS, DTYPE, SKIPPED)
        part2 = _partial_of(first + 2, parts, part_bytes, offs, mask, own, me, RANKS, DTYPE, SKIPPED)
        part3 = _partial_of(first + 3, parts, part_bytes, offs, mask, own, me, RANKS, DTYPE, SKIPPED)
        total += part0
        total += part1
        total += part2
        total += part3
    return total


@td.jit
def _partial_of(
    source: tl.constexpr, parts, part_bytes, offs, mask, own, me, RANKS: tl.constexpr, DTYPE: tl.constexpr,
    SKIPPED: tl.constexpr,
):
    """The partial of a rank in fp32; zeros for ranks that there are not."""
    if source >= RANKS:
        return tl.full(own.shape, 0.0, tl.float32)
    pointer = td.pointer_to(parts + source * part_bytes, DTYPE) + SKIPPED
    part = tl.load(pointer + offs, mask=mask & (me != source), other=0.0)
    return tl.where(me == source, own, td.to_float32(part))


@td.jit
def sum_of_tile(
    acc, parts, part_bytes, bias_ptr, col, N, me, DTYPE: tl.constexpr,
    RANKS: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    SKIPPED: tl.constexpr = 0,
):
    """``acc`` plus the peers' partials of the same tile, WIDTH columns of one of ours, in rank order, as a DTYPE.

    SKIPPED: elements of a partial before these columns
    """
    if WIDTH > _COLUMNS:
        # A part at a time: the sum, the peers' partials and the accumulator do not fit the registers together.
        HALF: tl.constexpr = WIDTH // 2
        left, right = acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        left = sum_of_tile(
            left, parts, part_bytes, bias_ptr, col, N, me, DTYPE, RANKS, BLOCK_M, HALF, HAS_BIAS, SKIPPED
        )
        right = sum_of_tile(
            right, parts, part_bytes, bias_ptr, col + HALF, N, me, DTYPE, RANKS, BLOCK_M, HALF, HAS_BIAS,
            SKIPPED + BLOCK_M * HALF,
        )
        return tl.join(left, right).permute(0, 2, 1).reshape(BLOCK_M, WIDTH)
    else:
        offs = tl.arange(0, BLOCK_M * WIDTH)
        own = to_fragment_layout(acc, BLOCK_M, WIDTH)
        total = reduce_in_rank_order(parts, part_bytes, offs, offs >= 0, own, me, RANKS, DTYPE, SKIPPED)
        total = from_fragment_layout(total, BLOCK_M, WIDTH)
        total = with_bias(total, bias_ptr, col + tl.arange(0, WIDTH), N, HAS_BIAS)
        return td.from_float32(total, DTYPE)
