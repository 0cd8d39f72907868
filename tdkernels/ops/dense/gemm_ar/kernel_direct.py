"""Two-shot kernel of gemm_ar with transport "direct": tiles are stored at their owner, added there, and sent to all.

W consecutive tiles of z, in the order of ``swizzle``, form a bundle; rank j owns tile number j of each bundle. The
first ``num_gemm`` programs only multiply (``ops.dense.direct``). The other programs fetch work items from a queue, some
from the start, the rest on the SMs that run out of tiles:

    add         a part of this rank's tile of a bundle: add the partials of all ranks in fp32 and in rank order, store
                the sum in z and in every peer's buffer. The program that completes the tile sets its signal there.
    receive     the tile of a peer: copy its sum from the buffer to z

All items that add come first. Few programs fetch items before the GEMM is done, and one that waits for a sum does not
add.

Progress (invariant 1). The programs that multiply never wait. Items that add wait only for these programs, which have
smaller ids. Items that receive wait for items that add, on a peer, which have smaller numbers.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.common.gemm_tile import as_aligned, swizzle
from tdkernels.ops.dense.direct import add_partials, announce_last, multiply_and_send
from tdkernels.ops.dense.gemm_ar.tile import receive_tile


@td.jit
def _exchange(
    ctx, z_ptr, bias_ptr, item, adds, bundle, bundles, owner, row, col, M, N, half, signal, me,
    SLICE: tl.constexpr, SPLIT: tl.constexpr, RANKS: tl.constexpr, PRODUCT: tl.constexpr, trace,
):
    """Process a work item of the tile of ``owner`` in a bundle, at (row, col) of z: add a part of it, or receive it."""
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    TILE: tl.constexpr = BLOCK_M * BLOCK_N
    TILE_BYTES: tl.constexpr = TILE * PRODUCT.out_bytes
    per_source = 2 * bundles
    data = td.data_at(ctx, half, me)
    sums = owner * per_source + bundles + bundle
    sums_offset = sums.to(tl.int64) * TILE_BYTES
    if adds:
        td.mark(trace, "waits", ALL_PEERS)
        # producer: the program that computed the tile, on every rank
        td.wait_plan_all(ctx, td.signal_at(ctx, half, bundle), per_source, signal, WITH_OWN=True)
        td.mark(trace, "sums", ALL_PEERS)
        begin = item % SPLIT * (TILE // SPLIT)
        add_partials(
            ctx, data + bundle.to(tl.int64) * TILE_BYTES, tl.cast(per_source, tl.int64) * TILE_BYTES,
            half, sums_offset, z_ptr, bias_ptr, row, col, begin, begin + TILE // SPLIT, M, N,
            SLICE, BLOCK_N, RANKS, PRODUCT.has_bias, PRODUCT.leaves > 0,
        )
        if td.is_last_arriver(td.flag_at(ctx, bundle), SPLIT):
            # waiter: the item of every peer that receives the tile
            td.notify_all(ctx, td.signal_at(ctx, half, sums), signal, CHECK_FAILED=True)
    else:
        td.mark(trace, "waits", owner)
        # producer: the owner's items that add the tile
        seen = td.wait_plan(ctx, td.signal_at(ctx, half, sums), signal, owner)
        td.mark(trace, "receives", owner)
        receive_tile(td.consume_token(data + sums_offset, seen), z_ptr, row, col, M, N, BLOCK_M, BLOCK_N)


# Compiled once per tile and number of ranks, for all shapes and plans. This makes tuning cheap.
@td.jit(do_not_specialize=["M", "N", "K", "stride_w", "plan", "group_m", "num_gemm"])
def gemm_ar_direct_kernel(
    ctx, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, x_scale_ptr, w_scale_ptr, z_ptr,
    desc1, desc2, desc3, desc4, desc5, desc6, desc7, desc8,
    M, N, K, stride_w, plan, group_m, num_gemm,
    SLICE: tl.constexpr, SPLIT: tl.constexpr, RANKS: tl.constexpr, PRODUCT: tl.constexpr, trace_ptr=None,
):
    """Compute z [M, N] = sum over ranks of x [M, K] @ w.T, on every rank.

    The data of a half is [ranks, 2, bundles] tiles: of each rank, its partials for this rank's tiles, then the sums of
    its own tiles. A signal belongs to each of them, in the same order. ``desc1``, ``desc2``, ... are descriptors of the
    data of rank + 1, rank + 2, ..., [halves, rows, BLOCK_N]; number W is this rank's.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    N = as_aligned(N, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    DTYPE: tl.constexpr = z_ptr.dtype.element_ty
    BY_ENGINE: tl.constexpr = desc1 is not None
    descs = (desc1, desc2, desc3, desc4, desc5, desc6, desc7, desc8)
    me = td.rank(ctx)
    epoch, half, signal = td.call(ctx, plan)
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles = tiles_m * tiles_n
    bundles = (tiles + RANKS - 1) // RANKS
    per_source = 2 * bundles

    first = tl.program_id(0)
    if first < num_gemm:
        # A void launch has no work items: a peer may still read the data of an earlier launch.
        last = tl.where(td.is_void_for_all(signal), first, bundles * RANKS)
        # Not flattened in a trace: events of the next tile would be recorded before the end of this one. And not with
        # several leaves: each of them has a main loop.
        FLAT: tl.constexpr = trace_ptr is None and PRODUCT.leaves <= 1
        for piece in tl.range(first, last, num_gemm, flatten=FLAT):
            trace = (trace_ptr, piece)
            td.mark(trace, "starts")
            owner = (me + 1 + piece % RANKS) % RANKS
            # Ranks without a tile in the last bundle get the last tile, which they do not use.
            tile = tl.minimum(piece // RANKS * RANKS + owner, tiles - 1)
            pid_m, pid_n = swizzle(tile, tiles_m, tiles_n, group_m)
            multiply_and_send(
                ctx, x_ptr, x_desc, pid_m * BLOCK_M, M, w_ptr, w_desc, pid_n * BLOCK_N, stride_w, N, K,
                x_scale_ptr, w_scale_ptr,
                piece, first, num_gemm, per_source, half, signal, me, descs, DTYPE, RANKS, BY_ENGINE, PRODUCT, trace,
            )
            td.mark(trace, "finishes")
            td.mark(trace, "ends")
        announce_last(ctx, first, last, num_gemm, per_source, half, signal, me, RANKS, BY_ENGINE)
    else:
        items = bundles * (SPLIT + RANKS - 1)
        item = td.await_work_item(td.take_first_ticket(ctx, signal))
        while item < items:
            trace = (trace_ptr, bundles * RANKS + item)
            td.mark(trace, "starts")
            received = item - bundles * SPLIT
            adds = received < 0
            bundle = tl.where(adds, item // SPLIT, received // (RANKS - 1))
            owner = tl.where(adds, me, (me + 1 + received % (RANKS - 1)) % RANKS)
            tile = bundle * RANKS + owner
            pid_m, pid_n = swizzle(tile, tiles_m, tiles_n, group_m)
            answer = td.fetch_work_item(ctx)
            if tile < tiles:
                _exchange(
                    ctx, z_ptr, bias_ptr, item, adds, bundle, bundles, owner, pid_m * BLOCK_M, pid_n * BLOCK_N, M, N,
                    half, signal, me, SLICE, SPLIT, RANKS, PRODUCT, trace,
                )
            td.mark(trace, "finishes")
            item = td.await_work_item(answer)
            td.mark(trace, "ends")
    td.finish(ctx)
