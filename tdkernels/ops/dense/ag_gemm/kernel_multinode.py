"""Kernel of ag_gemm for groups on several nodes. ``kernel_async_multinode`` describes how shards are sent.

Node peers are the other ranks of this node. Rail peers are the ranks with the same local rank on other nodes. Work
items, in the order in which programs fetch them:

    send     stage this rank's shard in its own slot, chunk by chunk, and put it into the slots of the rail peers
    push     push this rank's shard to the node peers, then relay the shards of the rail peers to them
    tiles    of this rank's shard, which wait for nothing; of the node peers' shards; of shards from other nodes, by
             chunks, and for each chunk first the rail peers' rows, then the rows that node peers relay

Progress (invariant 1). An item waits only for items with smaller numbers, on any rank: a relay waits for sends, a tile
for sends and pushes. Sends are short and come before all waits. So other nodes receive their data even if few programs
run at a time.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.collectives.kernel_async_multinode import (
    await_chunk,
    push_to_node,
    relay_to_node,
    send_shard,
    source_at,
)
from tdkernels.ops.common.gemm_tile import as_aligned, gemm_tile, store_rows, swizzle, with_bias


@td.jit
def _tile_by_arrival(tile, me, ranks, local, tiles_m, tiles_n, group_m, chunk_tiles, num_chunks):
    """Return (shard, tile row, tile column): this rank's shard, node peers' shards, other nodes' shards by chunks."""
    own_tiles = tiles_m * tiles_n
    source = me
    pid_m, pid_n = swizzle(tile, tiles_m, tiles_n, group_m)
    if tile >= own_tiles:
        per_chunk = chunk_tiles * tiles_n
        on_node = (local - 1) * num_chunks * per_chunk
        remote = tile - own_tiles
        is_elsewhere = remote >= on_node
        remote = tl.where(is_elsewhere, remote - on_node, remote)
        shards = tl.where(is_elsewhere, ranks - local, local - 1)
        first = tl.where(is_elsewhere, local, 1)
        chunk = remote // (per_chunk * shards)
        source = source_at(first + remote % (per_chunk * shards) // per_chunk, me, ranks, local)
        within = remote % per_chunk
        pid_m = chunk * chunk_tiles + within % chunk_tiles
        pid_n = within // chunk_tiles
    return source, pid_m, pid_n


# Compiled once per tile, for all shapes, plans and nodes, with the arguments of ``ag_gemm_kernel``.
@td.jit(network=True, do_not_specialize=[
    "M_shard", "N", "K", "stride_w", "slot_rows", "plan", "num_comm", "chunk_tiles", "group_m",
])
def ag_gemm_nodes_kernel(
    ctx, x_ptr, x_desc, gathered_desc, w_ptr, w_desc, bias_ptr, y_ptr,
    M_shard, N, K, stride_w, slot_rows, plan, num_comm, chunk_tiles, group_m,
    COPY_WORDS: tl.constexpr, FIXED_HALF: tl.constexpr, PRODUCT: tl.constexpr, trace_ptr=None,
):
    """Send, push and relay shards, and multiply them in the order of arrival.

    FIXED_HALF: a ``begin_nodes_kernel`` has begun the call. The gathered rows stay in half 0 for later launches.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    N = as_aligned(N, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    me = td.rank(ctx)
    ranks = td.num_ranks(ctx)
    local = td.local_ranks(ctx)
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
    shard_bytes = M_shard * row_bytes
    chunk_bytes = chunk_tiles * BLOCK_M * row_bytes

    num_send = tl.minimum(num_comm, num_chunks)  # as num_pieces
    num_push = tl.where(local > 1, num_comm, 0)
    first_tile = num_send + num_push
    pieces = first_tile + tiles_n * (tiles_m + (ranks - 1) * num_chunks * chunk_tiles)

    piece = td.await_work_item(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        trace = (trace_ptr, piece)
        td.mark(trace, "starts")
        if piece < num_send:
            send_shard(
                ctx, x_ptr.to(tl.int64), half, signal, shard_bytes, chunk_bytes, num_chunks, slot_bytes,
                piece, num_send, FIXED_HALF=FIXED_HALF, COPY_WORDS=COPY_WORDS, trace=trace,
            )
            answer = td.fetch_work_item(ctx)
        elif piece < first_tile:
            push_to_node(
                ctx, x_ptr.to(tl.int64), half, signal, shard_bytes, chunk_bytes, num_chunks, slot_bytes,
                piece - num_send, num_push, FIXED_HALF=FIXED_HALF, COPY_WORDS=COPY_WORDS, trace=trace,
            )
            relay_to_node(
                ctx, half, signal, shard_bytes, chunk_bytes, num_chunks, slot_bytes,
                piece - num_send, num_push, COPY_WORDS=COPY_WORDS, trace=trace,
            )
            answer = td.fetch_work_item(ctx)
        else:
            source, pid_m, pid_n = _tile_by_arrival(
                piece - first_tile, me, ranks, local, tiles_m, tiles_n, group_m, chunk_tiles, num_chunks
            )
            if pid_m < tiles_m:  # the last chunk of a shard may have fewer tile rows
                row = pid_m * BLOCK_M
                col = pid_n * BLOCK_N
                # Two loops, one of which is empty: see ag_gemm_kernel.
                own_k = tl.where(source == me, K, 0)
                td.mark(trace, "multiplies", source)
                acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
                acc = gemm_tile(acc, x_ptr, x_desc, 0, row, M_shard, w_ptr, w_desc, col, stride_w, N, own_k, K, PRODUCT)
                slot = td.data_at(ctx, half, me) + source.to(tl.int64) * slot_bytes
                if source != me:
                    td.mark(trace, "waits", source)
                    seen = await_chunk(
                        ctx, half, source, pid_m // chunk_tiles, num_chunks, signal, FOR_TMA=PRODUCT.use_tma
                    )
                    slot = td.consume_token(slot, seen)
                    td.mark(trace, "multiplies", source)
                acc = gemm_tile(
                    acc, td.pointer_to(slot, x_ptr.dtype.element_ty), gathered_desc, half,
                    row + source * slot_rows * PRODUCT.use_tma, M_shard, w_ptr, w_desc, col, stride_w, N, K - own_k, K,
                    PRODUCT,
                )
                answer = td.fetch_work_item(ctx)
                td.mark(trace, "stores")
                acc = with_bias(acc, bias_ptr, col + tl.arange(0, BLOCK_N), N, PRODUCT.has_bias)
                y = td.from_float32(acc, y_ptr.dtype.element_ty)
                y_rows = y_ptr + source.to(tl.int64) * M_shard * N
                store_rows(y_rows, y, row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N), M_shard, N)
            else:
                answer = td.fetch_work_item(ctx)
        td.mark(trace, "finishes")
        piece = td.await_work_item(answer)
        td.mark(trace, "ends")
    td.finish(ctx, ADVANCE=FIXED_HALF == 0)
