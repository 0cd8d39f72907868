"""Kernel of gemm_rs: partial tiles are staged, copied to their owners in groups, and summed there.

A tile group (``item``) is ``item_tiles`` consecutive tiles. The work list consists of periods of ``1 + item_tiles``
work items (``piece``). The first item of a period copies out one tile group that was computed ``lag`` periods before;
each of the others computes a tile. The tiles of rank + 1 come first, then the tiles of rank + 2, and so on. This rank's
own tiles come last and add the peers' partials in their epilogue. Items that copy are short and spread over the list,
so that no SM is reserved for communication.

Progress (invariant 1). ``lag`` is at most the number of periods of a shard. So an item waits only for items with
smaller numbers, on this rank and on every peer.

Programs are persistent and fetch items from the work queue (``lang.work_queue``), so that each program does its setup
once and not per tile.

Buffers store whole tiles in the order in which they are computed, each in fragment layout (``to_fragment_layout``). So
a tile group is contiguous for every shape, and sender and receiver use the same order.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.common.gemm_tile import as_aligned, gemm_tile, scale_of_row, store_rows, swizzle
from tdkernels.ops.common.rank_reduce import sum_of_tile
from tdkernels.ops.common.staging import copy_out_staged, stage_tile
from tdkernels.ops.dense.segments import row_in_segments


# Compiled once per tile, for all shapes, plans and group sizes. This makes tuning cheap.
@td.jit(do_not_specialize=["M_shard", "N", "K", "stride_w", "lag", "plan", "item_tiles", "group_m", "segment_rows"])
def gemm_rs_kernel(
    ctx, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, x_scale_ptr, w_scale_ptr, z_ptr, stage_ptr,
    M_shard, N, K, stride_w, lag, plan, item_tiles, group_m, segment_rows,
    COPY_WORDS: tl.constexpr, RANKS: tl.constexpr, PRODUCT: tl.constexpr, trace_ptr=None,
):
    """Compute z [M_shard, N] = this rank's rows of the sum over ranks of x [W * M_shard, K] @ w.T.

    The rows of x are [M_shard / segment_rows, W, segment_rows]. No tile has rows of two segments.

    Signal number ``source * items + item`` of a half is set when the partials of ``source`` for a tile group of this
    rank are in its memory, [W, items * item_tiles] tiles.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    N = as_aligned(N, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    TILE: tl.constexpr = BLOCK_M * BLOCK_N
    TILE_BYTES: tl.constexpr = TILE * PRODUCT.out_bytes
    me = td.rank(ctx)
    ranks = RANKS
    epoch, half, signal = td.call(ctx, plan)
    tiles_m = (M_shard + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles = tiles_m * tiles_n
    items = (tiles + item_tiles - 1) // item_tiles
    pieces = ranks * items * (1 + item_tiles)

    piece = td.await_work_item(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        trace = (trace_ptr, piece)
        td.mark(trace, "starts")
        period = piece // (1 + item_tiles)
        place = piece % (1 + item_tiles)
        if place == 0:
            item = period - lag
            if (item >= 0) & (item < items * (ranks - 1)):
                owner = (me + 1 + item // items) % ranks
                first = item % items * item_tiles  # first tile of the group
                staged = item.to(tl.int64) * item_tiles
                slot = (me * items).to(tl.int64) * item_tiles + first
                answer = copy_out_staged(
                    ctx, stage_ptr.to(tl.int64) + staged * TILE_BYTES, td.data_at(ctx, half, owner) + slot * TILE_BYTES,
                    staged, tl.minimum(item_tiles, tiles - first), owner,
                    td.signal_at(ctx, half, me * items + item % items), signal, epoch, TILE_BYTES, COPY_WORDS, trace,
                )
            else:
                answer = td.fetch_work_item(ctx)
        else:
            tile = period % items * item_tiles + place - 1
            if tile < tiles:
                pid_m, pid_n = swizzle(tile, tiles_m, tiles_n, group_m)
                row = pid_m * BLOCK_M
                col = pid_n * BLOCK_N
                owner = (me + 1 + period // items) % ranks
                td.mark(trace, "multiplies", owner)
                x_row = row_in_segments(row, owner, ranks, segment_rows)
                acc = gemm_tile(
                    tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32), x_ptr, x_desc, 0, x_row, ranks * M_shard,
                    w_ptr, w_desc, col, stride_w, N, K, K, PRODUCT,
                    scale_of_row(x_scale_ptr, x_row, K, PRODUCT), ranks * M_shard - x_row, w_scale_ptr,
                )
                answer = td.fetch_work_item(ctx)
                if owner != me:
                    td.mark(trace, "stores")
                    staged = period.to(tl.int64) * item_tiles + place - 1
                    stage_tile(ctx, stage_ptr + staged * TILE, staged, acc, epoch, BLOCK_M, BLOCK_N)
                else:
                    td.mark(trace, "waits", ALL_PEERS)
                    # producer: copy_out_staged of every peer
                    td.wait_plan_all(ctx, td.signal_at(ctx, half, tile // item_tiles), items, signal)
                    td.mark(trace, "sums")
                    z = sum_of_tile(
                        acc, td.data_at(ctx, half, me) + tile.to(tl.int64) * TILE_BYTES,
                        tl.cast(items, tl.int64) * item_tiles * TILE_BYTES, bias_ptr, col, N, me,
                        z_ptr.dtype.element_ty, RANKS, BLOCK_M, BLOCK_N, PRODUCT.has_bias,
                    )
                    store_rows(z_ptr, z, row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N), M_shard, N)
            else:
                answer = td.fetch_work_item(ctx)
        td.mark(trace, "finishes")
        piece = td.await_work_item(answer)
        td.mark(trace, "ends")
    td.finish(ctx)
