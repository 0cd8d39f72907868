"""The kernel behind ulysses_qkv: tiles of other ranks' heads are computed first, and taken by those ranks.

The tiles of the other ranks come by turns: of a few tile rows those of rank + 1, then those of rank + 2 and so on, then
of the next rows. Our own tiles come last and go straight into y. After the first ``lag`` tiles, every second piece of
work is not a tile to compute but one to take: the same tiles in the same order, as the ranks below us compute them for
us. So a piece waits only for pieces of smaller numbers, and what is taken travels while tiles are computed.

A tile stays in symmetric memory of the rank that has computed it until it is taken, over the link, into y ("pull");
or it is stored in that of the rank that has its heads, which copies it from there into y ("push"). It lies there whole,
[BLOCK_M, BLOCK_N], so that it is aligned whatever the shape. Signal number ``source * tiles + tile`` of a half says
that the source has computed one of our tiles; the waiter is the piece that takes it.

Nobody can finish call t + 1 before all have begun it, since all take something of everybody: so two halves suffice,
also where a peer reads our memory.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.gemm_tile import as_aligned, gemm_tile, swizzle


@td.jit
def tile_in_turn(tile, tiles_m, tiles_n, ranks, group_m):
    """Of which rank the heads are, counted from 1, tile row and column of a tile of another rank's heads."""
    pid_m, column = swizzle(tile, tiles_m, tiles_n * (ranks - 1), group_m)
    return column // tiles_n + 1, pid_m, column % tiles_n


@td.jit
def store_positions(y_ptr, tile, rows, cols, source, M, positions, ranks, width):
    """Store rows of a rank's positions, of all sequences, where all ranks' positions are; what is outside is left out.

    Row ``r`` of the source is position ``source * positions + r % positions`` of sequence ``r // positions``.
    """
    sequence = (rows // positions).to(tl.int64)
    at = rows + (sequence * (ranks - 1) + source) * positions
    mask = (rows < M)[:, None] & (cols < width)[None, :]
    tl.store(y_ptr + at[:, None] * width + cols[None, :], tile, mask=mask)


# Compiled once for a tile, whatever the shape, plan and way of transport: that is what makes tuning cheap.
@td.jit(do_not_specialize=["M", "K", "positions", "width", "stride_w", "lag", "plan", "pushes", "group_m"])
def ulysses_qkv_kernel(
    ctx, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, y_ptr,
    M, K, positions, width, stride_w, lag, plan, pushes, group_m, PRODUCT: tl.constexpr, trace_ptr=None,
):
    """y [W * M, width] = our heads of all ranks' x @ w.T; x is [M, K], w [W * width, K], a sequence has ``positions``.

    ``pushes``: 1 for "push", 0 for "pull".
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
        takes = (late >= 0) & (late % 2 == 0)
        tile = tl.where(late < 0, piece, late // 2 + tl.where(takes, 0, lag))
        if takes & (tile < others):
            step, pid_m, pid_n = tile_in_turn(tile, tiles_m, tiles_n, ranks, group_m)
            source = (me + ranks - step) % ranks
            number = pid_m * tiles_n + pid_n
            td.mark(trace, "waits", source)
            # producer: the source's piece that computes this tile
            seen = td.wait_plan(ctx, td.signal_at(ctx, half, source * tiles + number), signal, source)
            # A rank keeps what is of another's heads at the place of that rank, or what others have stored at theirs.
            slot = (tl.where(pushes != 0, source, me) * tiles + number).to(tl.int64)
            td.mark(trace, "receives", source)
            at = td.data_at(ctx, half, tl.where(pushes != 0, me, source)) + slot * (TILE * PRODUCT.elem_bytes)
            taken = tl.load(td.pointer_to(td.consume_token(at, seen), DTYPE) + within)
            answer = td.fetch_work_item(ctx)
            store_positions(
                y_ptr, taken, pid_m * BLOCK_M + offs_m, pid_n * BLOCK_N + offs_n, source, M, positions, ranks, width
            )
        elif (takes == 0) & (tile < others + tiles):
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
                # waiter: the owner's piece that takes this tile
                td.notify(ctx, td.signal_at(ctx, half, me * tiles + number), owner, signal)
        else:
            answer = td.fetch_work_item(ctx)
        td.mark(trace, "finishes")
        piece = td.await_work_item(answer)
        td.mark(trace, "ends")
    td.finish(ctx)
