"""Kernel of ag_gemm: some work items push this rank's shard to all peers, the others multiply the chunks that arrive.

Rank ``source`` sets signal number ``source * num_chunks + chunk`` of a half when it has stored that chunk of its shard
in this rank's memory. The waiters are the tiles with rows of the chunk.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.collectives.kernel_async_all_gather import push_shard
from tdkernels.ops.common.gemm_tile import as_aligned, gemm_tile, swizzle
from tdkernels.ops.dense.ag_gemm.tile import store_tile


@td.jit
def _tile_by_arrival(tile, me, ranks, tiles_m, tiles_n, group_m, chunk_tiles):
    """Return (shard, tile row, tile column): this rank's shard first, then chunks in the order in which they arrive."""
    own_tiles = tiles_m * tiles_n
    source = me
    pid_m, pid_n = swizzle(tile, tiles_m, tiles_n, group_m)
    if tile >= own_tiles:
        remote = tile - own_tiles
        per_chunk = chunk_tiles * tiles_n
        chunk = remote // (per_chunk * (ranks - 1))
        step = remote % (per_chunk * (ranks - 1)) // per_chunk + 1
        source = (me + ranks - step) % ranks
        within = remote % per_chunk
        pid_m = chunk * chunk_tiles + within % chunk_tiles
        pid_n = within // chunk_tiles
    return source, pid_m, pid_n


# Compiled once per tile, for all shapes, plans and transports. This makes tuning cheap.
@td.jit(do_not_specialize=[
    "M_shard", "N", "K", "stride_w", "slot_rows", "plan", "num_comm", "chunk_tiles", "group_m",
])
def ag_gemm_kernel(
    ctx, x_ptr, x_desc, gathered_desc, w_ptr, w_desc, bias_ptr, y_ptr,
    M_shard, N, K, stride_w, slot_rows, plan, num_comm, chunk_tiles, group_m,
    COPY_WORDS: tl.constexpr, FIXED_HALF: tl.constexpr, PRODUCT: tl.constexpr, trace_ptr=None,
):
    """Compute y = all_gather(x) @ w.T, for x [M_shard, K] and y [ranks * M_shard, N].

    Work items 0 to num_comm - 1 push this rank's shard to the peers. Each later item (``piece``) computes one tile, in
    the order of arrival. Programs fetch the items from the work queue (``lang.work_queue``).

    FIXED_HALF: a ``begin_kernel`` has begun the call. The gathered rows, including this rank's own, stay in half 0 for
    later launches. num_comm may be 0, if the copy engine sends the shards.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    N = as_aligned(N, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    me = td.rank(ctx)
    ranks = td.num_ranks(ctx)
    if FIXED_HALF:  # after the barrier of an AsyncAllGather, which has counted this call
        half = tl.full((), 0, tl.int32)
        signal = td.signal_of(ctx, td.epoch(ctx), plan)
    else:
        epoch, half, signal = td.call(ctx, plan)
    tiles_m = (M_shard + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    num_chunks = (tiles_m + chunk_tiles - 1) // chunk_tiles
    row_bytes = tl.cast(K, tl.int64) * PRODUCT.elem_bytes
    slot_bytes = slot_rows * row_bytes

    pieces = num_comm + tiles_n * (tiles_m + (ranks - 1) * num_chunks * chunk_tiles)

    piece = td.await_work_item(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        trace = (trace_ptr, piece)
        td.mark(trace, "starts")
        if piece < num_comm:
            push_shard(
                ctx, x_ptr.to(tl.int64), half, signal, M_shard * row_bytes, chunk_tiles * BLOCK_M * row_bytes,
                num_chunks, slot_bytes, piece, num_comm, COPY_OWN=FIXED_HALF, COPY_WORDS=COPY_WORDS, trace=trace,
            )
            answer = td.fetch_work_item(ctx)
        else:
            source, pid_m, pid_n = _tile_by_arrival(piece - num_comm, me, ranks, tiles_m, tiles_n, group_m, chunk_tiles)
            if pid_m < tiles_m:  # the last chunk of a shard may have fewer tile rows
                row = pid_m * BLOCK_M
                col = pid_n * BLOCK_N
                # Two loops, one of which is empty. In two branches each loop would get its own shared memory.
                own_k = tl.where(source == me, K, 0)
                td.mark(trace, "multiplies", source)
                acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
                acc = gemm_tile(acc, x_ptr, x_desc, 0, row, M_shard, w_ptr, w_desc, col, stride_w, N, own_k, K, PRODUCT)
                # A multiple of 16: see slot_rows_of.
                slot = td.data_at(ctx, half, me) + source.to(tl.int64) * slot_bytes
                if source != me:
                    td.mark(trace, "waits", source)
                    # producer: push_shard of the source, or its copy engine
                    signal_ptr = td.signal_at(ctx, half, source * num_chunks + pid_m // chunk_tiles)
                    seen = td.wait_plan(ctx, signal_ptr, signal, source, FOR_TMA=PRODUCT.use_tma)
                    slot = td.consume_token(slot, seen)
                    td.mark(trace, "multiplies", source)
                acc = gemm_tile(
                    acc, td.pointer_to(slot, x_ptr.dtype.element_ty), gathered_desc, half,
                    row + source * slot_rows * PRODUCT.use_tma, M_shard, w_ptr, w_desc, col, stride_w, N, K - own_k, K,
                    PRODUCT,
                )
                answer = td.fetch_work_item(ctx)
                td.mark(trace, "stores")
                store_tile(y_ptr, acc, bias_ptr, source, row, col, M_shard, N, BLOCK_M, BLOCK_N, PRODUCT.has_bias)
            else:
                answer = td.fetch_work_item(ctx)
        td.mark(trace, "finishes")
        piece = td.await_work_item(answer)
        td.mark(trace, "ends")
    td.finish(ctx, ADVANCE=FIXED_HALF == 0)
