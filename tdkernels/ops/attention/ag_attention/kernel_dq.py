"""Kernel for dq of ag_attention.

It has the structure of the forward kernel: keys and values are pushed again, and a tile of queries loops over them.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.attention.ag_attention.kernel import far_limits, own_blocks, query_tile
from tdkernels.ops.attention.ag_attention.kernel_dkv import load_stats
from tdkernels.ops.attention.tile import (
    LOG2_E,
    accumulate,
    await_chunks,
    await_peers,
    blocks_of,
    chunks_of,
    load_rows,
    push_rows,
    slot_bytes,
    store_rows_of,
)


@td.jit
def _dq_blocks(
    dq, q, do, stats, k_desc, v_desc, k_at, v_at, where, blocks, limits, stop, scale,
    DTYPE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, CLEAN: tl.constexpr, STAGES: tl.constexpr,
):
    """Return dq plus the contribution of blocks of keys of one shard.

    ``stats`` is (lse, delta). The other arguments are as in ``_attend`` of the forward.
    """
    BLOCK_Q: tl.constexpr = TILE.block_q
    BLOCK_K: tl.constexpr = TILE.block_k
    lse, delta = stats
    plane, sheet, first_row, head, heads = where
    first, last = blocks
    for block in tl.range(first, last, num_stages=STAGES):
        row = block * BLOCK_K
        k = load_rows(
            k_desc, k_at, plane, sheet, first_row, head, heads, row, stop,
            DTYPE, TILE.d, BLOCK_K, TILE.block_d, TILE.use_tma, CLEAN,
        )
        v = load_rows(
            v_desc, v_at, plane, sheet, first_row, head, heads, row, stop,
            DTYPE, TILE.dv, BLOCK_K, TILE.block_dv, TILE.use_tma, CLEAN,
        )
        zeros = tl.full((BLOCK_Q, BLOCK_K), 0.0, tl.float32)
        weights = tl.exp2(td.dot(q, k.T, zeros, TILE.precision) * scale - lse[:, None])
        if MASKED:
            offs = row + tl.arange(0, BLOCK_K)
            weights = tl.where(offs[None, :] < limits[:, None], weights, 0.0)
        dweights = td.dot(do, v.T, zeros, TILE.precision)
        dq = accumulate(dq, weights * (dweights - delta[:, None]), k, TILE.precision)
    return dq


@td.jit(do_not_specialize=["batch", "rows", "heads", "kv_heads", "plan", "num_comm", "chunk_rows"])
def ag_attention_dq_kernel(
    ctx, q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, dq_ptr, q_desc, do_desc, k_desc, v_desc, far_k_desc, far_v_desc,
    scale, batch, rows, heads, kv_heads, plan, num_comm, chunk_rows,
    TILE: tl.constexpr, COPY_WORDS: tl.constexpr,
):
    """Compute dq, with work items as in ``ag_attention_kernel``."""
    BLOCK_Q: tl.constexpr = TILE.block_q
    BLOCK_K: tl.constexpr = TILE.block_k
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    epoch, half, signal = td.call(ctx, plan)
    positions = batch * rows
    num_chunks = (positions + chunk_rows - 1) // chunk_rows
    k_bytes, v_bytes = kv_heads * (TILE.d * TILE.elem_bytes), kv_heads * (TILE.dv * TILE.elem_bytes)
    k_slot, v_slot = slot_bytes(positions, k_bytes), slot_bytes(positions, v_bytes)
    tiles = (rows + BLOCK_Q - 1) // BLOCK_Q * batch * heads
    pieces = num_comm + tiles + tl.where(ranks > 1, 1, 0)
    known = tl.full((), 0, tl.int32)

    piece = td.await_work_item(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        if piece < num_comm:
            push_rows(
                ctx, half, signal, piece, num_comm, rows, positions, chunk_rows, k_ptr.to(tl.int64), k_bytes,
                v_ptr.to(tl.int64), v_bytes, None, 0, TILE.mask, False, COPY_WORDS, (None, 0),
            )
            answer = td.fetch_work_item(ctx)
        elif piece >= num_comm + tiles:
            await_peers(ctx, half, signal, num_chunks)
            answer = td.fetch_work_item(ctx)
        else:
            entry, head, kv_head, row = query_tile(piece - num_comm, batch, rows, heads, kv_heads, BLOCK_Q)
            first_row = entry * rows
            q = load_rows(
                q_desc, q_ptr.to(tl.int64), 0, entry, first_row, head, heads, row, rows,
                DTYPE, TILE.d, BLOCK_Q, TILE.block_d, TILE.use_tma, False,
            )
            do = load_rows(
                do_desc, do_ptr.to(tl.int64), 0, entry, first_row, head, heads, row, rows,
                DTYPE, TILE.dv, BLOCK_Q, TILE.block_dv, TILE.use_tma, False,
            )
            lse = load_stats(stats_ptr.to(tl.int64), first_row, head, heads, row, rows, BLOCK_Q, 0)
            delta = load_stats(stats_ptr.to(tl.int64), first_row, head, heads, row, rows, BLOCK_Q, 1)
            dq = tl.full((BLOCK_Q, TILE.block_d), 0.0, tl.float32)
            limits, plain, blocks = own_blocks(row, rows, BLOCK_Q, BLOCK_K, TILE.mask)
            k_at, v_at = k_ptr.to(tl.int64), v_ptr.to(tl.int64)
            dq = _dq_blocks(
                dq, q, do, (lse, delta), k_desc, v_desc, k_at, v_at, (0, entry, first_row, kv_head, kv_heads),
                (0, plain), limits, rows, scale * LOG2_E,
                DTYPE, TILE, False, False, TILE.stages,
            )
            dq = _dq_blocks(
                dq, q, do, (lse, delta), k_desc, v_desc, k_at, v_at, (0, entry, first_row, kv_head, kv_heads),
                (plain, blocks), limits, rows, scale * LOG2_E,
                DTYPE, TILE, True, False, 1,
            )
            for step in range(1, ranks):
                source = (me + ranks - step) % ranks
                limits, least, most = far_limits(row, source, me, rows, BLOCK_Q, TILE.mask)
                before = (step - 1) * num_chunks
                segments, last_chunk = chunks_of(first_row, 0, most, chunk_rows, known, before)
                for segment in range(0, segments):
                    chunk, start, stop = blocks_of(
                        segment, segments, last_chunk, first_row, 0, most, chunk_rows, BLOCK_K
                    )
                    at = await_chunks(
                        ctx, half, signal, td.data_at(ctx, half, me), known, before + chunk + 1, rows, positions,
                        chunk_rows, TILE.mask, False, TILE.use_tma,
                    )
                    known = tl.maximum(known, before + chunk + 1)
                    k_at, v_at = at + source * k_slot, at + ranks * k_slot + source * v_slot
                    middle = tl.minimum(tl.maximum(least // BLOCK_K, start), stop)
                    far = half, source * batch + entry, first_row, kv_head, kv_heads
                    dq = _dq_blocks(
                        dq, q, do, (lse, delta), far_k_desc, far_v_desc, k_at, v_at,
                        far, (start, middle), limits, most, scale * LOG2_E,
                        DTYPE, TILE, False, False, TILE.stages,
                    )
                    dq = _dq_blocks(
                        dq, q, do, (lse, delta), far_k_desc, far_v_desc, k_at, v_at,
                        far, (middle, stop), limits, most, scale * LOG2_E,
                        DTYPE, TILE, True, TILE.straddles, 1,
                    )
            answer = td.fetch_work_item(ctx)
            store_rows_of(dq_ptr, dq * scale, first_row, head, heads, row, rows, TILE.d, BLOCK_Q, TILE.block_d)
        piece = td.await_work_item(answer)
    td.finish(ctx)


# For tdkernels.sanitizer: ``known`` carries completed waits of a program from one tile to the next.
ag_attention_dq_kernel.program_keeps = "waits"
