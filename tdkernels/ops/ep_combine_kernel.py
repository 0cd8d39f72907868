"""Rows of the experts back to their tokens, weighted and added up in fp32.

Programs of two kinds, senders first. A sender takes a chunk of a peer's tokens, as they were dispatched, and stores in
the peer's staging memory what this rank has for each: one part, the weighted sum of the token's rows here in the order
of its choices, rounded to the rows' type ("per_rank": a token crosses the wire once for a rank), or all of its rows as
they are (PER_EXPERT). Then it raises one signal at that peer. A receiver takes a chunk of our own tokens, waits for the
signals of all peers, and adds up: the parts in the order of the ranks, or the weighted rows in that of the choices.
What this rank's own experts have for its tokens is added row by row where its part would be, and never rounded in
between.

Nobody waits but receivers, and those for senders only (law 1). All ranks signal at least one chunk to all peers and
wait for one from each (law 3).

A slot holds a token's parts, and a number for each of its K choices if there are any to take along (``row_numbers``).
"""

import triton
import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.ep_tables import (
    GOES,
    MAX_CHUNKS,
    MOST_TOKENS,
    chunk_at,
    chunk_of,
    chunks_at_most,
    experts_at,
    facts_at,
    parts_at,
    places_at,
    sent_at,
    slot_at,
    their_at,
    theirs_at,
    tokens_of,
    whole_items,
)


@td.jit
def part_bytes(items, DTYPE: tl.constexpr):
    """Bytes of one part or row in a slot, in multiples of 16."""
    return (tl.cast(items, tl.int64) * (DTYPE.primitive_bitwidth // 8) + 15) // 16 * 16


@td.jit
def slot_bytes(items, DTYPE: tl.constexpr, K: tl.constexpr, PER_EXPERT: tl.constexpr, ACROSS: tl.constexpr = False):
    """(bytes of the parts of a slot, of a slot); see ``ep_launch.combine_slot_memory``. ACROSS: with rows' weights."""
    parts = part_bytes(items, DTYPE) * (K if PER_EXPERT else 1)
    return parts, (parts + (8 if ACROSS and PER_EXPERT else 4) * K + 127) // 128 * 128


@td.jit
def row_addresses(rows_ptr, places, items, DTYPE: tl.constexpr):
    """Where rows are; 0 for those of number -1."""
    addresses = rows_ptr.to(tl.int64) + places.to(tl.int64) * items * (DTYPE.primitive_bitwidth // 8)
    return tl.where(places >= 0, addresses, 0)


@td.jit
def add_rows(
    total, addresses, weights, block, items, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """Add, one after the other, a block of the rows at those addresses that are not 0, each times its weight if any."""
    turns, count = td.turns_of(addresses != 0)
    offs = block * BLOCK + tl.arange(0, BLOCK)
    for turn in range(0, count, 2):  # two reads on their way at a time
        first = td.sum_of(tl.where(turns == turn, addresses, 0), 0)
        second = td.sum_of(tl.where(turns == turn + 1, addresses, 0), 0)
        row0 = tl.load(td.pointer_to(first, DTYPE, ALIGNED) + offs, mask=offs < items, other=0.0)
        row1 = tl.load(td.pointer_to(second, DTYPE, ALIGNED) + offs, mask=(offs < items) & (second != 0), other=0.0)
        if weights is None:
            total += td.to_float32(row0)
            total += td.to_float32(row1)
        else:
            total += td.to_float32(row0) * td.sum_of(tl.where(turns == turn, weights, 0.0), 0)
            total += td.to_float32(row1) * td.sum_of(tl.where(turns == turn + 1, weights, 0.0), 0)
    return total


# ---- senders ----


@td.jit
def _staged_token(came, row_weights_ptr, number, there, K: tl.constexpr, RANKS: tl.constexpr):
    """(its rows here, their weights) of a token that has come, by choice; nothing is read unless it is ``there``."""
    choice = tl.arange(0, triton.next_power_of_2(K))
    here = tl.load(slot_at(came, number, K, RANKS) + choice, mask=(choice < K) & there, other=-1)
    if row_weights_ptr is not None:
        return here, tl.load(row_weights_ptr + here, mask=here >= 0, other=0.0)
    else:
        return here, tl.full(here.shape, 1.0, tl.float32)


@td.jit
def send_chunk(
    ctx, half, signal, owner, chunk, rows_ptr, row_weights_ptr, row_numbers_ptr, tables, came, items,
    PER_EXPERT: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, LOCAL: tl.constexpr,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Send the owner of a chunk of tokens what we have for them, and signal it.

    LOCAL: of so many ranks a node has. The owner's number on ours is it then that gets it, with the weights of rows
    that are not weighted here.
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
    first = tl.load(chunk_at(came, owner, chunk))
    end = first + tl.load(chunk_at(came, owner, chunk) + 1)
    staged = tl.load(theirs_at(tables, EXPERTS, RANKS) + owner)
    goes = tl.load(their_at(tables, EXPERTS, RANKS) + owner)
    area = td.data_at(ctx, half, to)
    here, weights = _staged_token(came, row_weights_ptr, staged + first, first < end, K, RANKS)
    for i in range(first, end):
        slot = area + (goes + i).to(tl.int64) * bytes_of_slot
        addresses = row_addresses(rows_ptr, here, items, DTYPE)
        # On its way while the rows of this one are read.
        next_here, next_weights = _staged_token(came, row_weights_ptr, staged + i + 1, i + 1 < end, K, RANKS)
        for block in range(blocks):
            offs = block * BLOCK + tl.arange(0, BLOCK)
            if PER_EXPERT:
                turns, count = td.turns_of(here >= 0)
                for turn in range(count):
                    address = td.sum_of(tl.where(turns == turn, addresses, 0), 0)
                    row = tl.load(td.pointer_to(address, DTYPE, ALIGNED) + offs, mask=offs < items)
                    part = slot + td.pick(choice, turns, turn) * part_bytes(items, DTYPE)
                    tl.store(td.pointer_to(part, DTYPE) + offs, row, mask=offs < items)
            else:
                total = tl.full((BLOCK,), 0.0, tl.float32)
                total = add_rows(total, addresses, weights, block, items, DTYPE, ALIGNED, BLOCK)
                tl.store(td.pointer_to(slot, DTYPE) + offs, td.from_float32(total, DTYPE), mask=offs < items)
        if row_numbers_ptr is not None:
            numbers = tl.load(row_numbers_ptr + here, mask=here >= 0, other=0.0)
            tl.store((slot + parts).to(tl.pointer_type(tl.float32)) + choice, numbers, mask=choice < K)
        if ACROSS and PER_EXPERT:
            tl.store((slot + parts).to(tl.pointer_type(tl.float32)) + K + choice, weights, mask=choice < K)
        here, weights = next_here, next_weights
    # waiter: the owner's receiver of this chunk; across nodes its relay's program for it
    td.notify(ctx, td.signal_at(ctx, half, 0) + number * MAX_CHUNKS + chunk, to, signal)


# ---- receivers ----


@td.jit
def own_token(
    tables, weights_ptr, token, num_tokens, there, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr
):
    """(the ranks of its choices, their rows there, their weights; its place among our tokens for each rank).

    -1 is nowhere; nothing is read unless the token is ``there``.
    """
    choice = tl.arange(0, triton.next_power_of_2(K))
    ranks = tl.arange(0, triton.next_power_of_2(RANKS))
    mask = (choice < K) & there
    places = tl.load(places_at(tables, token, num_tokens, K, EXPERTS, RANKS) + choice, mask=mask, other=-1)
    experts = tl.load(experts_at(tables, token, K, EXPERTS, RANKS) + choice, mask=mask, other=-1)
    sent_ptr = sent_at(tables, token, num_tokens, K, EXPERTS, RANKS)
    sent = tl.load(sent_ptr + ranks, mask=(ranks < RANKS) & there, other=-1)
    dest = tl.where(places >= 0, experts // (EXPERTS // RANKS), -1)
    if weights_ptr is not None:
        weights_at = weights_ptr + tl.cast(token, tl.int64) * K + choice
        # Not of a dropped choice, whose weight may be anything.
        return dest, places, tl.load(weights_at, mask=mask & (places >= 0), other=0.0), sent
    else:
        return dest, places, tl.full(places.shape, 1.0, tl.float32), sent


@td.jit
def _receive_chunk(
    ctx, half, chunk, chunk_tokens, num_tokens,
    rows_ptr, row_numbers_ptr, weights_ptr, tables, y_ptr, numbers_ptr, items,
    PER_EXPERT: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up what has come for a chunk of our tokens, and what we have ourselves."""
    choice = tl.arange(0, triton.next_power_of_2(K))
    ranks = tl.arange(0, triton.next_power_of_2(RANKS))
    me = td.rank(ctx)
    parts, bytes_of_slot = slot_bytes(items, DTYPE, K, PER_EXPERT)
    blocks = (items + BLOCK - 1) // BLOCK
    area = td.data_at(ctx, half, me)
    parts_ptr = parts_at(tables, EXPERTS, RANKS)
    parts_first = tl.load(parts_ptr + ranks, mask=ranks < RANKS, other=0)
    start = chunk * chunk_tokens
    end = tl.minimum(start + chunk_tokens, num_tokens)
    dest, places, weights, sent = own_token(tables, weights_ptr, start, num_tokens, start < end, K, EXPERTS, RANKS)
    for token in range(start, end):
        # On its way while the rows of this one are read.
        next_dest, next_places, next_weights, next_sent = own_token(
            tables, weights_ptr, token + 1, num_tokens, token + 1 < end, K, EXPERTS, RANKS
        )
        here = tl.where(dest == me, places, -1)
        own = row_addresses(rows_ptr, here, items, DTYPE)
        slots = tl.where((sent >= 0) & (ranks != me), area + (parts_first + sent).to(tl.int64) * bytes_of_slot, 0)
        # Where a choice's row or number has come to.
        away = (dest >= 0) & (dest != me)
        sent_ptr = sent_at(tables, token, num_tokens, K, EXPERTS, RANKS)
        choice_slots = area + bytes_of_slot * (
            tl.load(parts_ptr + dest, mask=away, other=0) + tl.load(sent_ptr + dest, mask=away, other=0)
        ).to(tl.int64)
        for block in range(blocks):
            offs = block * BLOCK + tl.arange(0, BLOCK)
            total = tl.full((BLOCK,), 0.0, tl.float32)
            if PER_EXPERT:
                addresses = tl.where(away, choice_slots + choice * part_bytes(items, DTYPE), own)
                total = add_rows(total, addresses, weights, block, items, DTYPE, ALIGNED, BLOCK)
            else:
                before, after = tl.where(ranks < me, slots, 0), tl.where(ranks > me, slots, 0)
                total = add_rows(total, before, None, block, items, DTYPE, ALIGNED, BLOCK)
                total = add_rows(total, own, weights, block, items, DTYPE, ALIGNED, BLOCK)
                total = add_rows(total, after, None, block, items, DTYPE, ALIGNED, BLOCK)
            y = y_ptr.to(tl.int64) + tl.cast(token, tl.int64) * items * (DTYPE.primitive_bitwidth // 8)
            tl.store(td.pointer_to(y, DTYPE, ALIGNED) + offs, td.from_float32(total, DTYPE), mask=offs < items)
        if row_numbers_ptr is not None:
            came = tl.load((choice_slots + parts).to(tl.pointer_type(tl.float32)) + choice, mask=away, other=0.0)
            numbers = tl.load(row_numbers_ptr + here, mask=here >= 0, other=0.0)
            entry = tl.cast(token, tl.int64) * K + choice
            tl.store(numbers_ptr + entry, tl.where(away, came, numbers), mask=choice < K)
        dest, places, weights, sent = next_dest, next_places, next_weights, next_sent


@td.jit(do_not_specialize=["num_tokens", "chunk_tokens", "num_senders", "items", "plan"])
def ep_combine_kernel(
    ctx, rows_ptr, row_weights_ptr, row_numbers_ptr, weights_ptr, tables, came, y_ptr, numbers_ptr,
    num_tokens, chunk_tokens, num_senders, items, plan,
    ADVANCE: tl.constexpr, PER_EXPERT: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """rows [R, items] of each rank to y [T, items] of the tokens' ranks, and row_numbers [R] to numbers [T, K].

    Signal number ``source * MAX_CHUNKS + chunk`` of a half says that the source's parts of a chunk of our tokens are in
    our slots.
    """
    items = whole_items(items, DTYPE, ALIGNED)
    epoch, half, signal = td.call(ctx, plan)
    me = td.rank(ctx)
    facts = facts_at(tables, EXPERTS, RANKS)
    goes = tl.load(facts + GOES)
    pid = tl.program_id(0)
    # One loop or the other runs; none if a peer did not come when the routing was exchanged.
    if RANKS > 1:
        work = chunks_at_most(tl.load(facts + MOST_TOKENS), chunk_tokens) * (RANKS - 1)
        first_piece = tl.where((goes >= 0) & (pid < num_senders), pid, work)
        for piece in range(first_piece, work, tl.maximum(num_senders, 1)):
            owner = (me + 1 + piece % (RANKS - 1)) % RANKS
            chunk = piece // (RANKS - 1)
            _, chunks = chunk_of(tokens_of(tables, owner, EXPERTS, RANKS), chunk_tokens)
            if chunk < chunks:
                send_chunk(
                    ctx, half, signal, owner, chunk, rows_ptr, row_weights_ptr, row_numbers_ptr, tables, came,
                    items, PER_EXPERT, K, EXPERTS, RANKS, RANKS, DTYPE, ALIGNED, BLOCK,
                )  # fmt: skip
    size, chunks = chunk_of(tl.cast(num_tokens, tl.int32), chunk_tokens)
    first_chunk = tl.where((goes >= 0) & (pid >= num_senders), pid - num_senders, chunks)
    for chunk in range(first_chunk, chunks, tl.maximum(tl.num_programs(0) - num_senders, 1)):
        # producer: every peer's sender of this chunk
        td.wait_plan_all(ctx, td.signal_at(ctx, half, 0) + chunk, MAX_CHUNKS, signal)
        _receive_chunk(
            ctx, half, chunk, size, num_tokens,
            rows_ptr, row_numbers_ptr, weights_ptr, tables, y_ptr, numbers_ptr, items,
            PER_EXPERT, K, EXPERTS, RANKS, DTYPE, ALIGNED, BLOCK,
        )  # fmt: skip
    td.finish(ctx, ADVANCE)
