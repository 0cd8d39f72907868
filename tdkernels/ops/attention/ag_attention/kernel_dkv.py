"""Kernels for dk and dv of ag_attention, with work items, pushes and waits as in the forward kernel.

Every rank keeps its own keys and values. Pushed are the queries, the gradients of their outputs (do), and two numbers
per row and head, the statistics. A tile of keys loops over all queries that attend to it, of all ranks and of all heads
that share it. Therefore no sum over ranks or programs is needed.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.attention.tile import (
    ALL,
    LOG2_E,
    STAT_ROWS,
    accumulate,
    await_chunks,
    await_peers,
    blocks_of,
    chunks_of,
    load_rows,
    pieces_of,
    push_rows,
    queries_seeing,
    slot_bytes,
    store_rows_of,
)

# ---- statistics of each row and head: lse to base 2, and delta = sum(o * do) - dlse ----


@td.jit
def _stat_offsets(row, head, heads, BLOCK: tl.constexpr, WHICH: tl.constexpr):
    """Return offsets of the statistics of BLOCK rows of one head, in [rows / STAT_ROWS, 2, heads, STAT_ROWS]."""
    first = ((row // STAT_ROWS).to(tl.int64) * 2 + WHICH) * heads + head
    offs = row % STAT_ROWS + tl.arange(0, BLOCK)
    return first * STAT_ROWS + (offs // STAT_ROWS * (2 * STAT_ROWS) * heads + offs % STAT_ROWS)


@td.jit
def load_stats(at, first_row, head, heads, row, rows, BLOCK: tl.constexpr, WHICH: tl.constexpr):
    """Load statistic WHICH (0: lse, 1: delta) of BLOCK rows of one head, with zeros past the shard."""
    offsets = _stat_offsets(first_row + row, head, heads, BLOCK, WHICH)
    return tl.load(td.pointer_to(at, tl.float32) + offsets, mask=tl.arange(0, BLOCK) < rows - row, other=0.0)


@td.jit(do_not_specialize=["positions", "heads"])
def ag_attention_stats_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, stats_ptr, positions, heads,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute the statistics of a block of rows of one head. Local to the rank."""
    DTYPE: tl.constexpr = o_ptr.dtype.element_ty
    head = tl.program_id(0) % heads
    row = tl.program_id(0) // heads * BLOCK
    o = load_rows(
        None, o_ptr.to(tl.int64), 0, 0, 0, head, heads, row, positions, DTYPE, DV, BLOCK, BLOCK_DV, False, False
    )
    do = load_rows(
        None, do_ptr.to(tl.int64), 0, 0, 0, head, heads, row, positions, DTYPE, DV, BLOCK, BLOCK_DV, False, False
    )
    delta = td.sum_of(td.to_float32(o) * td.to_float32(do), 1)
    offs = row + tl.arange(0, BLOCK)
    inside = offs < positions
    offsets = offs.to(tl.int64) * heads + head
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + offsets, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + offsets, mask=inside, other=0.0)
    tl.store(stats_ptr + _stat_offsets(row, head, heads, BLOCK, 0), lse * LOG2_E, mask=inside)
    tl.store(stats_ptr + _stat_offsets(row, head, heads, BLOCK, 1), delta, mask=inside)


# ---- the gradients of k and v ----


@td.jit
def _dkv_blocks(
    dk, dv, k, v, q_desc, do_desc, memory, where, begin, blocks, starts, rows, scale,
    DTYPE: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):
    """Return (dk, dv) plus the contribution of blocks of queries of one shard, for all heads of the kv head's group.

    The head is the innermost loop index, so that the sums do not depend on where a segment ends. Queries past the shard
    are zeros. There is one loop, not a masked one followed by an unmasked one, because ptxas would not overlap the
    products of the two loops.

    Args:
        memory: (q_at, do_at, stats_at).
        where: (plane, sheet, first_row, kv_head, heads) for ``load_rows``.
        begin: First query. Blocks are counted from it.
        blocks: (first, end) of the blocks.
        starts: If MASKED, queries from its start on attend to a key.
    """
    BLOCK_Q: tl.constexpr = TILE.block_q
    BLOCK_K: tl.constexpr = TILE.block_k
    q_at, do_at, stats_at = memory
    plane, sheet, first_row, kv_head, heads = where
    first, last = blocks
    for turn in tl.range(first * GROUP, last * GROUP, num_stages=TILE.stages):
        row = begin + turn // GROUP * BLOCK_Q
        head = kv_head * GROUP + turn % GROUP
        q = load_rows(
            q_desc, q_at, plane, sheet, first_row, head, heads, row, rows,
            DTYPE, TILE.d, BLOCK_Q, TILE.block_d, TILE.use_tma, False,
        )
        lse = load_stats(stats_at, first_row, head, heads, row, rows, BLOCK_Q, 0)
        delta = load_stats(stats_at, first_row, head, heads, row, rows, BLOCK_Q, 1)
        do = load_rows(
            do_desc, do_at, plane, sheet, first_row, head, heads, row, rows,
            DTYPE, TILE.dv, BLOCK_Q, TILE.block_dv, TILE.use_tma, False,
        )
        zeros = tl.full((BLOCK_K, BLOCK_Q), 0.0, tl.float32)
        weights = tl.exp2(td.dot(k, q.T, zeros, TILE.precision) * scale - lse[None, :])
        if MASKED:
            offs = row + tl.arange(0, BLOCK_Q)
            weights = tl.where(offs[None, :] >= starts[:, None], weights, 0.0)
        dweights = td.dot(v, do.T, zeros, TILE.precision)
        dv = accumulate(dv, weights, do, TILE.precision)
        dk = accumulate(dk, weights * (dweights - delta[None, :]), q, TILE.precision)
    return dk, dv


@td.jit
def _own_starts(row, BLOCK_K: tl.constexpr, MASK: tl.constexpr):
    """Return (starts of a tile's keys among this rank's queries, smallest start)."""
    offs = row + tl.arange(0, BLOCK_K)
    if MASK == ALL:
        return offs * 0, row * 0
    else:
        return offs, row


@td.jit
def _far_starts(row, source, me, rows, BLOCK_K: tl.constexpr, MASK: tl.constexpr):
    """Return (starts of a tile's keys among another rank's queries, smallest start)."""
    of_first, of_second = queries_seeing(source, me, rows, MASK)
    piece = pieces_of(rows)
    starts = tl.where(row + tl.arange(0, BLOCK_K) < piece, of_first, of_second)
    return starts, tl.where(row < piece, of_first, of_second)


@td.jit(do_not_specialize=["batch", "rows", "heads", "kv_heads", "plan", "num_comm", "chunk_rows"])
def ag_attention_dkv_kernel(
    ctx, q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, dk_ptr, dv_ptr, k_desc, v_desc, q_desc, do_desc, far_q_desc,
    far_do_desc, scale, batch, rows, heads, kv_heads, plan, num_comm, chunk_rows,
    GROUP: tl.constexpr, TILE: tl.constexpr, COPY_WORDS: tl.constexpr,
):
    """Compute dk and dv by tiles of keys. The first keys have the most queries, and their tiles come first."""
    BLOCK_Q: tl.constexpr = TILE.block_q
    BLOCK_K: tl.constexpr = TILE.block_k
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    epoch, half, signal = td.call(ctx, plan)
    positions = batch * rows
    num_chunks = (positions + chunk_rows - 1) // chunk_rows
    q_bytes, do_bytes = heads * (TILE.d * TILE.elem_bytes), heads * (TILE.dv * TILE.elem_bytes)
    stat_bytes = heads * (2 * 4 * STAT_ROWS)
    q_slot, do_slot = slot_bytes(positions, q_bytes), slot_bytes(positions, do_bytes)
    stat_slot = slot_bytes((positions + STAT_ROWS - 1) // STAT_ROWS, stat_bytes)
    tiles = (rows + BLOCK_K - 1) // BLOCK_K * batch * kv_heads
    pieces = num_comm + tiles + tl.where(ranks > 1, 1, 0)
    known = tl.full((), 0, tl.int32)

    piece = td.await_work_item(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        if piece < num_comm:
            push_rows(
                ctx, half, signal, piece, num_comm, rows, positions, chunk_rows, q_ptr.to(tl.int64), q_bytes,
                do_ptr.to(tl.int64), do_bytes, stats_ptr.to(tl.int64), stat_bytes, TILE.mask, True, COPY_WORDS,
                (None, 0),
            )
            answer = td.fetch_work_item(ctx)
        elif piece >= num_comm + tiles:
            await_peers(ctx, half, signal, num_chunks)
            answer = td.fetch_work_item(ctx)
        else:
            tile = piece - num_comm
            row = tile // (batch * kv_heads) * BLOCK_K
            entry = tile % (batch * kv_heads) // kv_heads
            kv_head = tile % kv_heads
            first_row = entry * rows
            k = load_rows(
                k_desc, k_ptr.to(tl.int64), 0, entry, first_row, kv_head, kv_heads, row, rows,
                DTYPE, TILE.d, BLOCK_K, TILE.block_d, TILE.use_tma, False,
            )
            v = load_rows(
                v_desc, v_ptr.to(tl.int64), 0, entry, first_row, kv_head, kv_heads, row, rows,
                DTYPE, TILE.dv, BLOCK_K, TILE.block_dv, TILE.use_tma, False,
            )
            dk = tl.full((BLOCK_K, TILE.block_d), 0.0, tl.float32)
            dv = tl.full((BLOCK_K, TILE.block_dv), 0.0, tl.float32)
            starts, begin = _own_starts(row, BLOCK_K, TILE.mask)
            q_at, do_at, stats_at = q_ptr.to(tl.int64), do_ptr.to(tl.int64), stats_ptr.to(tl.int64)
            dk, dv = _dkv_blocks(
                dk, dv, k, v, q_desc, do_desc, (q_at, do_at, stats_at), (0, entry, first_row, kv_head, heads),
                begin, (0, (rows - begin + BLOCK_Q - 1) // BLOCK_Q), starts, rows, scale * LOG2_E,
                DTYPE, GROUP, TILE, TILE.mask != ALL,
            )
            for step in range(1, ranks):
                source = (me + ranks - step) % ranks
                starts, begin = _far_starts(row, source, me, rows, BLOCK_K, TILE.mask)
                before = (step - 1) * num_chunks
                segments, last_chunk = chunks_of(first_row, begin, rows, chunk_rows, known, before)
                for segment in range(0, segments):
                    chunk, start, stop = blocks_of(
                        segment, segments, last_chunk, first_row, begin, rows, chunk_rows, BLOCK_Q
                    )
                    at = await_chunks(
                        ctx, half, signal, td.data_at(ctx, half, me), known, before + chunk + 1, rows, positions,
                        chunk_rows, TILE.mask, True, TILE.use_tma,
                    )
                    known = tl.maximum(known, before + chunk + 1)
                    q_at, do_at = at + source * q_slot, at + ranks * q_slot + source * do_slot
                    stats_at = at + ranks * (q_slot + do_slot) + source * stat_slot
                    dk, dv = _dkv_blocks(
                        dk, dv, k, v, far_q_desc, far_do_desc, (q_at, do_at, stats_at),
                        (half, source * batch + entry, first_row, kv_head, heads), begin, (start, stop), starts, rows,
                        scale * LOG2_E,
                        DTYPE, GROUP, TILE, TILE.straddles,
                    )
            answer = td.fetch_work_item(ctx)
            store_rows_of(dk_ptr, dk * scale, first_row, kv_head, kv_heads, row, rows, TILE.d, BLOCK_K, TILE.block_d)
            store_rows_of(dv_ptr, dv, first_row, kv_head, kv_heads, row, rows, TILE.dv, BLOCK_K, TILE.block_dv)
        piece = td.await_work_item(answer)
    td.finish(ctx)


# For tdkernels.sanitizer: ``known`` carries completed waits of a program from one tile to the next.
ag_attention_dkv_kernel.program_keeps = "waits"
