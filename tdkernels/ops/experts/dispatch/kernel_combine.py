"""Combine kernel: send the outputs of the experts back to the ranks of their tokens, and compute the weighted sums.

The first programs are senders, the others receivers. A sender takes a chunk of a peer's tokens, with the chunks of the
dispatch, and stores the results of this rank for each token in the peer's staging memory. Then it notifies that peer,
one signal per chunk. The result is one of:

- "per_rank": a part, the weighted sum of the token's rows on this rank, in fp32 and in the order of the assignments,
  rounded to the dtype of the rows. One part is sent per token and rank.
- "per_expert" (PER_EXPERT): all of the token's rows on this rank, unchanged.

A receiver takes a chunk of this rank's tokens, waits for the signals of all peers, and sums in fp32: the parts in rank
order, or the weighted rows in the order of the assignments. With "per_rank", the rows of this rank's own experts are
added one by one where this rank's part would be, without rounding in between.

Progress (invariant 1). Only receivers wait, and only for senders. Buffer reuse (invariant 3). Every rank signals at
least one chunk to every peer and waits for one from each.

If the routing was rejected, which all ranks know, nothing is sent and no program waits. The sums are 0 and the call is
not counted, because a rank that has already raised the error does not make it.

A slot has a token's part or rows, then one number for each of its K assignments if there are ``row_numbers``.
"""

import triton
import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.experts.dispatch.layout import (
    MAX_CHUNKS,
    MOST_TOKENS,
    VALID,
    chunk_at,
    chunk_of,
    chunks_at_most,
    experts_at,
    parts_at,
    peer_offset_at,
    places_at,
    recv_offsets_at,
    sent_at,
    slot_at,
    summary_at,
    tokens_of,
    whole_items,
)

MOST_AT_ONCE = tl.constexpr(8)  # maximum number of rows or parts of a token that are loaded concurrently


@td.jit
def part_bytes(items, DTYPE: tl.constexpr):
    """Return the bytes of a part or row in a slot, a multiple of 16."""
    return (tl.cast(items, tl.int64) * (DTYPE.primitive_bitwidth // 8) + 15) // 16 * 16


@td.jit
def slot_bytes(items, DTYPE: tl.constexpr, K: tl.constexpr, PER_EXPERT: tl.constexpr, ACROSS: tl.constexpr = False):
    """Return (bytes of the part or rows in a slot, bytes of a slot); see ``counted.combine_slot_memory``.

    ACROSS: the group is on several nodes, so a slot with rows also has their weights.
    """
    parts = part_bytes(items, DTYPE) * (K if PER_EXPERT else 1)
    return parts, (parts + (8 if ACROSS and PER_EXPERT else 4) * K + 127) // 128 * 128


@td.jit
def word_at(ptr, number, count):
    """Load word ``number`` of ``count`` words in all threads, -1 if out of range.

    One scalar load is cheaper than a vector load, from which a lane would have to be selected.
    """
    return tl.load(ptr + number, mask=number < count, other=-1)


@td.jit
def _add(total, address, weight, offs, items, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):
    """Add a block of the row at an address, times a weight. If the address is 0, add nothing."""
    there = address != 0
    mask = there if WHOLE else there & (offs < items)
    row = tl.load(td.pointer_to(address, DTYPE, ALIGNED) + offs, mask=mask, other=0.0)
    return total + td.to_float32(row) * weight


@td.jit
def row_addresses(rows_ptr, places, items, DTYPE: tl.constexpr):
    """Return the addresses of rows, 0 for row number -1."""
    addresses = rows_ptr.to(tl.int64) + places.to(tl.int64) * items * (DTYPE.primitive_bitwidth // 8)
    return tl.where(places >= 0, addresses, 0)


# ---- senders ----


@td.jit
def _sum_here(
    places_ptr, rows_ptr, row_weights_ptr, offs, items, K: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):
    """Return a block of the weighted sum of a token's rows on this rank. ``places_ptr``: address of their K numbers."""
    AT_ONCE: tl.constexpr = min(triton.next_power_of_2(K), MOST_AT_ONCE)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for first in range(0, K, AT_ONCE):
        for j in tl.static_range(AT_ONCE):  # unrolled, so that all loads are in flight at once
            place = word_at(places_ptr, first + j, K)
            weight = 1.0
            if row_weights_ptr is not None:
                weight = tl.load(row_weights_ptr + place, mask=place >= 0, other=0.0)
            address = row_addresses(rows_ptr, place, items, DTYPE)
            total = _add(total, address, weight, offs, items, DTYPE, ALIGNED, WHOLE)
    return total


@td.jit
def _send_rows(
    places_ptr, rows_ptr, slot, items, is_sent, K: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a token's rows on this rank to its slot, each to the place of its assignment."""
    for j in range(K):
        address = row_addresses(rows_ptr, tl.load(places_ptr + j), items, DTYPE)
        part = slot + j * part_bytes(items, DTYPE)
        if address != 0:
            for block in range((items + BLOCK - 1) // BLOCK):
                offs = block * BLOCK + tl.arange(0, BLOCK)
                row = tl.load(td.pointer_to(address, DTYPE, ALIGNED) + offs, mask=offs < items)
                tl.store(td.pointer_to(part, DTYPE) + offs, row, mask=(offs < items) & is_sent)


@td.jit
def send_chunk(
    ctx, half, signal, owner, chunk, rows_ptr, row_weights_ptr, row_numbers_ptr, tables, received, items,
    PER_EXPERT: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, LOCAL: tl.constexpr,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, trace,
):
    """Send this rank's results for a chunk of tokens to the tokens' rank ``owner``, and signal the chunk.

    LOCAL: number of ranks per node. If the group is on several nodes, the receiver is the rank of the owner's rail on
    this node, and rows are sent with their weights, because they are not weighted here.
    """
    ACROSS: tl.constexpr = LOCAL < RANKS
    choice = tl.arange(0, triton.next_power_of_2(K))
    me = td.rank(ctx)
    to, number = owner, me
    if ACROSS:
        to = me // LOCAL * LOCAL + owner % LOCAL
        number = owner // LOCAL * LOCAL + me % LOCAL
    parts, bytes_of_slot = slot_bytes(items, DTYPE, K, PER_EXPERT, ACROSS)
    blocks = (items + BLOCK - 1) // BLOCK
    first = tl.load(chunk_at(received, owner, chunk))
    end = first + tl.load(chunk_at(received, owner, chunk) + 1)
    staged = tl.load(recv_offsets_at(tables, EXPERTS, RANKS) + owner)
    first_slot = tl.load(peer_offset_at(tables, EXPERTS, RANKS) + owner)
    area = td.data_at(ctx, half, to)
    is_sent = td.is_void(signal) == 0  # in a void launch the peer may still read data of an earlier launch
    for i in range(first, end):
        slot = area + (first_slot + i).to(tl.int64) * bytes_of_slot
        places_ptr = slot_at(received, staged + i, K, RANKS)
        if PER_EXPERT:
            _send_rows(places_ptr, rows_ptr, slot, items, is_sent, K, DTYPE, ALIGNED, BLOCK)
        else:
            for block in range(blocks):
                offs = block * BLOCK + tl.arange(0, BLOCK)
                total = _sum_here(
                    places_ptr, rows_ptr, row_weights_ptr, offs, items, K, DTYPE, ALIGNED, BLOCK, WHOLE
                )
                part = td.from_float32(total, DTYPE)
                tl.store(td.pointer_to(slot, DTYPE) + offs, part, mask=(offs < items) & is_sent)
        if (row_numbers_ptr is not None) or (ACROSS and PER_EXPERT):
            here = tl.load(places_ptr + choice, mask=choice < K, other=-1)
            numbers_at = (slot + parts).to(tl.pointer_type(tl.float32)) + choice
            if row_numbers_ptr is not None:
                numbers = tl.load(row_numbers_ptr + here, mask=here >= 0, other=0.0)
                tl.store(numbers_at, numbers, mask=(choice < K) & is_sent)
            if ACROSS and PER_EXPERT:
                weights = tl.full(here.shape, 1.0, tl.float32)
                if row_weights_ptr is not None:
                    weights = tl.load(row_weights_ptr + here, mask=here >= 0, other=0.0)
                tl.store(numbers_at + K, weights, mask=(choice < K) & is_sent)
    td.mark(trace, "pushes", to)
    # waiter: the owner's receiver of this chunk; on several nodes the relay for this chunk
    td.notify(ctx, td.signal_at(ctx, half, 0) + number * MAX_CHUNKS + chunk, to, signal)


# ---- receivers ----


@td.jit
def _add_parts(
    total, first_rank, end_rank, area, parts_ptr, sent_ptr, bytes_of_slot, offs, items,
    RANKS: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
):
    """Add the parts of a token that the ranks from ``first_rank`` to ``end_rank`` have sent."""
    AT_ONCE: tl.constexpr = min(triton.next_power_of_2(RANKS - 1), MOST_AT_ONCE)
    for first in range(first_rank, end_rank, AT_ONCE):
        for j in tl.static_range(AT_ONCE):
            sent = word_at(sent_ptr, first + j, end_rank)
            part = area + (word_at(parts_ptr, first + j, end_rank) + sent).to(tl.int64) * bytes_of_slot
            total = _add(total, tl.where(sent >= 0, part, 0), 1.0, offs, items, DTYPE, ALIGNED, WHOLE)
    return total


@td.jit
def _add_own(
    total, experts_ptr, places_ptr, weights_ptr, me, rows_ptr, area, parts_ptr, sent_ptr, bytes_of_slot, offs, items,
    PER_EXPERT: tl.constexpr, K: tl.constexpr, EACH: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Add the weighted rows of a token on this rank, with PER_EXPERT also the rows that other ranks have sent."""
    AT_ONCE: tl.constexpr = min(triton.next_power_of_2(K), MOST_AT_ONCE)
    for first in range(0, K, AT_ONCE):
        for j in tl.static_range(AT_ONCE):
            choice = first + j
            place = word_at(places_ptr, choice, K)
            dest = word_at(experts_ptr, choice, K) // EACH
            here = (place >= 0) & (dest == me)
            weight = 1.0
            if weights_ptr is not None:  # the weight of a dropped assignment may be NaN, so it is not loaded
                weight = tl.load(weights_ptr + choice, mask=here | (PER_EXPERT & (place >= 0)), other=0.0)
            address = row_addresses(rows_ptr, tl.where(here, place, -1), items, DTYPE)
            if PER_EXPERT:
                away = (place >= 0) & (dest != me)
                number = tl.load(parts_ptr + dest, mask=away, other=0) + tl.load(sent_ptr + dest, mask=away, other=0)
                part = area + number.to(tl.int64) * bytes_of_slot + choice * part_bytes(items, DTYPE)
                address = tl.where(away, part, address)
            total = _add(total, address, weight, offs, items, DTYPE, ALIGNED, WHOLE)
    return total


@td.jit
def own_token(tables, weights_ptr, token, num_tokens, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    """Return (rank of each assignment of a token, row there, weight). Rank and row are -1 if it is dropped."""
    choice = tl.arange(0, triton.next_power_of_2(K))
    places = tl.load(places_at(tables, token, num_tokens, K, EXPERTS, RANKS) + choice, mask=choice < K, other=-1)
    experts = tl.load(experts_at(tables, token, K, EXPERTS, RANKS) + choice, mask=choice < K, other=-1)
    dest = tl.where(places >= 0, experts // (EXPERTS // RANKS), -1)
    if weights_ptr is not None:
        weights_at = weights_ptr + tl.cast(token, tl.int64) * K + choice
        # The weight of a dropped assignment may be NaN, so it is not loaded.
        return dest, places, tl.load(weights_at, mask=places >= 0, other=0.0)
    else:
        return dest, places, tl.full(places.shape, 1.0, tl.float32)


@td.jit
def _receive_numbers(
    token, num_tokens, me, area, parts, bytes_of_slot, row_numbers_ptr, tables, numbers_ptr,
    K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
):
    """Copy the row numbers of a token's rows, on all ranks, to its assignments."""
    choice = tl.arange(0, triton.next_power_of_2(K))
    dest, places, _ = own_token(tables, None, token, num_tokens, K, EXPERTS, RANKS)
    here = tl.where(dest == me, places, -1)
    away = (dest >= 0) & (dest != me)
    number = tl.load(parts_at(tables, EXPERTS, RANKS) + dest, mask=away, other=0)
    number += tl.load(sent_at(tables, token, num_tokens, K, EXPERTS, RANKS) + dest, mask=away, other=0)
    received_at = (area + number.to(tl.int64) * bytes_of_slot + parts).to(tl.pointer_type(tl.float32))
    received = tl.load(received_at + choice, mask=away, other=0.0)
    ours = tl.load(row_numbers_ptr + here, mask=here >= 0, other=0.0)
    entry = tl.cast(token, tl.int64) * K + choice
    tl.store(numbers_ptr + entry, tl.where(away, received, ours), mask=choice < K)


@td.jit
def _receive_chunk(
    ctx, half, chunk, chunk_tokens, num_tokens,
    rows_ptr, row_numbers_ptr, weights_ptr, tables, y_ptr, numbers_ptr, items,
    PER_EXPERT: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):
    """Compute the sums of a chunk of this rank's tokens, from received parts or rows and the rows on this rank."""
    EACH: tl.constexpr = EXPERTS // RANKS
    me = td.rank(ctx)
    parts, bytes_of_slot = slot_bytes(items, DTYPE, K, PER_EXPERT)
    area = td.data_at(ctx, half, me)
    parts_ptr = parts_at(tables, EXPERTS, RANKS)
    start = chunk * chunk_tokens
    for token in range(start, tl.minimum(start + chunk_tokens, num_tokens)):
        experts_ptr = experts_at(tables, token, K, EXPERTS, RANKS)
        places_ptr = places_at(tables, token, num_tokens, K, EXPERTS, RANKS)
        sent_ptr = sent_at(tables, token, num_tokens, K, EXPERTS, RANKS)
        weights_of = None if weights_ptr is None else weights_ptr + tl.cast(token, tl.int64) * K
        y = y_ptr.to(tl.int64) + tl.cast(token, tl.int64) * items * (DTYPE.primitive_bitwidth // 8)
        for block in range((items + BLOCK - 1) // BLOCK):
            offs = block * BLOCK + tl.arange(0, BLOCK)
            total = tl.full((BLOCK,), 0.0, tl.float32)
            if not PER_EXPERT and RANKS > 1:
                total = _add_parts(
                    total, 0, me, area, parts_ptr, sent_ptr, bytes_of_slot, offs, items, RANKS, DTYPE, ALIGNED, WHOLE
                )
            total = _add_own(
                total, experts_ptr, places_ptr, weights_of, me, rows_ptr, area, parts_ptr, sent_ptr, bytes_of_slot,
                offs, items, PER_EXPERT, K, EACH, DTYPE, ALIGNED, WHOLE,
            )
            if not PER_EXPERT and RANKS > 1:
                total = _add_parts(
                    total, me + 1, RANKS, area, parts_ptr, sent_ptr, bytes_of_slot, offs, items,
                    RANKS, DTYPE, ALIGNED, WHOLE,
                )
            tl.store(td.pointer_to(y, DTYPE, ALIGNED) + offs, td.from_float32(total, DTYPE), mask=offs < items)
        if row_numbers_ptr is not None:
            _receive_numbers(
                token, num_tokens, me, area, parts, bytes_of_slot, row_numbers_ptr, tables, numbers_ptr,
                K, EXPERTS, RANKS,
            )


@td.jit(do_not_specialize=["num_tokens", "chunk_tokens", "num_senders", "items", "plan"])
def ep_combine_kernel(
    ctx, rows_ptr, row_weights_ptr, row_numbers_ptr, weights_ptr, tables, received, y_ptr, numbers_ptr,
    num_tokens, chunk_tokens, num_senders, items, plan,
    ADVANCE: tl.constexpr, PER_EXPERT: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, trace_ptr=None,
):
    """Combine rows [R, items] to y [T, items] on the tokens' ranks, and send row_numbers [R] back to numbers [T, K].

    Signal number ``source * MAX_CHUNKS + chunk`` of a half says that the source's results for a chunk of this rank's
    tokens are in the slots of this rank.
    """
    items = whole_items(items, DTYPE, ALIGNED)
    epoch, half, signal = td.call(ctx, plan)
    me = td.rank(ctx)
    summary = summary_at(tables, EXPERTS, RANKS)
    valid = tl.load(summary + VALID)
    pid = tl.program_id(0)
    # A program runs one of the two loops, or none if a peer was missing in the exchange of the counts.
    if RANKS > 1:
        work = chunks_at_most(tl.load(summary + MOST_TOKENS), chunk_tokens) * (RANKS - 1)
        first_piece = tl.where((valid > 0) & (pid < num_senders), pid, work)
        for piece in range(first_piece, work, tl.maximum(num_senders, 1)):
            owner = (me + 1 + piece % (RANKS - 1)) % RANKS
            chunk = piece // (RANKS - 1)
            _, chunks = chunk_of(tokens_of(tables, owner, EXPERTS, RANKS), chunk_tokens)
            if chunk < chunks:
                trace = (trace_ptr, MAX_CHUNKS + piece)
                td.mark(trace, "starts")
                td.mark(trace, "joins")
                send_chunk(
                    ctx, half, signal, owner, chunk, rows_ptr, row_weights_ptr, row_numbers_ptr, tables, received,
                    items, PER_EXPERT, K, EXPERTS, RANKS, RANKS, DTYPE, ALIGNED, BLOCK, WHOLE, trace,
                )
                td.mark(trace, "finishes")
                td.mark(trace, "ends")
    size, chunks = chunk_of(tl.cast(num_tokens, tl.int32), chunk_tokens)
    first_chunk = tl.where((valid >= 0) & (pid >= num_senders), pid - num_senders, chunks)
    for chunk in range(first_chunk, chunks, tl.maximum(tl.num_programs(0) - num_senders, 1)):
        trace = (trace_ptr, chunk)
        td.mark(trace, "starts")
        td.mark(trace, "waits", ALL_PEERS)
        if valid > 0:
            # producer: every peer's sender of this chunk
            td.wait_plan_all(ctx, td.signal_at(ctx, half, 0) + chunk, MAX_CHUNKS, signal)
        td.mark(trace, "sums", ALL_PEERS)
        _receive_chunk(
            ctx, half, chunk, size, num_tokens,
            rows_ptr, row_numbers_ptr, weights_ptr, tables, y_ptr, numbers_ptr, items,
            PER_EXPERT, K, EXPERTS, RANKS, DTYPE, ALIGNED, BLOCK, WHOLE,
        )
        td.mark(trace, "finishes")
        td.mark(trace, "ends")
    td.finish(ctx, ADVANCE, (valid != 0).to(tl.int32))
