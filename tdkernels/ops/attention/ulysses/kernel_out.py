"""Kernel of ulysses_out: some work items push each peer's positions, the others compute tiles of the GEMM.

The first items push this rank's heads of each peer's positions into the gathered rows [M, K] of that peer, where
M = B * S / W. The heads of a rank are K / W of the columns. Rows are sent in chunks, and several items push one chunk
together. The other items compute tiles. A tile begins with the heads of this rank, which need no wait, and continues
with the heads of rank + 1, rank + 2 and so on. They arrive in this order, which is fixed for a rank. Tiles of the first
wave wait for a few peers at a time. Later tiles, whose inputs have most likely arrived, wait for all peers at once,
because each wait drains the pipeline of the main loop.

``source`` sets signal number ``source * num_chunks + chunk`` of a half when its heads of these rows are in this rank's
memory. The waiters are the tiles of these rows. If the gathered rows are kept for a gradient, the last items are
waiters, too; they copy the gathered rows into an output tensor.

All tiles wait for all peers, so no rank can finish call t + 1 before all ranks have begun it, and two halves suffice.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.common.gemm_tile import add_product, as_aligned, store_rows, swizzle, with_bias


@td.jit
def _offsets(block, first, last, positions, all_positions, from_position, source_column, width, K,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return (offsets in o, offsets in the peer's gathered rows, mask) of a block of a peer's rows first … last - 1."""
    across = (width + COLUMNS - 1) // COLUMNS
    rows = first + block // across * ROWS + tl.arange(0, ROWS)
    columns = block % across * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < last)[:, None] & (columns < width)[None, :]
    at = (rows // positions).to(tl.int64) * all_positions + from_position + rows % positions
    to = rows.to(tl.int64) * K + source_column
    return at[:, None] * width + columns[None, :], to[:, None] + columns[None, :], mask


@td.jit
def _push_rows(
    o_ptr, dst_ptr, first, last, positions, all_positions, from_position, source_column, width, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Copy this rank's heads of a peer's rows first … last - 1 into the gathered rows of the peer."""
    blocks = (last - first + ROWS - 1) // ROWS * ((width + COLUMNS - 1) // COLUMNS)
    if blocks > 0:
        at, to, mask = _offsets(
            0, first, last, positions, all_positions, from_position, source_column, width, K, ROWS, COLUMNS
        )
        held = tl.load(o_ptr + at, mask=mask, other=0.0)
        for block in range(1, blocks + 1):
            at, to, mask = _offsets(
                block, first, last, positions, all_positions, from_position, source_column, width, K, ROWS, COLUMNS
            )
            ahead = tl.load(o_ptr + at, mask=mask, other=0.0)  # in flight while the block before is stored
            at, to, mask = _offsets(
                block - 1, first, last, positions, all_positions, from_position, source_column, width, K, ROWS, COLUMNS
            )
            tl.store(dst_ptr + to, held, mask=mask)
            held = ahead


@td.jit
def _push(
    ctx, o_ptr, half, signal, M, positions, width, chunk_rows, num_chunks, parts, worker, num_workers,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, trace,
):
    """Push to all peers, a part of a chunk at a time. This program is one of ``num_workers``."""
    me = td.rank(ctx)
    ranks = td.num_ranks(ctx)
    others = ranks - 1
    part_rows = (chunk_rows + parts - 1) // parts
    for item in range(worker, num_chunks * others * parts, num_workers):
        pair = item // parts
        chunk = pair // others
        # Each rank begins with the rank below. So no link is used twice at a time, and the data of rank + 1 arrives
        # first.
        peer = (me + ranks - 1 - pair % others) % ranks
        end = tl.minimum(chunk * chunk_rows + chunk_rows, M)
        first = chunk * chunk_rows + item % parts * part_rows
        td.mark(trace, "pushes", peer, item // num_workers)
        _push_rows(
            o_ptr, td.pointer_to(td.data_at(ctx, half, peer), o_ptr.dtype.element_ty),
            first, tl.minimum(first + part_rows, end), positions, positions * ranks, peer * positions,
            me * width, width, width * ranks, ROWS, COLUMNS,
        )
        if td.is_last_arriver(td.flag_at(ctx, pair), parts):  # among the programs of this rank that push this chunk
            # waiter: the peer's tiles of this chunk
            td.notify(ctx, td.signal_at(ctx, half, me * num_chunks + chunk), peer, signal)


@td.jit
def _tile_of_columns(
    acc, a_ptr, a_desc, a_plane, a_row, a_rows, a_shift, stride_a, b_ptr, b_desc, b_col, stride_b, N, K, first, count,
    PRODUCT: tl.constexpr,
):
    """Accumulate as ``gemm_tile``, over ``count`` of B's K columns from ``first`` on, with wraparound at K.

    A's first column has number ``a_shift``. A block must not extend past column K, except for columns that ``count``
    masks. Loads through descriptors are not masked.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    BLOCK_K: tl.constexpr = PRODUCT.block_k
    if PRODUCT.use_tma:
        for k in range(0, count, BLOCK_K):
            column = first + k
            column = tl.where(column >= K, column - K, column)
            a = a_desc.load([a_plane, a_row, column - a_shift]).reshape(BLOCK_M, BLOCK_K)
            if PRODUCT.w_is_kn:
                b = b_desc.load([column, b_col])
            else:
                b = b_desc.load([b_col, column]).T
            acc = td.dot(a, b, acc, PRODUCT.precision)
    else:
        offs_m = a_row + tl.arange(0, BLOCK_M)
        offs_n = b_col + tl.arange(0, BLOCK_N)
        offs_k = tl.arange(0, BLOCK_K)
        a_rows_ptr = a_ptr + offs_m[:, None].to(tl.int64) * stride_a
        mask_m = offs_m[:, None] < a_rows
        mask_n = offs_n[None, :] < N
        for k in range(0, count, BLOCK_K):
            column = first + k
            column = tl.where(column >= K, column - K, column)
            inside = offs_k < count - k
            a = tl.load(a_rows_ptr + (column - a_shift + offs_k)[None, :], mask=mask_m & inside[None, :], other=0.0)
            columns = column + offs_k
            if PRODUCT.w_is_kn:
                b_ptrs = b_ptr + offs_n[None, :] + columns[:, None].to(tl.int64) * stride_b
            else:
                b_ptrs = b_ptr + offs_n[None, :].to(tl.int64) * stride_b + columns[:, None]
            b = tl.load(b_ptrs, mask=mask_n & inside[:, None], other=0.0)
            acc = add_product(acc, a, b, PRODUCT.precision)
    return acc


@td.jit
def _keep_block(
    ctx, own_ptr, kept_ptr, half, row, column, width, M,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Copy a block of the gathered rows to the output, with this rank's own heads. All rows have arrived."""
    me = td.rank(ctx)
    K = width * td.num_ranks(ctx)
    gathered_ptr = td.pointer_to(td.data_at(ctx, half, me), own_ptr.dtype.element_ty)
    rows = row + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    own = ((columns >= me * width) & (columns < me * width + width))[None, :]
    at = rows[:, None].to(tl.int64)
    theirs = tl.load(gathered_ptr + at * K + columns[None, :], mask=inside & (own == 0), other=0.0)
    ours = tl.load(own_ptr + at * width + (columns - me * width)[None, :], mask=inside & own, other=0.0)
    tl.store(kept_ptr + at * K + columns[None, :], tl.where(own, ours, theirs), mask=inside)


# Compiled once per tile and block of a push, for all shapes and plans, which makes tuning cheap.
@td.jit(do_not_specialize=[
    "M", "N", "positions", "width", "stride_w", "plan", "num_comm", "chunk_tiles", "parts", "early", "early_at_once",
    "late_at_once", "group_m",
])
def ulysses_out_kernel(
    ctx, o_ptr, own_ptr, own_desc, gathered_desc, w_ptr, w_desc, bias_ptr, z_ptr, kept_ptr,
    M, N, positions, width, stride_w, plan, num_comm, chunk_tiles, parts, early, early_at_once, late_at_once, group_m,
    PUSH_ROWS: tl.constexpr, PUSH_COLUMNS: tl.constexpr, PRODUCT: tl.constexpr, trace_ptr=None,
):
    """Compute z [M, N], this rank's positions of all ranks' heads @ w.T.

    Args:
        o_ptr: This rank's heads of all positions, [W * M, width].
        own_ptr: This rank's positions of o, [M, width].
        w_ptr: Weight [N, W * width].
        kept_ptr: Output for the gathered rows, [M, W * width], or None.
        early: Number of tiles that wait for ``early_at_once`` peers at a time. The others wait for ``late_at_once``.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    N = as_aligned(N, PRODUCT.aligned)
    width = as_aligned(width, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    DTYPE: tl.constexpr = z_ptr.dtype.element_ty
    me = td.rank(ctx)
    ranks = td.num_ranks(ctx)
    K = width * ranks
    epoch, half, signal = td.call(ctx, plan)
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    num_chunks = (tiles_m + chunk_tiles - 1) // chunk_tiles
    kept_n = (K + BLOCK_N - 1) // BLOCK_N
    first_kept = num_comm + tiles_m * tiles_n
    pieces = first_kept
    if kept_ptr is not None:
        pieces += tiles_m * kept_n

    piece = td.await_work_item(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        trace = (trace_ptr, piece)
        td.mark(trace, "starts")
        if piece < num_comm:
            _push(
                ctx, o_ptr, half, signal, M, positions, width, chunk_tiles * BLOCK_M, num_chunks, parts, piece,
                num_comm, PUSH_ROWS, PUSH_COLUMNS, trace,
            )
            answer = td.fetch_work_item(ctx)
        elif piece < first_kept:
            tile = piece - num_comm
            pid_m, pid_n = swizzle(tile, tiles_m, tiles_n, group_m)
            row = pid_m * BLOCK_M
            col = pid_n * BLOCK_N
            # The signals of this chunk; there are ``num_chunks`` words per source.
            signals = td.signal_at(ctx, half, pid_m // chunk_tiles)
            at_once = tl.where(tile < early, early_at_once, late_at_once)
            if tile >= early:
                td.mark(trace, "waits", ALL_PEERS)
                td.wait_plan_all(ctx, signals, num_chunks, signal)  # producer: _push of every peer
                if PRODUCT.use_tma:
                    td.fence_before_tma_load()
            td.mark(trace, "multiplies", me)
            acc = _tile_of_columns(
                tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32), own_ptr, own_desc, 0, row, M, me * width, width,
                w_ptr, w_desc, col, stride_w, N, K, me * width, width, PRODUCT,
            )
            slot = td.data_at(ctx, half, me)
            for step in range(1, ranks, at_once):
                end = tl.minimum(step + at_once, ranks)
                if tile < early:
                    td.mark(trace, "waits", (me + step) % ranks, 2 * (step - 1))
                    for later in range(step, end):
                        source = (me + later) % ranks
                        # producer: _push of the source
                        seen = td.wait_plan(ctx, signals + source * num_chunks, signal, source, FOR_TMA=PRODUCT.use_tma)
                        slot = td.consume_token(slot, seen)
                td.mark(trace, "multiplies", (me + step) % ranks, 2 * (step - 1) + 1)
                acc = _tile_of_columns(
                    acc, td.pointer_to(slot, DTYPE), gathered_desc, half, row, M, 0, K,
                    w_ptr, w_desc, col, stride_w, N, K, (me + step) % ranks * width, (end - step) * width, PRODUCT,
                )
            answer = td.fetch_work_item(ctx)
            td.mark(trace, "stores")
            offs_n = col + tl.arange(0, BLOCK_N)
            acc = with_bias(acc, bias_ptr, offs_n, N, PRODUCT.has_bias)
            store_rows(z_ptr, td.from_float32(acc, DTYPE), row + tl.arange(0, BLOCK_M), offs_n, M, N)
        else:
            if kept_ptr is not None:
                block = piece - first_kept
                pid_m = block // kept_n
                td.mark(trace, "waits", ALL_PEERS)
                # producer: _push of every peer
                td.wait_plan_all(ctx, td.signal_at(ctx, half, pid_m // chunk_tiles), num_chunks, signal)
                td.mark(trace, "copies")
                _keep_block(
                    ctx, own_ptr, kept_ptr, half, pid_m * BLOCK_M, block % kept_n * BLOCK_N, width, M, BLOCK_M, BLOCK_N
                )
            answer = td.fetch_work_item(ctx)
        td.mark(trace, "finishes")
        piece = td.await_work_item(answer)
        td.mark(trace, "ends")
    td.finish(ctx)
