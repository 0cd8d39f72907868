"""Two-phase dispatch kernel: send each token once to every rank that has an expert of it; copy it to its rows there.

The first programs are senders, the others receivers. A sender takes a chunk of consecutive tokens. It stores each token
in the staging memory of every rank that has an expert of it, together with its row numbers there and its weights. For
experts on this rank it stores the token directly in its rows. Then it notifies every peer, one signal per chunk. A
receiver takes a chunk of a peer, waits for its signal, and copies each staged token to its rows.

Progress (invariant 1). Only receivers wait, and only for senders. Buffer reuse (invariant 3). Every rank signals at
least one chunk to every peer and waits for one from each, so no rank finishes call t + 1 before all ranks have begun
it. Two halves are enough.

Staging memory begins with the first token and the number of tokens of each chunk of each source, [ranks, MAX_CHUNKS, 2]
int32. The slots of the tokens follow (``kernel_payload``).
"""

import triton
import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.context import CTX_BASES
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.experts.dispatch.kernel_payload import (
    read_block,
    slot_parts,
    spread,
    staged_bytes,
    write_block,
)
from tdkernels.ops.experts.dispatch.layout import (
    MAX_CHUNKS,
    MOST_TOKENS,
    VALID,
    chunk_at,
    chunk_of,
    chunks_at_most,
    experts_at,
    places_at,
    recv_offsets_at,
    rows_at,
    send_offsets_at,
    sent_at,
    slot_at,
    summary_at,
    tiles_at,
    tokens_of,
    whole_items,
)

NO_PLACE = tl.constexpr(1 << 30)

# Common parameters. size: (items, scale words) of a row; inputs: (x_ptr, scales_ptr, weights_ptr); outputs: (rows_ptr,
# row_scales_ptr, row_weights_ptr, expert_rows_ptr, dots_ptr); call: the result of ``td.call``.


# ---- senders ----


@td.jit
def find_places(
    tables, token, num_tokens, valid, FIRST: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Return (rank of each assignment of a token, its row there; index of the token among our tokens for each rank).

    -1 means none. With FIRST the tables have numbers within tiles: add the sums over earlier tiles and store the
    results.
    """
    choice = tl.arange(0, triton.next_power_of_2(K))
    ranks = tl.arange(0, triton.next_power_of_2(RANKS))
    experts = tl.load(experts_at(tables, token, K, EXPERTS, RANKS) + choice, mask=choice < K, other=-1)
    places_ptr = places_at(tables, token, num_tokens, K, EXPERTS, RANKS) + choice
    places = tl.load(places_ptr, mask=choice < K, other=-1)
    sent_ptr = sent_at(tables, token, num_tokens, K, EXPERTS, RANKS) + ranks
    sent = tl.load(sent_ptr, mask=ranks < RANKS, other=-1)
    if FIRST:
        before = tiles_at(tables, token // TILE_TOKENS, num_tokens, K, EXPERTS, RANKS)
        real = (places >= 0) & valid
        places += tl.load(before + experts, mask=real, other=0)
        places += tl.load(rows_at(tables, EXPERTS, RANKS) + experts, mask=real, other=0)
        places = tl.where(real, places, -1)
        crosses = (sent >= 0) & valid
        sent = tl.where(crosses, sent + tl.load(before + EXPERTS + ranks, mask=crosses, other=0), -1)
        tl.debug_barrier()  # each thread reads all numbers, so all must have read them before they are overwritten
        tl.store(places_ptr, places, mask=choice < K)
        tl.store(sent_ptr, sent, mask=ranks < RANKS)
    return tl.where(places >= 0, experts // (EXPERTS // RANKS), -1), places, sent


@td.jit
def _areas(ctx, half, RANKS: tl.constexpr):
    """Return the address of every peer's staging memory, 0 for this rank. Read once, since waits invalidate caches."""
    me = td.rank(ctx)
    ranks = tl.arange(0, triton.next_power_of_2(RANKS))
    is_peer = (ranks < RANKS) & (ranks != me)
    bases = tl.load(ctx + CTX_BASES + ranks, mask=is_peer, other=0)
    return tl.where(is_peer, bases + td.data_at(ctx, half, me) - td.symm_base(ctx, me), 0)


@td.jit
def send_token(
    x, scales, slots, scales_begin, places_begin, me, dest, places, weights, blocks, size, outputs,
    K: tl.constexpr, RANKS: tl.constexpr, PAYLOAD: tl.constexpr, STAGED: tl.constexpr,
):
    """Store the token at address ``x`` in its slots at peers, unless these are 0, and in its rows on this rank, ``me``.

    ``dest`` and ``places`` are the ranks and rows of its assignments, -1 for none. STAGED: see ``read_block``.
    """
    items, scale_words = size
    choice, ranks = tl.arange(0, triton.next_power_of_2(K)), tl.arange(0, triton.next_power_of_2(RANKS))
    here = tl.where(dest == me, places, -1)
    for block in range(blocks):
        row, row_scales = read_block(x, scales, block, items, scale_words, True, PAYLOAD, STAGED)
        for step in range(1, RANKS):
            peer = (me + step) % RANKS
            slot = td.sum_of(tl.where(ranks == peer, slots, 0), 0)
            if slot != 0:
                write_block(
                    row, row_scales, slot, slot + scales_begin, block, items, scale_words,
                    PAYLOAD, True,
                )
                if block == 0:
                    there = (slot + places_begin).to(tl.pointer_type(tl.int32)) + choice
                    tl.store(there, tl.where(dest == peer, places, -1), mask=choice < K)
                    tl.store((there + K).to(tl.pointer_type(tl.float32)), weights, mask=choice < K)
        spread(here, weights, row, row_scales, block, size, outputs, PAYLOAD)
    row_weights_ptr = outputs[2]
    if row_weights_ptr is not None:
        tl.store(row_weights_ptr + here, weights, mask=here >= 0)


@td.jit
def _send_chunk(
    ctx, call, slots_of_peers, chunk, chunk_tokens, num_tokens, valid, tables, inputs, size, outputs,
    FIRST: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, TILE_TOKENS: tl.constexpr,
    PAYLOAD: tl.constexpr, trace,
):
    """Send a chunk of this rank's tokens to all peers and to the rows on this rank, and signal it.

    slots_of_peers: (address of each peer's staging memory or 0, address of this rank's first slot there).
    """
    epoch, half, signal = call
    areas, firsts = slots_of_peers
    items, scale_words = size
    x_ptr, scales_ptr, weights_ptr = inputs
    SOURCE_BYTES: tl.constexpr = PAYLOAD.source.primitive_bitwidth // 8
    SCALE_BYTES: tl.constexpr = PAYLOAD.scale.primitive_bitwidth // 8
    KP: tl.constexpr = triton.next_power_of_2(K)
    R: tl.constexpr = triton.next_power_of_2(RANKS)
    me = td.rank(ctx)
    choice = tl.arange(0, KP)
    row_bytes, scale_bytes = staged_bytes(size, PAYLOAD)
    scales_begin, places_begin, slot_bytes = slot_parts(row_bytes, scale_bytes, K)
    blocks = tl.maximum((items + PAYLOAD.block - 1) // PAYLOAD.block, 1)
    start = chunk * chunk_tokens
    end = tl.minimum(start + chunk_tokens, num_tokens)
    first_sent = tl.full((R,), NO_PLACE, tl.int32)
    num_sent = tl.full((R,), 0, tl.int32)
    for token in range(start, end):
        x = x_ptr.to(tl.int64) + tl.cast(token, tl.int64) * items * SOURCE_BYTES
        scales = scales_ptr.to(tl.int64) + tl.cast(token, tl.int64) * scale_words * SCALE_BYTES
        dest, places, sent = find_places(tables, token, num_tokens, valid, FIRST, K, EXPERTS, RANKS, TILE_TOKENS)
        sent = tl.where(areas != 0, sent, -1)
        slots = tl.where(sent >= 0, firsts + sent.to(tl.int64) * slot_bytes, 0)
        weights = tl.full((KP,), 1.0, tl.float32)
        if weights_ptr is not None:
            weights = tl.load(weights_ptr + tl.cast(token, tl.int64) * K + choice, mask=choice < K, other=0.0)
        send_token(
            x, scales, slots, scales_begin, places_begin, me, dest, places, weights, blocks, size, outputs,
            K, RANKS, PAYLOAD, False,
        )
        first_sent = tl.where(sent >= 0, tl.minimum(first_sent, sent), first_sent)
        num_sent += (sent >= 0).to(tl.int32)
    td.mark(trace, "pushes", ALL_PEERS)
    # Store the first token of the chunk and the number of tokens, which differ between the peers.
    beginnings = (areas + 8 * (me * MAX_CHUNKS + chunk)).to(tl.pointer_type(tl.int32))
    tl.store(beginnings, first_sent, mask=areas != 0)
    tl.store(beginnings + 1, num_sent, mask=areas != 0)
    # waiter: every peer's receiver of this chunk
    td.notify_all(ctx, td.signal_at(ctx, half, 0) + me * MAX_CHUNKS + chunk, signal)


# ---- receivers ----


@td.jit
def receive_chunk(
    area, source, chunk, staged, received,
    size, outputs,
    FIRST: tl.constexpr, K: tl.constexpr, RANKS: tl.constexpr, PAYLOAD: tl.constexpr,
):
    """Copy the tokens of a received chunk from their slots to their rows. FIRST: also write the received-slot map.

    ``area`` is this rank's staging memory. The source's tokens begin at slot ``staged``.
    """
    items, scale_words = size
    row_weights_ptr = outputs[2]
    row_bytes, scale_bytes = staged_bytes(size, PAYLOAD)
    choice = tl.arange(0, triton.next_power_of_2(K))
    scales_begin, places_begin, slot_bytes = slot_parts(row_bytes, scale_bytes, K)
    blocks = tl.maximum((items + PAYLOAD.block - 1) // PAYLOAD.block, 1)
    beginning = area.to(tl.pointer_type(tl.int32)) + 2 * (source * MAX_CHUNKS + chunk)
    first_sent = tl.load(beginning)
    num_sent = tl.load(beginning + 1)
    if FIRST:
        tl.store(chunk_at(received, source, chunk), first_sent)
        tl.store(chunk_at(received, source, chunk) + 1, num_sent)
    for i in range(num_sent):
        number = (staged + first_sent + i).to(tl.int64)
        slot = area + 8 * MAX_CHUNKS * RANKS + number * slot_bytes
        places_at = (slot + places_begin).to(tl.pointer_type(tl.int32)) + choice
        row, row_scales = read_block(slot, slot + scales_begin, 0, items, scale_words, True, PAYLOAD, True)
        here = tl.load(places_at, mask=choice < K, other=-1)
        weights = tl.load((places_at + K).to(tl.pointer_type(tl.float32)), mask=choice < K, other=0.0)
        if FIRST:
            tl.store(slot_at(received, number, K, RANKS) + choice, here, mask=choice < K)
        for block in range(blocks):
            if block > 0:
                row, row_scales = read_block(slot, slot + scales_begin, block, items, scale_words, True, PAYLOAD, True)
            spread(here, weights, row, row_scales, block, size, outputs, PAYLOAD)
        if row_weights_ptr is not None:
            tl.store(row_weights_ptr + here, weights, mask=here >= 0)


@td.jit(do_not_specialize=["num_tokens", "chunk_tokens", "num_senders", "items", "scale_words", "plan"])
def ep_dispatch_kernel(
    ctx, x_ptr, scales_ptr, weights_ptr, tables, received,
    rows_ptr, row_scales_ptr, row_weights_ptr, expert_rows_ptr, dots_ptr,
    num_tokens, chunk_tokens, num_senders, items, scale_words, plan,
    ADVANCE: tl.constexpr, FIRST: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    TILE_TOKENS: tl.constexpr, PAYLOAD: tl.constexpr, trace_ptr=None,
):
    """Send x [T, items] of each rank to rows [R, items] of the ranks of its experts; see the module.

    Signal number ``source * MAX_CHUNKS + chunk`` of a half says that a chunk of the source's tokens is in the slots of
    this rank.
    """
    items = whole_items(items, PAYLOAD.item, PAYLOAD.aligned)
    scale_words = tl.cast(scale_words, tl.int32)
    size, inputs = (items, scale_words), (x_ptr, scales_ptr, weights_ptr)
    outputs = rows_ptr, row_scales_ptr, row_weights_ptr, expert_rows_ptr, dots_ptr
    call = td.call(ctx, plan)
    epoch, half, signal = call
    me = td.rank(ctx)
    summary = summary_at(tables, EXPERTS, RANKS)
    valid = tl.load(summary + VALID)
    pid = tl.program_id(0)
    # A program runs one of the two loops. It runs none if a peer was missing in the exchange of the counts, or in a
    # void launch, because a peer may still read data of an earlier launch.
    chunk_size, chunks = chunk_of(tl.cast(num_tokens, tl.int32), chunk_tokens)
    # A rejected routing runs only in its first dispatch, see ``kernel_combine``.
    runs = (valid > 0) | (FIRST & (valid == 0))
    is_void = td.is_void_for_all(signal)
    runs &= is_void == 0
    tl.store(summary + VALID, -1, mask=is_void)  # no combine may use incomplete tables
    first_chunk = tl.where(runs & (pid < num_senders), pid, chunks)
    areas = _areas(ctx, half, RANKS)
    ranks = tl.arange(0, triton.next_power_of_2(RANKS))
    row_bytes, scale_bytes = staged_bytes(size, PAYLOAD)
    scales_begin, places_begin, slot_bytes = slot_parts(row_bytes, scale_bytes, K)
    ours = tl.load(send_offsets_at(tables, EXPERTS, RANKS) + ranks, mask=ranks < RANKS, other=0).to(tl.int64)
    firsts = areas + 8 * MAX_CHUNKS * RANKS + ours * slot_bytes
    for chunk in range(first_chunk, chunks, tl.maximum(num_senders, 1)):
        trace = (trace_ptr, chunk)
        td.mark(trace, "starts")
        td.mark(trace, "copies", ALL_PEERS)
        _send_chunk(
            ctx, call, (areas, firsts), chunk, chunk_size, num_tokens, valid > 0, tables, inputs, size, outputs,
            FIRST, K, EXPERTS, RANKS, TILE_TOKENS, PAYLOAD, trace,
        )
        td.mark(trace, "finishes")
        td.mark(trace, "ends")
    if RANKS > 1:
        area = td.data_at(ctx, half, me)
        work = chunks_at_most(tl.load(summary + MOST_TOKENS), chunk_tokens) * (RANKS - 1)
        first_piece = tl.where(runs & (pid >= num_senders), pid - num_senders, work)
        for piece in range(first_piece, work, tl.maximum(tl.num_programs(0) - num_senders, 1)):
            source = (me + 1 + piece % (RANKS - 1)) % RANKS
            chunk = piece // (RANKS - 1)
            _, chunks = chunk_of(tokens_of(tables, source, EXPERTS, RANKS), chunk_tokens)
            if chunk < chunks:
                trace = (trace_ptr, MAX_CHUNKS + piece)
                td.mark(trace, "starts")
                td.mark(trace, "waits", source)
                staged = tl.load(recv_offsets_at(tables, EXPERTS, RANKS) + source)
                # producer: the source's sender of this chunk
                seen = td.wait_plan(ctx, td.signal_at(ctx, half, 0) + source * MAX_CHUNKS + chunk, signal, source)
                if td.completed(seen, signal):
                    td.mark(trace, "receives", source)
                    receive_chunk(
                        area, source, chunk, staged, received, size, outputs,
                        FIRST, K, RANKS, PAYLOAD,
                    )
                else:
                    tl.store(summary + VALID, -1)  # no combine may use incomplete tables
                td.mark(trace, "finishes")
                td.mark(trace, "ends")
    td.finish(ctx, ADVANCE, (FIRST | (valid != 0)).to(tl.int32))
