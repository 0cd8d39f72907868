"""Two-shot kernel of gemm_ar: partial tiles are sent to an owner and summed there, and the sum is sent to all ranks.

Tiles are numbered in the order of ``swizzle``. A tile group is ``item_tiles`` consecutive tiles. Rank j mod W owns
group j, so that sums are completed and sent throughout the call, not only at its end. W consecutive groups form a
round. The work list consists of rounds. Each round has work items (``piece``) with these roles, in this order:

    forward     copy out a tile group that was computed ``lag`` groups ago to its owner
    multiply    compute a tile: the group of rank + 1, then of rank + 2, and so on, and this rank's group last
    reduce      a tile of this rank's group of ``reduce_after`` rounds ago: add all partials, send the sum to all peers
    receive     a tile of the peers' groups of ``receive_after`` rounds ago: copy its sum from the buffer to z

Forward and multiply items alternate: each group has one forward item, followed by its multiply items.

Progress (invariant 1). An item waits only for items with smaller numbers, on this rank and on every peer. After the
last round there are more rounds in which only the delayed roles have work.

Programs are persistent and fetch items from the work queue (``lang.work_queue``), so that each program does its setup
once and not per tile.

Buffers store whole tiles, so that a tile group is contiguous: partials in fragment layout
(``common.gemm_tile.to_fragment_layout``), sums as [tiles, BLOCK_M, BLOCK_N].
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.common.gemm_tile import as_aligned, from_fragment_layout, store_rows, swizzle, with_bias
from tdkernels.ops.common.rank_reduce import reduce_in_rank_order
from tdkernels.ops.common.staging import copy_out_staged
from tdkernels.ops.dense.gemm_ar.tile import multiply_tile, receive_tile


@td.jit
def _reduce_tile(
    ctx, parts, part_bytes, sums_offset, half, bias_ptr, z_ptr, row, col, M, N,
    RANKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICE_N: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    """Add all ranks' partials of a tile in fp32, in rank order; store the sum in z and in every peer's buffer.

    Partials are in fragment layout, in which SLICE_N columns are contiguous. Sums are row-major, like z.
    """
    DTYPE: tl.constexpr = z_ptr.dtype.element_ty
    me = td.rank(ctx)
    rows = tl.arange(0, BLOCK_M)
    for first in range(0, BLOCK_N, SLICE_N):
        offs = first * BLOCK_M + tl.arange(0, BLOCK_M * SLICE_N)
        own = td.to_float32(tl.load(td.pointer_to(parts + me * part_bytes, DTYPE) + offs))
        total = reduce_in_rank_order(parts, part_bytes, offs, offs >= 0, own, me, RANKS, DTYPE)
        total = from_fragment_layout(total, BLOCK_M, SLICE_N)
        cols = first + tl.arange(0, SLICE_N)
        total = with_bias(total, bias_ptr, col + cols, N, HAS_BIAS)
        z = td.from_float32(total, DTYPE)
        for step in tl.static_range(1, RANKS):
            peer_sums = td.data_at(ctx, half, (me + step) % RANKS) + sums_offset
            tl.store(td.pointer_to(peer_sums, DTYPE) + rows[:, None] * BLOCK_N + cols[None, :], z)
        store_rows(z_ptr, z, row + rows, col + cols, M, N)


@td.jit
def _role(piece, ranks, item_tiles, lag, reduce_after, receive_after):
    """Return the role and tile of a work item: (forwards, multiplies, reduces, round, sequence, tile in the group).

    If none of the three roles is set, the item receives. ``sequence`` is the index of the tile group in the order in
    which this rank computes the groups. A negative round means that there is nothing to do yet.
    """
    per_item = 1 + item_tiles
    in_round = piece % (ranks * (per_item + item_tiles))
    round_ = piece // (ranks * (per_item + item_tiles))
    multiplies = in_round < ranks * per_item
    forwards = multiplies & (in_round % per_item == 0)
    other = in_round - ranks * per_item  # index among the items that reduce (the first item_tiles) or receive
    reduces = (multiplies == 0) & (other < item_tiles)
    place = tl.where(multiplies, in_round // per_item, tl.where(reduces, ranks - 1, other // item_tiles - 1))
    i = tl.where(multiplies, in_round % per_item - 1, other % item_tiles)
    sequence = round_ * ranks + place - tl.where(forwards, lag, 0)
    if multiplies == 0:
        sequence -= ranks * tl.where(reduces, reduce_after, receive_after)
    round_ = tl.where(sequence < 0, -1, sequence // ranks)
    return forwards, multiplies, reduces, round_, sequence, tl.where(forwards, 0, i)


# Compiled once per tile, for all shapes, plans and group sizes. This makes tuning cheap.
@td.jit(do_not_specialize=[
    "M", "N", "K", "stride_w", "lag", "reduce_after", "receive_after", "plan", "item_tiles", "group_m",
])
def gemm_ar_kernel(
    ctx, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, x_scale_ptr, w_scale_ptr, z_ptr, stage_ptr,
    M, N, K, stride_w, lag, reduce_after, receive_after, plan, item_tiles, group_m,
    COPY_WORDS: tl.constexpr, SLICE_N: tl.constexpr, RANKS: tl.constexpr, PRODUCT: tl.constexpr, trace_ptr=None,
):
    """Compute z [M, N] = sum over ranks of x [M, K] @ w.T, on every rank.

    The data of a half is the partials of this rank's groups, [ranks, rounds * item_tiles] tiles, then the sums of all
    tiles. Signal number ``source * rounds + round`` is set when the partials of ``source`` for this rank's group of
    that round have arrived, signal number ``ranks * rounds + tile`` when the sum of a tile has arrived.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    N = as_aligned(N, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    TILE_BYTES: tl.constexpr = BLOCK_M * BLOCK_N * PRODUCT.out_bytes
    me = td.rank(ctx)
    ranks = RANKS
    epoch, half, signal = td.call(ctx, plan)
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles = tiles_m * tiles_n
    items = (tiles + item_tiles - 1) // item_tiles
    rounds = (items + ranks - 1) // ranks
    part_bytes = tl.cast(rounds, tl.int64) * item_tiles * TILE_BYTES  # bytes of the partials of one source
    sums_offset = ranks * part_bytes
    pieces = (rounds + receive_after) * ranks * (1 + 2 * item_tiles)

    piece = td.await_work_item(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        trace = (trace_ptr, piece)
        td.mark(trace, "starts")
        forwards, multiplies, reduces, round_, sequence, i = _role(
            piece, ranks, item_tiles, lag, reduce_after, receive_after
        )
        owner = (me + 1 + sequence % ranks + ranks) % ranks
        tile = (round_ * ranks + owner) * item_tiles + i
        staged = sequence.to(tl.int64) * item_tiles + i
        stage = stage_ptr.to(tl.int64) + staged * TILE_BYTES
        slot = (tl.cast(round_, tl.int64) * item_tiles + i) * TILE_BYTES  # offset in the partials of the owner's groups

        if (round_ >= 0) & (tile < tiles):
            pid_m, pid_n = swizzle(tile, tiles_m, tiles_n, group_m)
            row = pid_m * BLOCK_M
            col = pid_n * BLOCK_N
            own_parts = td.data_at(ctx, half, me) + slot
            if forwards:
                if owner != me:
                    dst = td.data_at(ctx, half, owner) + me * part_bytes + slot
                    answer = copy_out_staged(
                        ctx, stage, dst, staged, tl.minimum(item_tiles, tiles - tile), owner,
                        td.signal_at(ctx, half, me * rounds + round_), signal, epoch, TILE_BYTES, COPY_WORDS,
                        trace,
                    )
                else:
                    answer = td.fetch_work_item(ctx)
            elif multiplies:
                dst = tl.where(owner == me, own_parts + me * part_bytes, stage)
                answer = multiply_tile(
                    ctx, x_ptr, x_desc, w_ptr, w_desc, td.pointer_to(dst, z_ptr.dtype.element_ty), staged,
                    pid_m, pid_n, M, N, K, stride_w, epoch, PRODUCT, trace, x_scale_ptr, w_scale_ptr,
                )
            elif reduces:
                td.mark(trace, "waits", me)
                td.wait(ctx, td.flag_at(ctx, staged), epoch, me, SCOPE="gpu")  # producer: multiply_tile of this rank
                td.mark(trace, "waits", ALL_PEERS, 0)
                # producer: copy_out_staged of every peer
                td.wait_plan_all(ctx, td.signal_at(ctx, half, round_), rounds, signal)
                td.mark(trace, "sums", ALL_PEERS)
                tile_sums = sums_offset + tl.cast(tile, tl.int64) * TILE_BYTES
                _reduce_tile(
                    ctx, own_parts, part_bytes, tile_sums, half, bias_ptr, z_ptr, row, col, M, N,
                    RANKS, BLOCK_M, BLOCK_N, SLICE_N, PRODUCT.has_bias,
                )
                answer = td.fetch_work_item(ctx)
                # waiter: the program of every peer that receives the tile
                td.notify_all(ctx, td.signal_at(ctx, half, ranks * rounds + tile), signal, CHECK_FAILED=True)
            else:
                td.mark(trace, "waits", owner)
                # producer: the owner's program that reduces the tile
                seen = td.wait_plan(ctx, td.signal_at(ctx, half, ranks * rounds + tile), signal, owner)
                answer = td.fetch_work_item(ctx)
                td.mark(trace, "receives", owner)
                src = td.data_at(ctx, half, me) + sums_offset + tl.cast(tile, tl.int64) * TILE_BYTES
                receive_tile(td.consume_token(src, seen), z_ptr, row, col, M, N, BLOCK_M, BLOCK_N)
        else:
            answer = td.fetch_work_item(ctx)
        td.mark(trace, "finishes")
        piece = td.await_work_item(answer)
        td.mark(trace, "ends")
    td.finish(ctx)
