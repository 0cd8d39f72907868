"""Kernel of ulysses_qkv: tiles of other ranks' heads are computed first, and received by these ranks.

Order. For each group of tile rows, a rank computes the tiles of rank + 1, then of rank + 2 and so on. Its own tiles
come last and are stored directly in y. After the first ``lag`` items, every second work item does not compute a tile
but receives one. Tiles are received in the order in which the ranks below compute them for this rank. Therefore an item
waits only for items with smaller numbers, and transfers overlap with computation.

Transport. With "pull" a tile stays in symmetric memory of the rank that computed it, until the owner of its heads loads
it over the link into y. With "push" the tile is stored in symmetric memory of the owner, which copies it into y. A tile
is stored whole, [BLOCK_M, BLOCK_N], so that it is aligned for any shape. Signal number ``source * tiles + tile`` of a
half means that the source has computed a tile for this rank. The waiter is the item that receives the tile.

Every rank receives tiles of every other rank, so no rank can finish call t + 1 before all ranks have begun it.
Therefore two halves suffice, even if a peer reads this rank's memory.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.gemm_tile import as_aligned, gemm_tile, swizzle


@td.jit
def tile_in_turn(tile, tiles_m, tiles_n, ranks, group_m):
    """Return (distance to the owner of the heads, from 1; tile row; tile column) for a tile of another rank's heads."""
    pid_m, column = swizzle(tile, tiles_m, tiles_n * (ranks - 1), group_m)
    return column // tiles_n + 1, pid_m, column % tiles_n


@td.jit
def store_positions(y_ptr, tile, rows, cols, source, M, positions, ranks, width):
    """Store rows of the source's positions in y, which has all ranks' positions. Elements out of bounds are masked.

    Row ``r`` of the source is position ``source * positions + r % positions`` of sequence ``r // positions``.
    """
    sequence = (rows // positions).to(tl.int64)
    at = rows + (sequence * (ranks - 1) + source) * positions
    mask = (rows < M)[:, None] & (cols < width)[None, :]
    tl.store(y_ptr + at[:, None] * width + cols[None, :], tile, mask=mask)


# Compiled once per tile, for all shapes, plans and transports, which makes tuning cheap.
@td.jit(do_not_specialize=["M", "K", "positions", "width", "stride_w", "lag", "plan", "pushes", "group_m"])
def ulysses_qkv_kernel(
    ctx, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, y_ptr,
    M, K, positions, width, stride_w, lag, plan, pushes, group_m, PRODUCT: tl.constexpr, trace_ptr=None,
):
    """Compute y [W * M, width], this rank's heads of all ranks' x @ w.T.

    x is [M, K], w is [W * width, K], and a sequence has ``positions`` positions per rank. ``pushes`` is 1 for "push"
    and 0 for "pull".
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    width = as_aligned(width, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    TILE: tl.constexpr = BLOCK_M * BLOCK_N
    me = td.rank(ctx)
    ranks = td.num_ranks(ctx)
    epoch, half, signal = td.call(ctx, plan)
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (width + BLOCK_N - 1) // BLOCK_N
    tiles = tiles_m * tiles_n  # of one rank's heads
    others = tiles * (ranks - 1)
    pieces = lag + 2 * tl.maximum(others + tiles - lag, others)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    within = offs_m[:, None] * BLOCK_N + offs_n[None, :]

    piece = td.await_work_item(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        trace = (trace_ptr, piece)
        td.mark(trace, "starts")
        late = piece - lag
        receives = (late >= 0) & (late % 2 == 0)
        tile = tl.where(late < 0, piece, late // 2 + tl.where(receives, 0, lag))
        if receives & (tile < others):
            step, pid_m, pid_n = tile_in_turn(tile, tiles_m, tiles_n, ranks, group_m)
            source = (me + ranks - step) % ranks
            number = pid_m * tiles_n + pid_n
            td.mark(trace, "waits", source)
            # producer: the source's item that computes this tile
            seen = td.wait_plan(ctx, td.signal_at(ctx, half, source * tiles + number), signal, source)
            # With "pull", a rank stores tiles for another rank in the slots of that rank. With "push", the slots of a
            # rank's memory belong to the ranks that stored the tiles.
            slot = (tl.where(pushes != 0, source, me) * tiles + number).to(tl.int64)
            td.mark(trace, "receives", source)
            at = td.data_at(ctx, half, tl.where(pushes != 0, me, source)) + slot * (TILE * PRODUCT.elem_bytes)
            received = tl.load(td.pointer_to(td.consume_token(at, seen), DTYPE) + within)
            answer = td.fetch_work_item(ctx)
            store_positions(
                y_ptr, received, pid_m * BLOCK_M + offs_m, pid_n * BLOCK_N + offs_n, source, M, positions, ranks, width
            )
        elif (receives == 0) & (tile < others + tiles):
            step, pid_m, pid_n = tile_in_turn(tl.minimum(tile, others - 1), tiles_m, tiles_n, ranks, group_m)
            if tile >= others:
                step = ranks
                pid_m, pid_n = swizzle(tile - others, tiles_m, tiles_n, group_m)
            owner = (me + step) % ranks
            row = pid_m * BLOCK_M
            col = pid_n * BLOCK_N
            td.mark(trace, "multiplies", owner)
            acc = gemm_tile(
                tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32), x_ptr, x_desc, 0, row, M,
                w_ptr, w_desc, owner * width + col, stride_w, width * ranks, K, K, PRODUCT,
            )
            answer = td.fetch_work_item(ctx)
            td.mark(trace, "stores", owner)
            if PRODUCT.has_bias:
                bias = tl.load(bias_ptr + owner * width + col + offs_n, mask=col + offs_n < width, other=0.0)
                acc += td.to_float32(bias)[None, :]
            product = td.from_float32(acc, DTYPE)
            if owner == me:
                store_positions(y_ptr, product, row + offs_m, col + offs_n, me, M, positions, ranks, width)
            else:
                number = pid_m * tiles_n + pid_n
                slot = (tl.where(pushes != 0, me, owner) * tiles + number).to(tl.int64)
                at = td.data_at(ctx, half, tl.where(pushes != 0, owner, me)) + slot * (TILE * PRODUCT.elem_bytes)
                tl.store(td.pointer_to(at, DTYPE) + within, product)
                # waiter: the owner's item that receives this tile
                td.notify(ctx, td.signal_at(ctx, half, me * tiles + number), owner, signal)
        else:
            answer = td.fetch_work_item(ctx)
        td.mark(trace, "finishes")
        piece = td.await_work_item(answer)
        td.mark(trace, "ends")
    td.finish(ctx)
