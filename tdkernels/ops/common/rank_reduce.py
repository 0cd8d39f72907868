"""Deterministic reduction of all ranks' partials, in fp32: in rank order, or by the tree of ``autotune.invariance``."""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.gemm_tile import from_fragment_layout, to_fragment_layout, with_bias

# Number of columns of an accumulator that are summed at a time: one group of ``to_fragment_layout``.
_COLUMNS = tl.constexpr(32)


@td.jit
def reduce_in_rank_order(
    parts, part_bytes, offs, mask, own, me, RANKS: tl.constexpr, DTYPE: tl.constexpr, SKIPPED: tl.constexpr = 0
):
    """Return the sum of all ranks' partials in fp32, in rank order.

    ``own`` is this rank's partial in fp32. The partial of rank r is at ``parts + r * part_bytes``.

    SKIPPED: number of elements of each partial before the summed ones. They are not added to ``parts``, because Triton
    3.8 turns an address plus a constant into a pointer plus a constant and loses the alignment of the pointer.

    Four partials are loaded at a time, because a load takes far longer than the addition. RANKS is a constant, so that
    there is no loop and the loads for the next sum can start before this sum is done.
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
def reduce_partials(
    parts, part_bytes, offs, mask, own, me, RANKS: tl.constexpr, DTYPE: tl.constexpr, TREE: tl.constexpr
):
    """Return the sum of all ranks' partials in fp32: by ``reduce_in_tree`` if TREE, otherwise in rank order."""
    if TREE:
        return reduce_in_tree(parts, part_bytes, offs, mask, own, me, 0, RANKS, DTYPE)
    else:
        return reduce_in_rank_order(parts, part_bytes, offs, mask, own, me, RANKS, DTYPE)


@td.jit
def reduce_in_tree(
    parts, part_bytes, offs, mask, own, me, FIRST: tl.constexpr, COUNT: tl.constexpr, DTYPE: tl.constexpr
):
    """Return the sum of the partials of COUNT ranks from rank FIRST on, in fp32, as the root of a binary tree.

    All nodes except the root are rounded to DTYPE, the dtype of the partials. COUNT is a power of two. The other
    arguments are those of ``reduce_in_rank_order``.
    """
    if COUNT > 1:
        HALF: tl.constexpr = COUNT // 2
        left = reduce_in_tree(parts, part_bytes, offs, mask, own, me, FIRST, HALF, DTYPE)
        right = reduce_in_tree(parts, part_bytes, offs, mask, own, me, FIRST + HALF, HALF, DTYPE)
        if HALF > 1:
            left, right = td.to_float32(td.from_float32(left, DTYPE)), td.to_float32(td.from_float32(right, DTYPE))
        return left + right
    else:
        pointer = td.pointer_to(parts + FIRST * part_bytes, DTYPE)
        part = tl.load(pointer + offs, mask=mask & (me != FIRST), other=0.0)
        return tl.where(me == FIRST, own, td.to_float32(part))


@td.jit
def _partial_of(
    source: tl.constexpr, parts, part_bytes, offs, mask, own, me, RANKS: tl.constexpr, DTYPE: tl.constexpr,
    SKIPPED: tl.constexpr,
):
    """Return the partial of a rank in fp32, or zeros if ``source`` is not a rank."""
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
    """Return ``acc`` plus the peers' partials of the same tile in rank order, plus the bias, as DTYPE.

    ``acc`` has WIDTH columns of the tile. SKIPPED: number of elements of a partial before these columns.
    """
    if WIDTH > _COLUMNS:
        # Half of the columns at a time: sum, peers' partials and accumulator together do not fit in the registers.
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
