"""The kernel behind GEMM-AR for many rows: partial tiles go to an owner, are summed there, and the sum goes to all.

Tiles are numbered along a path through z, ``item_tiles`` consecutive ones make an item, and item j is owned by rank
j mod W, so that sums become complete, and travel back, all the time and not only at the end. W consecutive items are a
round. The work goes through the rounds in numbered pieces; each round has, in this order, pieces that

    forward     an item that was computed ``lag`` items ago to its owner
    multiply    a tile each: the item of rank + 1, that of rank + 2 and so on, our own item of the round last
    reduce      a tile of our own item of ``reduce_after`` rounds ago: add all partials, send the sum to everybody
    receive     a tile of the peers' items of ``receive_after`` rounds ago: bring its sum from our buffer to z

Each waits for pieces of smaller numbers only, here and on every peer; after the last round a few more let the rest of
them come to their turn. Programs take the pieces by tickets (``lang.work_queue``) until none is left, so that what a
program has to look up and set up is looked up once and not for each tile.

Buffers keep tiles whole, so an item is one contiguous piece of memory: partials in register order
(``common.gemm_tile.to_fragment_layout``), sums [tiles, BLOCK_M, BLOCK_N].
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

    Partials are in register order, of which SLICE_N columns are one piece; the sums are in rows, as z is.
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
    """What is to be done, and to which tile: (forwards, multiplies, reduces, round, sequence, tile of the item).

    None of the three: it receives. ``sequence`` numbers the items in the order in which this rank computes them; there
    is nothing to do yet where the round is negative.
    """
    per_item = 1 + item_tiles
    in_round = piece % (ranks * (per_item + item_tiles))
    round_ = piece // (ranks * (per_item + item_tiles))
    multiplies = in_round < ranks * per_item
    forwards = multiplies & (in_round % per_item == 0)
    other = in_round - ranks * per_item  # which of those that reduce (the first item_tiles) or receive
    reduces = (multiplies == 0) & (other < item_tiles)
    place = tl.where(multiplies, in_round // per_item, tl.where(reduces, ranks - 1, other // item_tiles - 1))
    i = tl.where(multiplies, in_round % per_item - 1, other % item_tiles)
    sequence = round_ * ranks + place - tl.where(forwards, lag, 0)
    if multiplies == 0:
        sequence -= ranks * tl.where(reduces, reduce_after, receive_after)
    round_ = tl.where(sequence < 0, -1, sequence // ranks)
    return forwards, multiplies, reduces, round_, sequence, tl.where(forwards, 0, i)


# Compiled once for a tile, whatever the shape, plan and size of an item: that is what makes tuning cheap.
@td.jit(do_not_specialize=[
    "M", "N", "K", "stride_w", "lag", "reduce_after", "receive_after", "plan", "item_tiles", "group_m",
])
def gemm_ar_kernel(
    ctx, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, z_ptr, stage_ptr,
    M, N, K, stride_w, lag, reduce_after, receive_after, plan, item_tiles, group_m,
    COPY_WORDS: tl.constexpr, SLICE_N: tl.constexpr, RANKS: tl.constexpr, PRODUCT: tl.constexpr, trace_ptr=None,
):
    """z = the sum over ranks of x @ w.T, on every rank; x is [M, K], z is [M, N].

    Of a half's signals, number ``source * rounds + round`` says that the source's partials of our item of that round
    are here, number ``ranks * rounds + tile`` that the sum of a tile is. Of its data, the partials of our own items
    come first, [ranks, rounds * item_tiles] tiles, then the sums of all tiles.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    N = as_aligned(N, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    TILE_BYTES: tl.constexpr = BLOCK_M * BLOCK_N * PRODUCT.elem_bytes
    me = td.rank(ctx)
    ranks = RANKS
    epoch, half, signal = td.call(ctx, plan)
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles = tiles_m * tiles_n
    items = (tiles + item_tiles - 1) // item_tiles
    rounds = (items + ranks - 1) // ranks
    part_bytes = tl.cast(rounds, tl.int64) * item_tiles * TILE_BYTES  # of one source
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
        slot = (tl.cast(round_, tl.int64) * item_tiles + i) * TILE_BYTES  # among the partials of the owner's items

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
                    ctx, x_ptr, x_desc, w_ptr, w_desc, dst, staged, pid_m, pid_n, M, N, K, stride_w, epoch,
                    PRODUCT, trace,
                )
            elif reduces:
                td.mark(trace, "waits", me)
                td.wait(ctx, td.flag_at(ctx, staged), epoch, me, SCOPE="gpu")  # producer: our own multiply_tile
                td.mark(trace, "waits", ALL_PEERS, 0)
                # producer: every peer's _forward_item
                td.wait_plan_all(ctx, td.signal_at(ctx, half, round_), rounds, signal)
                td.mark(trace, "sums", ALL_PEERS)
                tile_sums = sums_offset + tl.cast(tile, tl.int64) * TILE_BYTES
                _reduce_tile(
                    ctx, own_parts, part_bytes, tile_sums, half, bias_ptr, z_ptr, row, col, M, N,
                    RANKS, BLOCK_M, BLOCK_N, SLICE_N, PRODUCT.has_bias,
                )
                answer = td.fetch_work_item(ctx)
                # waiter: every peer's program that receives the tile
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
