"""Epilogue of a tile of ag_gemm: store it where its rows belong in y."""

import triton.language as tl

from tdkernels import lang as td


@td.jit
def store_tile(
    y_ptr, y_desc, tile, source, row, col, M_shard, N, segment_rows, ranks,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):
    """Store a tile of the shard of rank ``source`` in y [M_shard / segment_rows, W, segment_rows, N].

    Args:
        y_ptr: pointer to y.
        y_desc: descriptor of y as [W * M_shard / segment_rows, segment_rows, N], so that stores past a shard are
            dropped; None: store by the pointer. A tile must not have rows of two segments.
        tile: [BLOCK_M, WIDTH] in the dtype of y.
        source: the rank.
        row: first row of the tile within the shard.
        col: first column.
        M_shard: rows of a shard.
        N: columns of y.
        segment_rows: consecutive rows of a shard that are consecutive in y.
        ranks: W.
        BLOCK_M: rows of the tile.
        WIDTH: columns of the tile.
        PARTS: number of column blocks that are stored one after another. They share their shared memory.
    """
    if PARTS > 1:
        HALF: tl.constexpr = WIDTH // 2
        left, right = tile.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        SHARE: tl.constexpr = PARTS // 2
        store_tile(y_ptr, y_desc, left, source, row, col, M_shard, N, segment_rows, ranks, BLOCK_M, HALF, SHARE)
        col += HALF
        store_tile(y_ptr, y_desc, right, source, row, col, M_shard, N, segment_rows, ranks, BLOCK_M, HALF, SHARE)
    elif y_desc is not None:
        plane = row // segment_rows * ranks + source
        y_desc.store([plane, row % segment_rows, col], tile.reshape(1, BLOCK_M, WIDTH))
    else:
        rows = row + tl.arange(0, BLOCK_M)
        offs_n = col + tl.arange(0, WIDTH)
        places = (rows // segment_rows * ranks + source).to(tl.int64) * segment_rows + rows % segment_rows
        mask = (rows < M_shard)[:, None] & (offs_n < N)[None, :]
        tl.store(y_ptr + places[:, None] * N + offs_n[None, :], tile, mask=mask)
