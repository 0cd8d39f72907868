"""Kernel of gemm_rs with transport "direct": each partial tile is stored at its owner when it is computed.

The first ``num_gemm`` programs only multiply. They compute the tiles of all ranks in bundles, one bundle per tile of a
shard: the tile of rank + 1, of rank + 2, ..., and last of this rank. Each tile, rounded to the dtype of z, goes to a
slot in its owner's memory. So partials arrive at every rank during the whole kernel, from all peers at the same rate.
The other programs add the arrived partials of a tile in fp32 (``add_partials``). A few of them run from the start; the
rest start on the SMs that run out of tiles.

The programs that multiply never wait, so their loop can be flattened: while a program stores a tile, the loads of its
next tile are in flight. With TMA, a tile is sent from shared memory by the TMA engine while the program computes the
next tile. After that, the program waits until the tile has arrived and sets its signal.

Progress (invariant 1): only the programs that add wait, and only for programs that multiply, on any rank. These have
smaller ids.

Tiles are stored row by row, with the shape [BLOCK_M, BLOCK_N].
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.common.gemm_tile import as_aligned, swizzle
from tdkernels.ops.dense.direct import add_partials, announce_last, multiply_and_send
from tdkernels.ops.dense.segments import row_in_segments


@td.jit
def _place_of(tile, tiles_m, tiles_n, group_m, RANKS: tl.constexpr):
    """Return (row, column) of a tile of a shard."""
    # Work items compute a tile of all RANKS shards in turn, so a group of ``group_m`` tile rows spans all shards.
    return swizzle(tile, tiles_m, tiles_n, tl.maximum(group_m // RANKS, 1))


# Compiled once per tile, for all shapes and plans. This makes tuning cheap.
@td.jit(do_not_specialize=["M_shard", "N", "K", "stride_w", "plan", "group_m", "num_gemm", "whole", "segment_rows"])
def gemm_rs_direct_kernel(
    ctx, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, x_scale_ptr, w_scale_ptr, z_ptr,
    desc1, desc2, desc3, desc4, desc5, desc6, desc7, desc8,
    M_shard, N, K, stride_w, plan, group_m, num_gemm, whole, segment_rows,
    SLICE: tl.constexpr, SPLIT: tl.constexpr, RANKS: tl.constexpr, PRODUCT: tl.constexpr, trace_ptr=None,
):
    """Compute z [M_shard, N] = this rank's rows of the sum over ranks of x [W * M_shard, K] @ w.T.

    The rows of x are [M_shard / segment_rows, W, segment_rows]. No tile has rows of two segments.

    The data of a half is [ranks, tiles, BLOCK_M, BLOCK_N]. Signal number ``source * tiles + tile`` is set when the
    partial of ``source`` is stored there. ``desc1``, ``desc2``, ... are descriptors of the data of rank + 1, rank + 2,
    ..., [halves, rows, BLOCK_N]; number W is this rank's.

    The work items of the programs that add are the first ``whole`` tiles, then the other tiles in SPLIT parts each: at
    the end, when all SMs add, there are too few tiles for them.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    N = as_aligned(N, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    TILE: tl.constexpr = BLOCK_M * BLOCK_N
    DTYPE: tl.constexpr = z_ptr.dtype.element_ty
    BY_ENGINE: tl.constexpr = desc1 is not None
    descs = (desc1, desc2, desc3, desc4, desc5, desc6, desc7, desc8)
    me = td.rank(ctx)
    epoch, half, signal = td.call(ctx, plan)
    tiles_m = (M_shard + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles = tiles_m * tiles_n

    first = tl.program_id(0)
    if first < num_gemm:
        # A void launch has no work items: a peer may still read the data of an earlier launch.
        last = tl.where(td.is_void_for_all(signal), first, tiles * RANKS)
        # Not flattened in a trace: events of the next tile would be recorded before the end of this one. And not with
        # several leaves: each of them has a main loop.
        FLAT: tl.constexpr = trace_ptr is None and PRODUCT.leaves <= 1
        for piece in tl.range(first, last, num_gemm, flatten=FLAT):
            trace = (trace_ptr, piece)
            td.mark(trace, "starts")
            pid_m, pid_n = _place_of(piece // RANKS, tiles_m, tiles_n, group_m, RANKS)
            owner = (me + 1 + piece % RANKS) % RANKS
            multiply_and_send(
                ctx, x_ptr, x_desc, row_in_segments(pid_m * BLOCK_M, owner, RANKS, segment_rows), RANKS * M_shard,
                w_ptr, w_desc, pid_n * BLOCK_N, stride_w, N, K, x_scale_ptr, w_scale_ptr,
                piece, first, num_gemm, tiles, half, signal, me, descs, DTYPE, RANKS, BY_ENGINE, PRODUCT, trace,
            )
            td.mark(trace, "finishes")
            td.mark(trace, "ends")
        announce_last(ctx, first, last, num_gemm, tiles, half, signal, me, RANKS, BY_ENGINE)
    else:
        items = whole + (tiles - whole) * SPLIT
        item = td.await_work_item(td.take_first_ticket(ctx, signal))
        while item < items:
            answer = td.fetch_work_item(ctx)
            trace = (trace_ptr, tiles * RANKS + item)
            td.mark(trace, "starts")
            part = tl.maximum(item - whole, 0)
            tile = tl.minimum(item, whole) + part // SPLIT
            begin = tl.where(item < whole, 0, part % SPLIT * (TILE // SPLIT))
            end = tl.where(item < whole, TILE, begin + TILE // SPLIT)
            pid_m, pid_n = _place_of(tile, tiles_m, tiles_n, group_m, RANKS)
            td.mark(trace, "waits", ALL_PEERS)
            # producer: the program that computed the tile, on every rank
            td.wait_plan_all(ctx, td.signal_at(ctx, half, tile), tiles, signal, WITH_OWN=True)
            td.mark(trace, "sums", ALL_PEERS)
            add_partials(
                ctx, td.data_at(ctx, half, me) + tile.to(tl.int64) * (TILE * PRODUCT.out_bytes),
                tl.cast(tiles, tl.int64) * (TILE * PRODUCT.out_bytes), half, None, z_ptr, bias_ptr,
                pid_m * BLOCK_M, pid_n * BLOCK_N, begin, end, M_shard, N, SLICE, BLOCK_N, RANKS, PRODUCT.has_bias,
                PRODUCT.leaves > 0,
            )
            td.mark(trace, "finishes")
            item = td.await_work_item(answer)
            td.mark(trace, "ends")
    td.finish(ctx)
