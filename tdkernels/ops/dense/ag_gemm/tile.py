"""Epilogue of a tile of ag_gemm, for groups on one node and on several nodes."""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.gemm_tile import store_rows


@td.jit
def store_tile(
    y_ptr, y_desc, tile, source, row, col, M_shard, N,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):
    """Store a tile of the shard of rank ``source`` in y [W * M_shard, N].

    Args:
        y_ptr: pointer to y.
        y_desc: descriptor of y as [W, M_shard, N], so that stores past a shard are dropped; None: store by the pointer.
        tile: [BLOCK_M, WIDTH] in the dtype of y.
        source: the rank.
        row: first row of the tile within the shard.
        col: first column.
        M_shard: rows of a shard.
        N: columns of y.
        BLOCK_M: rows of the tile.
        WIDTH: columns of the tile.
        PARTS: number of column blocks that are stored one after another. They share their shared memory.
    """
    if PARTS > 1:
        HALF: tl.constexpr = WIDTH // 2
        left, right = tile.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        store_tile(y_ptr, y_desc, left, source, row, col, M_shard, N, BLOCK_M, HALF, PARTS // 2)
        store_tile(y_ptr, y_desc, right, source, row, col + HALF, M_shard, N, BLOCK_M, HALF, PARTS // 2)
    elif y_desc is not None:
        y_desc.store([source, row, col], tile.reshape(1, BLOCK_M, WIDTH))
    else:
        y_rows = y_ptr + source.to(tl.int64) * M_shard * N
        store_rows(y_rows, tile, row + tl.arange(0, BLOCK_M), col + tl.arange(0, WIDTH), M_shard, N)
