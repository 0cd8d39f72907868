"""Deterministic reduction over the ranks of a node, then over the nodes, in fp32 and in rank order."""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.gemm_tile import from_fragment_layout, to_fragment_layout, with_bias
from tdkernels.ops.common.rank_reduce import _COLUMNS, reduce_in_rank_order


@td.jit
def sum_of_tile_over_nodes(
    acc, parts, sums, part_bytes, bias_ptr, col, N, node, local, DTYPE: tl.constexpr,
    NODES: tl.constexpr, LOCAL: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    SKIPPED: tl.constexpr = 0,
):
    """Return ``acc`` plus the node peers' partials of the tile, plus the other nodes' sums, plus the bias, as DTYPE.

    The partial of rank s of this node is at ``parts + s * part_bytes``, the sum of node m at ``sums + m * part_bytes``,
    both in fragment layout. This rank's partial and this node's sum are not rounded. SKIPPED: see ``sum_of_tile``.
    """
    if WIDTH > _COLUMNS:
        # Half of the columns at a time, as in ``sum_of_tile``.
        HALF: tl.constexpr = WIDTH // 2
        left, right = acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        left = sum_of_tile_over_nodes(
            left, parts, sums, part_bytes, bias_ptr, col, N, node, local, DTYPE,
            NODES, LOCAL, BLOCK_M, HALF, HAS_BIAS, SKIPPED,
        )
        right = sum_of_tile_over_nodes(
            right, parts, sums, part_bytes, bias_ptr, col + HALF, N, node, local, DTYPE,
            NODES, LOCAL, BLOCK_M, HALF, HAS_BIAS, SKIPPED + BLOCK_M * HALF,
        )
        return tl.join(left, right).permute(0, 2, 1).reshape(BLOCK_M, WIDTH)
    else:
        offs = tl.arange(0, BLOCK_M * WIDTH)
        total = to_fragment_layout(acc, BLOCK_M, WIDTH)
        if LOCAL > 1:
            total = reduce_in_rank_order(parts, part_bytes, offs, offs >= 0, total, local, LOCAL, DTYPE, SKIPPED)
        total = reduce_in_rank_order(sums, part_bytes, offs, offs >= 0, total, node, NODES, DTYPE, SKIPPED)
        total = from_fragment_layout(total, BLOCK_M, WIDTH)
        total = with_bias(total, bias_ptr, col + tl.arange(0, WIDTH), N, HAS_BIAS)
        return td.from_float32(total, DTYPE)
