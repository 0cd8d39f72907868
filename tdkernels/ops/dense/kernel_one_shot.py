"""One-shot kernel of gemm_ar and gemm_rs, for small M: partial tiles are sent directly to the ranks that sum them.

One program computes a partial tile, or ``split_k`` programs share its K; then the last program to arrive adds the
splits. It rounds the partial to the dtype of x and stores it at the peers, with one signal: the whole tile at every
peer, or each row at the peer that owns it (SCATTERS). Then it waits for the peers' partials of the same tile and adds
them in rank order. All ranks add the same numbers in the same order, so z of gemm_ar is bitwise equal on all ranks.
There is no barrier.

Progress (invariant 1). A program waits only for the programs of the same tile on the peers. Every program sends before
it waits and waits for nothing else, so it suffices that programs start in the order of their ids.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.common.gemm_tile import as_aligned, scale_of_row, with_bias
from tdkernels.ops.common.rank_reduce import reduce_in_rank_order
from tdkernels.ops.common.small_m_gemm import place_of, reduce_splits, small_m_tile


@td.jit
def _send_to_all(ctx, half, place, partial, offs, mask, me, RANKS: tl.constexpr, DTYPE: tl.constexpr):
    """Store a partial tile in the buffer of every peer, ``place`` bytes after the start of a half."""
    for step in tl.static_range(1, RANKS):
        dst = td.data_at(ctx, half, (me + step) % RANKS) + place
        tl.store(td.pointer_to(dst, DTYPE) + offs, partial, mask=mask)


@td.jit
def _send_to_owners(
    ctx, half, place, partial, offs_m, owned_rows, mask, me,
    BLOCK_N: tl.constexpr, RANKS: tl.constexpr, ELEM_BYTES: tl.constexpr, DTYPE: tl.constexpr,
):
    """Store each row of a partial tile at the rank that owns it, except for this rank's rows.

    The first row of each owner is stored ``place`` bytes after the start of a half.
    """
    owners = tl.minimum(offs_m // owned_rows, RANKS - 1)
    within = (offs_m - owners * owned_rows).to(tl.int64)
    rows = td.data_at(ctx, half, owners) + place + within * (BLOCK_N * ELEM_BYTES)
    dst = td.pointer_to(rows, DTYPE)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    tl.store(dst, partial, mask=mask & (owners != me)[:, None])


@td.jit(do_not_specialize=["M", "N", "K", "owned_rows", "stride_w", "k_of_part", "plan", "split_k"])
def gemm_one_shot_kernel(
    ctx, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, x_scale_ptr, w_scale_ptr, z_ptr, scratch_ptr,
    M, N, K, owned_rows, stride_w, k_of_part, plan, split_k,
    PRODUCT: tl.constexpr, SPLIT: tl.constexpr, SCATTERS: tl.constexpr,
    RANKS: tl.constexpr, trace_ptr=None,
):
    """Compute z = sum over ranks of x [M, K] @ w.T. If SCATTERS, each rank stores only its ``owned_rows`` of z.

    The data of a half is [ranks, columns of tiles, rows that this rank sums, BLOCK_N]: ``owned_rows``, which is M
    unless SCATTERS. Signal number ``source * tiles + tile`` is set when the partial tile of ``source`` is stored there.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    trace = (trace_ptr, tl.program_id(0))
    td.mark(trace, "starts")
    N = as_aligned(N, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    DTYPE: tl.constexpr = z_ptr.dtype.element_ty
    ROW_BYTES: tl.constexpr = BLOCK_N * PRODUCT.out_bytes
    me = td.rank(ctx)
    epoch, half, signal = td.call(ctx, plan)
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles = tiles_m * tiles_n
    tile, part, row, col, first_k, last_k = place_of(tl.program_id(0), tiles_m, K, k_of_part, split_k, PRODUCT)
    offs_m = row + tl.arange(0, BLOCK_M)
    offs_n = col + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]

    td.mark(trace, "multiplies")
    acc = small_m_tile(
        x_ptr, x_desc, 0, row, M, K, w_ptr, w_desc, col, stride_w, N, first_k, last_k, PRODUCT,
        scale_of_row(x_scale_ptr, row, K, PRODUCT), M - row, w_scale_ptr,
    )
    sends = True
    if SPLIT:
        td.mark(trace, "joins")
        acc, sends = reduce_splits(ctx, acc, scratch_ptr, tile, part, split_k, BLOCK_M, BLOCK_N)
    if sends:
        td.mark(trace, "pushes", ALL_PEERS)
        own = td.from_float32(acc, DTYPE)
        first_row = me * owned_rows if SCATTERS else 0
        offs = (offs_m - first_row)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        column_bytes = tl.cast(owned_rows, tl.int64) * ROW_BYTES
        slot_bytes = tiles_n * column_bytes
        place = col // BLOCK_N * column_bytes  # in a slot
        # A void launch sends nothing: a peer may still read the data of an earlier launch.
        is_sent = mask & (td.is_void(signal) == 0)
        if SCATTERS:
            _send_to_owners(
                ctx, half, me * slot_bytes + place, own, offs_m, owned_rows, is_sent, me, BLOCK_N, RANKS,
                PRODUCT.out_bytes, DTYPE,
            )
        else:
            _send_to_all(ctx, half, me * slot_bytes + place, own, offs, is_sent, me, RANKS, DTYPE)
        # waiter: the last program of the same tile on every peer
        td.notify_all(ctx, td.signal_at(ctx, half, me * tiles + tile), signal)
        if (row < first_row + owned_rows) & (row + BLOCK_M > first_row):
            td.mark(trace, "waits", ALL_PEERS)
            # producer: the last program of the same tile on every peer
            td.wait_plan_all(ctx, td.signal_at(ctx, half, tile), tiles, signal)
            td.mark(trace, "sums")
            mask &= ((offs_m >= first_row) & (offs_m < first_row + owned_rows))[:, None]
            parts = td.data_at(ctx, half, me) + place
            total = reduce_in_rank_order(parts, slot_bytes, offs, mask, td.to_float32(own), me, RANKS, DTYPE)
            total = with_bias(total, bias_ptr, offs_n, N, PRODUCT.has_bias)
            rows = (offs_m - first_row).to(tl.int64)[:, None] * N
            tl.store(z_ptr + rows + offs_n[None, :], td.from_float32(total, DTYPE), mask=mask)
    td.mark(trace, "finishes")
    td.finish(ctx)
    td.mark(trace, "ends")
