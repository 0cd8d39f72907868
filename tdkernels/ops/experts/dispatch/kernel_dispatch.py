"""Tokens to their experts: each crosses the wire once for a rank, and is put in its rows there.

Programs of two kinds, senders first. A sender takes a chunk of consecutive tokens. It stores each in the staging memory
of every rank that has an expert of it, with the rows that are meant for it there and their weights; what stays on this
rank goes to its rows at once. Then it raises one signal at every peer. A receiver takes a chunk of a peer, waits for
its signal, and copies each staged token to its rows. Nobody waits but receivers, and those for senders only (law 1).

All ranks signal at least one chunk to all peers and wait for one from each, so call t + 1 ends nowhere before all have
begun it: two halves are enough (law 3).

A staged token is a slot: its items, its scales, the numbers of K rows (-1: not here) and K weights. Staging memory
begins with where each chunk of each source begins and how many tokens it has: [ranks, MAX_CHUNKS, 2] int32.

PAYLOAD.gradient: what is sent is the gradient of a weighted sum of rows. A row gets it times its weight, and the
weight's own gradient is its product with the row.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.context import CTX_BASES
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.experts.dispatch.layout import (
    GOES,
    MAX_CHUNKS,
    MOST_TOKENS,
    chunk_at,
    chunk_of,
    chunks_at_most,
    experts_at,
    facts_at,
    ours_at,
    places_at,
    rows_at,
    sent_at,
    slot_at,
    theirs_at,
    tiles_at,
    tokens_of,
    whole_items,
)

QUANTUM = tl.constexpr(128)  # channels under one scale
# PAYLOAD.quantize, where it is not 0: how codes are made.
BY_INTEGERS = tl.constexpr(1)
BY_INSTRUCTION = tl.constexpr(2)  # of a GPU that has one
SMALLEST_QUANTUM = tl.constexpr(2.0**-118)
NO_PLACE = tl.constexpr(1 << 30)


class Payload(NamedTuple):
    """What a kernel moves, as far as it is compiled for that; its argument ``PAYLOAD``.

    Args:     source, item: type of an element of a row before it is sent, and as it travels; scale: of its scales
              quantize: 0, or how codes are made; gradient: the rows are gradients (see the module)
              aligned: rows begin at multiples of 16 bytes
              block, scale_block: elements that a program moves at a time, powers of two
    """

    source: tl.dtype
    item: tl.dtype
    scale: tl.dtype
    quantize: int
    gradient: bool
    aligned: bool
    block: int
    scale_block: int


@td.jit
def slot_parts(row_bytes, scale_bytes, K: tl.constexpr):
    """(where in a slot its scales begin, where its rows' numbers, bytes of a slot); see ``counted.slot_memory``."""
    scales_begin = (tl.cast(row_bytes, tl.int64) + 15) // 16 * 16
    places_begin = scales_begin + (tl.cast(scale_bytes, tl.int64) + 15) // 16 * 16
    return scales_begin, places_begin, (places_begin + 8 * K + 127) // 128 * 128


@td.jit
def travelling_bytes(size, PAYLOAD: tl.constexpr):
    """(bytes of a row, bytes of its scales) as they travel; size: (items, scale words)."""
    items, scale_words = size
    return items * (PAYLOAD.item.primitive_bitwidth // 8), scale_words * (PAYLOAD.scale.primitive_bitwidth // 8)


# ---- a block of a row, on its way: items and scales ----


@td.jit
def read_block(
    x, scales, block, items, scale_words, there, PAYLOAD: tl.constexpr, STAGED: tl.constexpr
):
    """(items, scales) of a block of the row and the scales at two addresses; nothing if they are not ``there``.

    STAGED: they are in a slot, as they have travelled.
    """
    BLOCK: tl.constexpr = PAYLOAD.block
    SCALE: tl.constexpr = PAYLOAD.scale
    SOURCE: tl.constexpr = PAYLOAD.item if STAGED else PAYLOAD.source
    ALIGNED: tl.constexpr = True if STAGED else PAYLOAD.aligned
    QUANTIZE: tl.constexpr = 0 if STAGED else PAYLOAD.quantize
    offs = block * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(td.pointer_to(x, SOURCE, ALIGNED) + offs, mask=(offs < items) & there, other=0)
    if QUANTIZE:
        quanta = tl.reshape(td.to_float32(row), (BLOCK // QUANTUM, QUANTUM))
        most = td.max_of(tl.abs(quanta), 1)
        # A quantum's largest number becomes the largest of e4m3, unless it is so small that the factor were infinite.
        most = tl.where(most > 0, tl.maximum(most, SMALLEST_QUANTUM), 448.0)
        largest = tl.full(most.shape, 448.0, tl.float32)
        codes = td.to_e4m3(quanta * tl.div_rn(largest, most)[:, None], QUANTIZE == BY_INSTRUCTION)
        return tl.reshape(codes, (BLOCK,)), tl.div_rn(most, largest)
    else:
        word = block * PAYLOAD.scale_block + tl.arange(0, PAYLOAD.scale_block)
        return row, tl.load(scales.to(tl.pointer_type(SCALE)) + word, mask=(word < scale_words) & there, other=0)


@td.jit
def write_block(
    row, row_scales, to, scales_to, block, items, scale_words, PAYLOAD: tl.constexpr, ALIGNED: tl.constexpr
):
    """Store a block of a row and of its scales at two addresses. ALIGNED: a row begins at a multiple of 16 bytes."""
    offs = block * PAYLOAD.block + tl.arange(0, PAYLOAD.block)
    tl.store(td.pointer_to(to, PAYLOAD.item, ALIGNED) + offs, row, mask=offs < items)
    word = block * PAYLOAD.scale_block + tl.arange(0, PAYLOAD.scale_block)
    tl.store(scales_to.to(tl.pointer_type(PAYLOAD.scale)) + word, row_scales, mask=word < scale_words)


# size: (items, scale words) of a row; inputs: (x_ptr, scales_ptr, weights_ptr); outputs: (rows_ptr, row_scales_ptr,
# row_weights_ptr, expert_rows_ptr, dots_ptr); call: what ``td.call`` has returned.


@td.jit
def spread(
    here, weights, row, row_scales, block, size, outputs, PAYLOAD: tl.constexpr
):
    """Store a block of a token in all of its rows on this rank: those of ``here`` that are not -1."""
    items, scale_words = size
    rows_ptr, scales_ptr, _, expert_rows_ptr, dots_ptr = outputs
    ITEM: tl.constexpr = PAYLOAD.item
    ALIGNED: tl.constexpr = PAYLOAD.aligned
    BLOCK: tl.constexpr = PAYLOAD.block
    ITEM_BYTES: tl.constexpr = ITEM.primitive_bitwidth // 8
    turns, count = td.turns_of(here >= 0)
    for turn in range(count):
        place = td.pick(here, turns, turn).to(tl.int64)
        to = rows_ptr.to(tl.int64) + place * items * ITEM_BYTES
        if PAYLOAD.gradient:
            offs = block * BLOCK + tl.arange(0, BLOCK)
            gradient = td.to_float32(row)
            weight = td.sum_of(tl.where(turns == turn, weights, 0.0), 0)
            tl.store(td.pointer_to(to, ITEM, ALIGNED) + offs, td.from_float32(gradient * weight, ITEM), offs < items)
            if dots_ptr is not None:
                row_at = expert_rows_ptr.to(tl.int64) + place * items * ITEM_BYTES
                expert_row = tl.load(td.pointer_to(row_at, ITEM, ALIGNED) + offs, mask=offs < items, other=0)
                dot = td.sum_of(gradient * td.to_float32(expert_row), 0)
                if block > 0:
                    dot += tl.load(dots_ptr + place)
                tl.store(dots_ptr + place, dot)
        else:
            scales_to = scales_ptr.to(tl.int64) + place * scale_words * (PAYLOAD.scale.primitive_bitwidth // 8)
            write_block(row, row_scales, to, scales_to, block, items, scale_words, PAYLOAD, ALIGNED)


# ---- senders ----


@td.jit
def find_places(
    tables, token, num_tokens, goes, FIRST: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """(the ranks of a token's experts, its rows there, by choice; its place among our tokens for each rank).

    -1 is nowhere. FIRST: made of the numbers within the tile and what the tiles before have, and kept.
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
        real = (places >= 0) & goes
        places += tl.load(before + experts, mask=real, other=0)
        places += tl.load(rows_at(tables, EXPERTS, RANKS) + experts, mask=real, other=0)
        places = tl.where(real, places, -1)
        crosses = (sent >= 0) & goes
        sent = tl.where(crosses, sent + tl.load(before + EXPERTS + ranks, mask=crosses, other=0), -1)
        tl.debug_barrier()  # all threads have read what is now written over: each of them reads all of it
        tl.store(places_ptr, places, mask=choice < K)
        tl.store(sent_ptr, sent, mask=ranks < RANKS)
    return tl.where(places >= 0, experts // (EXPERTS // RANKS), -1), places, sent


@td.jit
def _areas(ctx, half, RANKS: tl.constexpr):
    """The address of every peer's staging memory; 0 for ourselves. Read once: after a wait no cache near by has it."""
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
    """Store the token at address ``x`` in its slot at each peer (0: none there) and in its rows on this rank, ``me``.

    ``dest`` and ``places`` are the ranks and the rows of its choices, -1 for nowhere. STAGED: as of ``read_block``.
    """
    items, scale_words = size
    choice, ranks = tl.arange(0, triton.next_power_of_2(K)), tl.arange(0, triton.next_power_of_2(RANKS))
    here = tl.where(dest == me, places, -1)
    for block in range(blocks):
        row, row_scales = read_block(
            x, scales, block, items, scale_words, True, PAYLOAD, STAGED
        )
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
    ctx, call, slots_of_peers, chunk, chunk_tokens, num_tokens, goes, tables, inputs, size, outputs,
    FIRST: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, TILE_TOKENS: tl.constexpr,
    PAYLOAD: tl.constexpr, trace,
):
    """Send a chunk of our tokens to all peers and to our own rows, and signal it.

    slots_of_peers: (each peer's staging memory or 0, where our slots begin there)
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
    row_bytes, scale_bytes = travelling_bytes(size, PAYLOAD)
    scales_begin, places_begin, slot_bytes = slot_parts(row_bytes, scale_bytes, K)
    blocks = tl.maximum((items + PAYLOAD.block - 1) // PAYLOAD.block, 1)
    start = chunk * chunk_tokens
    end = tl.minimum(start + chunk_tokens, num_tokens)
    first_sent = tl.full((R,), NO_PLACE, tl.int32)
    num_sent = tl.full((R,), 0, tl.int32)
    for token in range(start, end):
        x = x_ptr.to(tl.int64) + tl.cast(token, tl.int64) * items * SOURCE_BYTES
        scales = scales_ptr.to(tl.int64) + tl.cast(token, tl.int64) * scale_words * SCALE_BYTES
        dest, places, sent = find_places(tables, token, num_tokens, goes, FIRST, K, EXPERTS, RANKS, TILE_TOKENS)
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
    # Where the chunk begins, and how many tokens it has: to each peer what it is to hear.
    beginnings = (areas + 8 * (me * MAX_CHUNKS + chunk)).to(tl.pointer_type(tl.int32))
    tl.store(beginnings, first_sent, mask=areas != 0)
    tl.store(beginnings + 1, num_sent, mask=areas != 0)
    # waiter: every peer's receiver of this chunk
    td.notify_all(ctx, td.signal_at(ctx, half, 0) + me * MAX_CHUNKS + chunk, signal)


# ---- receivers ----


@td.jit
def receive_chunk(
    area, source, chunk, staged, came,
    size, outputs,
    FIRST: tl.constexpr, K: tl.constexpr, RANKS: tl.constexpr, PAYLOAD: tl.constexpr,
):
    """Copy a chunk of a peer's tokens, which has come, from its slots to their rows. FIRST: keep which these are.

    ``area`` is our staging memory, in which the source's tokens are from number ``staged`` on.
    """
    items, scale_words = size
    row_weights_ptr = outputs[2]
    row_bytes, scale_bytes = travelling_bytes(size, PAYLOAD)
    choice = tl.arange(0, triton.next_power_of_2(K))
    scales_begin, places_begin, slot_bytes = slot_parts(row_bytes, scale_bytes, K)
    blocks = tl.maximum((items + PAYLOAD.block - 1) // PAYLOAD.block, 1)
    beginning = area.to(tl.pointer_type(tl.int32)) + 2 * (source * MAX_CHUNKS + chunk)
    first_sent = tl.load(beginning)
    num_sent = tl.load(beginning + 1)
    if FIRST:
        tl.store(chunk_at(came, source, chunk), first_sent)
        tl.store(chunk_at(came, source, chunk) + 1, num_sent)
    for i in range(num_sent):
        number = (staged + first_sent + i).to(tl.int64)
        slot = area + 8 * MAX_CHUNKS * RANKS + number * slot_bytes
        places_at = (slot + places_begin).to(tl.pointer_type(tl.int32)) + choice
        row, row_scales = read_block(
            slot, slot + scales_begin, 0, items, scale_words, True, PAYLOAD, True
        )
        here = tl.load(places_at, mask=choice < K, other=-1)
        weights = tl.load((places_at + K).to(tl.pointer_type(tl.float32)), mask=choice < K, other=0.0)
        if FIRST:
            tl.store(slot_at(came, number, K, RANKS) + choice, here, mask=choice < K)
        for block in range(blocks):
            if block > 0:
                row, row_scales = read_block(
                    slot, slot + scales_begin, block, items, scale_words, True, PAYLOAD, True,
                )
            spread(here, weights, row, row_scales, block, size, outputs, PAYLOAD)
        if row_weights_ptr is not None:
            tl.store(row_weights_ptr + here, weights, mask=here >= 0)


@td.jit(do_not_specialize=["num_tokens", "chunk_tokens", "num_senders", "items", "scale_words", "plan"])
def ep_dispatch_kernel(
    ctx, x_ptr, scales_ptr, weights_ptr, tables, came,
    rows_ptr, row_scales_ptr, row_weights_ptr, expert_rows_ptr, dots_ptr,
    num_tokens, chunk_tokens, num_senders, items, scale_words, plan,
    ADVANCE: tl.constexpr, FIRST: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    TILE_TOKENS: tl.constexpr, PAYLOAD: tl.constexpr, trace_ptr=None,
):
    """x [T, items] of each rank to rows [R, items] of the ranks with its experts; see the module.

    Signal number ``source * MAX_CHUNKS + chunk`` of a half says that a chunk of the source's tokens is in our slots.
    """
    items = whole_items(items, PAYLOAD.item, PAYLOAD.aligned)
    scale_words = tl.cast(scale_words, tl.int32)
    size, inputs = (items, scale_words), (x_ptr, scales_ptr, weights_ptr)
    outputs = rows_ptr, row_scales_ptr, row_weights_ptr, expert_rows_ptr, dots_ptr
    call = td.call(ctx, plan)
    epoch, half, signal = call
    me = td.rank(ctx)
    facts = facts_at(tables, EXPERTS, RANKS)
    goes = tl.load(facts + GOES)
    pid = tl.program_id(0)
    # One loop or the other runs; none if a peer did not come when the routing was exchanged, or in a void launch: a
    # peer may still read what an earlier launch has sent.
    chunk_size, chunks = chunk_of(tl.cast(num_tokens, tl.int32), chunk_tokens)
    runs = (goes > 0) | (FIRST & (goes == 0))  # of one that was refused only what its call launches: see the combine
    is_void = td.is_void_for_all(signal)
    runs &= is_void == 0
    tl.store(facts + GOES, -1, mask=is_void)  # no combine may go by tables that are not complete
    first_chunk = tl.where(runs & (pid < num_senders), pid, chunks)
    areas = _areas(ctx, half, RANKS)
    ranks = tl.arange(0, triton.next_power_of_2(RANKS))
    row_bytes, scale_bytes = travelling_bytes(size, PAYLOAD)
    scales_begin, places_begin, slot_bytes = slot_parts(row_bytes, scale_bytes, K)
    ours = tl.load(ours_at(tables, EXPERTS, RANKS) + ranks, mask=ranks < RANKS, other=0).to(tl.int64)
    firsts = areas + 8 * MAX_CHUNKS * RANKS + ours * slot_bytes
    for chunk in range(first_chunk, chunks, tl.maximum(num_senders, 1)):
        trace = (trace_ptr, chunk)
        td.mark(trace, "starts")
        td.mark(trace, "copies", ALL_PEERS)
        _send_chunk(
            ctx, call, (areas, firsts), chunk, chunk_size, num_tokens, goes > 0, tables, inputs, size, outputs,
            FIRST, K, EXPERTS, RANKS, TILE_TOKENS, PAYLOAD, trace,
        )
        td.mark(trace, "finishes")
        td.mark(trace, "ends")
    if RANKS > 1:
        area = td.data_at(ctx, half, me)
        work = chunks_at_most(tl.load(facts + MOST_TOKENS), chunk_tokens) * (RANKS - 1)
        first_piece = tl.where(runs & (pid >= num_senders), pid - num_senders, work)
        for piece in range(first_piece, work, tl.maximum(tl.num_programs(0) - num_senders, 1)):
            source = (me + 1 + piece % (RANKS - 1)) % RANKS
            chunk = piece // (RANKS - 1)
            _, chunks = chunk_of(tokens_of(tables, source, EXPERTS, RANKS), chunk_tokens)
            if chunk < chunks:
                trace = (trace_ptr, MAX_CHUNKS + piece)
                td.mark(trace, "starts")
                td.mark(trace, "waits", source)
                staged = tl.load(theirs_at(tables, EXPERTS, RANKS) + source)
                # producer: the source's sender of this chunk
                seen = td.wait_plan(ctx, td.signal_at(ctx, half, 0) + source * MAX_CHUNKS + chunk, signal, source)
                if td.in_time(seen, signal):
                    td.mark(trace, "receives", source)
                    receive_chunk(
                        area, source, chunk, staged, came, size, outputs,
                        FIRST, K, RANKS, PAYLOAD,
                    )
                else:
                    tl.store(facts + GOES, -1)  # no combine may go by tables that are not complete
                td.mark(trace, "finishes")
                td.mark(trace, "ends")
    td.finish(ctx, ADVANCE, (FIRST | (goes != 0)).to(tl.int32))
