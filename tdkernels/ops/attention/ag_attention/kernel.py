"""Forward kernel of ag_attention: some programs push keys and values, the others attend to chunks that have arrived.

Work items, by number: The first items push (``push_rows``). The following items are tiles, each a block of queries of
one head; the tiles with the most keys come first. The last item waits until every peer has begun the call. A tile loops
over its own rank's keys first, then over the keys of the ranks below, one rank at a time. The first tile of a program
waits for each chunk. Later tiles of the program read without a wait the chunks that it has waited for before.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.attention.tile import (
    ALL,
    LN_2,
    accumulate,
    await_chunks,
    await_peers,
    blocks_of,
    chunks_of,
    keys_seen,
    load_rows,
    pieces_of,
    push_rows,
    slot_bytes,
    store_rows_of,
)


@td.jit
def _attend(
    acc, row_max, row_sum, q, k_desc, v_desc, k_at, v_at, where, blocks, limits, stop, scale,
    DTYPE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, CLEAN: tl.constexpr, STAGES: tl.constexpr,
):
    """Update the online softmax with blocks of keys of one shard, and return (acc, row_max, row_sum).

    ``row_max`` is the running maximum. ``acc`` is the sum of weighted values and ``row_sum`` the sum of weights, both
    relative to 2 ** ``row_max``.

    Args:
        where: (plane, sheet, first_row, head, heads) for ``load_rows``.
        blocks: (first, end) of the blocks.
        limits: If MASKED, a query attends to the keys below its limit.
        stop: Number of keys.
    """
    BLOCK_Q: tl.constexpr = TILE.block_q
    BLOCK_K: tl.constexpr = TILE.block_k
    plane, sheet, first_row, head, heads = where
    first, last = blocks
    for block in tl.range(first, last, num_stages=STAGES):
        row = block * BLOCK_K
        k = load_rows(
            k_desc, k_at, plane, sheet, first_row, head, heads, row, stop,
            DTYPE, TILE.d, BLOCK_K, TILE.block_d, TILE.use_tma, CLEAN,
        )
        scores = td.dot(q, k.T, tl.full((BLOCK_Q, BLOCK_K), 0.0, tl.float32), TILE.precision)
        if MASKED:
            offs = row + tl.arange(0, BLOCK_K)
            scores = tl.where(offs[None, :] < limits[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, td.max_of(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + td.sum_of(weights, 1)
        acc = acc * rescale[:, None]
        v = load_rows(
            v_desc, v_at, plane, sheet, first_row, head, heads, row, stop,
            DTYPE, TILE.dv, BLOCK_K, TILE.block_dv, TILE.use_tma, CLEAN,
        )
        acc = accumulate(acc, weights, v, TILE.precision)
        row_max = new_max
    return acc, row_max, row_sum


@td.jit
def query_tile(tile, batch, rows, heads, kv_heads, BLOCK_Q: tl.constexpr):
    """Return (batch entry, head, kv head, first query) of a tile. Late queries, which have more keys, come first."""
    per_block = batch * heads
    row = ((rows + BLOCK_Q - 1) // BLOCK_Q - 1 - tile // per_block) * BLOCK_Q
    entry = tile % per_block // heads
    head = tile % per_block % heads
    return entry, head, head // (heads // kv_heads), row


@td.jit
def own_blocks(row, rows, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, MASK: tl.constexpr):
    """Return (limits of a tile's queries among its own rank's keys, number of unmasked blocks, number of blocks).

    With a causal mask they are the same for one piece and for two pieces per rank, since positions grow with rows.
    """
    offs = row + tl.arange(0, BLOCK_Q)
    if MASK == ALL:
        return offs * 0 + rows, rows // BLOCK_K, (rows + BLOCK_K - 1) // BLOCK_K
    else:
        stop = tl.minimum(row + BLOCK_Q, rows)
        return tl.minimum(offs + 1, rows), tl.minimum(row + 1, rows) // BLOCK_K, (stop + BLOCK_K - 1) // BLOCK_K


@td.jit
def far_limits(row, source, me, rows, BLOCK_Q: tl.constexpr, MASK: tl.constexpr):
    """Return (limits of a tile's queries among the keys of another rank, smallest limit, largest limit)."""
    of_first, of_second = keys_seen(source, me, rows, MASK)
    piece = pieces_of(rows)
    limits = tl.where(row + tl.arange(0, BLOCK_Q) < piece, of_first, of_second)
    least = tl.where(row < piece, of_first, of_second)
    return limits, least, tl.where(tl.minimum(row + BLOCK_Q, rows) > piece, of_second, of_first)


@td.jit(do_not_specialize=["batch", "rows", "heads", "kv_heads", "plan", "num_comm", "chunk_rows"])
def ag_attention_kernel(
    ctx, q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, q_desc, k_desc, v_desc, far_k_desc, far_v_desc,
    scale, batch, rows, heads, kv_heads, plan, num_comm, chunk_rows,
    TILE: tl.constexpr, COPY_WORDS: tl.constexpr, trace_ptr=None,
):
    """Compute o [B, S / W, Hq, Dv] and lse [B, S / W, Hq]. ``scale`` includes the factor log2(e)."""
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
    known = tl.full((), 0, tl.int32)  # number of peers' chunks, in order of arrival, that this program has waited for

    piece = td.await_work_item(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        trace = (trace_ptr, piece)
        td.mark(trace, "starts")
        if piece < num_comm:
            push_rows(
                ctx, half, signal, piece, num_comm, rows, positions, chunk_rows, k_ptr.to(tl.int64), k_bytes,
                v_ptr.to(tl.int64), v_bytes, None, 0, TILE.mask, False, COPY_WORDS, trace,
            )
            answer = td.fetch_work_item(ctx)
        elif piece >= num_comm + tiles:
            td.mark(trace, "waits", ALL_PEERS)
            await_peers(ctx, half, signal, num_chunks)
            answer = td.fetch_work_item(ctx)
        else:
            entry, head, kv_head, row = query_tile(piece - num_comm, batch, rows, heads, kv_heads, BLOCK_Q)
            first_row = entry * rows
            q = load_rows(
                q_desc, q_ptr.to(tl.int64), 0, entry, first_row, head, heads, row, rows,
                DTYPE, TILE.d, BLOCK_Q, TILE.block_d, TILE.use_tma, False,
            )
            acc = tl.full((BLOCK_Q, TILE.block_dv), 0.0, tl.float32)
            row_max = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
            row_sum = tl.full((BLOCK_Q,), 0.0, tl.float32)
            limits, plain, blocks = own_blocks(row, rows, BLOCK_Q, BLOCK_K, TILE.mask)
            k_at, v_at = k_ptr.to(tl.int64), v_ptr.to(tl.int64)
            td.mark(trace, "multiplies", me)
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q, k_desc, v_desc, k_at, v_at, (0, entry, first_row, kv_head, kv_heads),
                (0, plain), limits, rows, scale,
                DTYPE, TILE, False, False, TILE.stages,
            )
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q, k_desc, v_desc, k_at, v_at, (0, entry, first_row, kv_head, kv_heads),
                (plain, blocks), limits, rows, scale,
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
                    td.mark(trace, "waits", source, 2 * (before + chunk))
                    at = await_chunks(
                        ctx, half, signal, td.data_at(ctx, half, me), known, before + chunk + 1, rows, positions,
                        chunk_rows, TILE.mask, False, TILE.use_tma,
                    )
                    td.mark(trace, "multiplies", source, 2 * (before + chunk) + 1)
                    known = tl.maximum(known, before + chunk + 1)
                    k_at, v_at = at + source * k_slot, at + ranks * k_slot + source * v_slot
                    middle = tl.minimum(tl.maximum(least // BLOCK_K, start), stop)
                    far = half, source * batch + entry, first_row, kv_head, kv_heads
                    acc, row_max, row_sum = _attend(
                        acc, row_max, row_sum, q, far_k_desc, far_v_desc, k_at, v_at,
                        far, (start, middle), limits, most, scale,
                        DTYPE, TILE, False, False, TILE.stages,
                    )
                    acc, row_max, row_sum = _attend(
                        acc, row_max, row_sum, q, far_k_desc, far_v_desc, k_at, v_at,
                        far, (middle, stop), limits, most, scale,
                        DTYPE, TILE, True, TILE.straddles, 1,
                    )
            answer = td.fetch_work_item(ctx)
            td.mark(trace, "stores")
            store_rows_of(
                o_ptr, acc / row_sum[:, None], first_row, head, heads, row, rows, TILE.dv, BLOCK_Q, TILE.block_dv
            )
            offs = row + tl.arange(0, BLOCK_Q)
            offsets = (tl.cast(first_row, tl.int64) + offs) * heads + head
            tl.store(lse_ptr + offsets, (row_max + tl.log2(row_sum)) * LN_2, mask=offs < rows)
        td.mark(trace, "finishes")
        piece = td.await_work_item(answer)
        td.mark(trace, "ends")
    td.finish(ctx)


# For tdkernels.sanitizer: ``known`` carries completed waits of a program from one tile to the next.
ag_attention_kernel.program_keeps = "waits"
