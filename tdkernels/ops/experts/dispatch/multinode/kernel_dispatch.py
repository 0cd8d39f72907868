"""Dispatch kernel for groups on several nodes: each token crosses the network once per node.

The rank of our rail on a destination node receives our tokens for that node. It relays each token to the ranks of its
node that have an expert of it, and they copy it to its rows, as on one node. There are three kinds of programs, in this
order:

1. Senders. They first take chunks of our tokens for each other node (``listed``). They copy the tokens of a chunk to
   contiguous memory and put it, with one signal, into the memory of the rank of our rail there. Then they take chunks
   of all our tokens and send them to our own node, as ``ep_dispatch_kernel`` does.
2. Relays. They take a chunk that has arrived through the network, store its tokens in their slots at node peers and in
   their rows on this rank, and signal the node peers.
3. Receivers. They take a chunk of a node peer, first of the peer's own tokens, then of tokens that it relays, and copy
   each token from its slot to its rows.

Progress (invariant 1). Senders do not wait, relays wait for senders, receivers wait for senders and relays. All ranks
compute the same chunks from the counts. For a rank's own node, the chunks cover all of its tokens; for another node,
its tokens for that node.

Memory. A half has the first token and the number of tokens of each chunk, then the slots that node peers write, then
the slots that the network writes, then the slots that are sent through the network. The last two kinds also have, for
each assignment, the local rank on the destination node, and the token's index among the tokens for each rank of that
node.

Buffer reuse (invariant 3). A half is used again two calls later. A rank finishes call t + 1 only after it has received
the first chunk of every rank, directly or from a relay that waited for it. So all ranks have begun call t + 1 and have
finished call t, in which each rank waited for everything that was put into its memory. When call t + 2 writes to the
half, no data of call t are in flight or being read.
"""

import triton
import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.context import CTX_BASES
from tdkernels.ops.experts.dispatch.kernel_dispatch import NO_PLACE, receive_chunk, send_token
from tdkernels.ops.experts.dispatch.kernel_payload import read_block, slot_parts, staged_bytes, write_block
from tdkernels.ops.experts.dispatch.layout import (
    MAX_CHUNKS,
    MOST_TOKENS,
    VALID,
    chunk_of,
    chunks_at_most,
    experts_at,
    places_at,
    recv_offsets_at,
    send_offsets_at,
    sent_at,
    summary_at,
    tokens_of,
    whole_items,
)
from tdkernels.ops.experts.dispatch.multinode.layout import (
    going_at,
    landing_at,
    listed_at,
    passing_at,
    relayed_at,
    tokens_across,
)


@td.jit
def crossing_slot_parts(row_bytes, scale_bytes, K: tl.constexpr, LOCAL: tl.constexpr):
    """Do the same as ``slot_parts`` for a token that crosses the network; see ``routing.crossing_slot_memory``."""
    scales_begin, places_begin, _ = slot_parts(row_bytes, scale_bytes, K)
    return scales_begin, places_begin, (places_begin + 4 * (3 * K + LOCAL) + 127) // 128 * 128


# ---- senders ----


@td.jit
def _token_for(
    tables, weights_ptr, token, num_tokens, node, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """Return, for assignments of a token, (local ranks on ``node``, rows there, weights); and its index for each rank.

    The index is among our tokens for a rank of the node. -1 means not on that node.
    """
    choice, numbers = tl.arange(0, triton.next_power_of_2(K)), tl.arange(0, triton.next_power_of_2(LOCAL))
    experts = tl.load(experts_at(tables, token, K, EXPERTS, RANKS) + choice, mask=choice < K, other=-1)
    places = tl.load(places_at(tables, token, num_tokens, K, EXPERTS, RANKS) + choice, mask=choice < K, other=-1)
    sent_ptr = sent_at(tables, token, num_tokens, K, EXPERTS, RANKS) + node * LOCAL
    sent = tl.load(sent_ptr + numbers, mask=numbers < LOCAL, other=-1)
    rank = experts // (EXPERTS // RANKS)
    there = (places >= 0) & (rank // LOCAL == node)
    weights = tl.full(places.shape, 1.0, tl.float32)
    if weights_ptr is not None:
        weights = tl.load(weights_ptr + tl.cast(token, tl.int64) * K + choice, mask=choice < K, other=0.0)
    return tl.where(there, rank % LOCAL, -1), tl.where(there, places, -1), weights, sent


@td.jit
def _send_across(
    ctx, half, signal, arriving, leaving, node, chunk, chunk_tokens, crossing, num_tokens, tables, node_tables, inputs,
    size,
    K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, LOCAL: tl.constexpr, PAYLOAD: tl.constexpr,
):
    """Gather a chunk of our ``crossing`` tokens for a node, and put it into the memory of the rank of our rail there.

    ``arriving`` and ``leaving`` are the addresses of our slots that the network writes, and that it reads.
    """
    items, scale_words = size
    x_ptr, scales_ptr, weights_ptr = inputs
    NODES: tl.constexpr = RANKS // LOCAL
    SCALE_BYTES: tl.constexpr = PAYLOAD.scale.primitive_bitwidth // 8
    choice, numbers = tl.arange(0, triton.next_power_of_2(K)), tl.arange(0, triton.next_power_of_2(LOCAL))
    me = td.rank(ctx)
    row_bytes, scale_bytes = staged_bytes(size, PAYLOAD)
    scales_begin, places_begin, slot_bytes = crossing_slot_parts(row_bytes, scale_bytes, K, LOCAL)
    blocks = tl.maximum((items + PAYLOAD.block - 1) // PAYLOAD.block, 1)
    start = chunk * chunk_tokens
    end = tl.minimum(start + chunk_tokens, crossing)
    first = leaving + (tl.load(going_at(node_tables, node, RANKS, NODES)) + start).to(tl.int64) * slot_bytes
    for i in range(start, end):
        token = tl.load(listed_at(node_tables, node, i, num_tokens, RANKS, NODES))
        x = x_ptr.to(tl.int64) + token.to(tl.int64) * items * (PAYLOAD.source.primitive_bitwidth // 8)
        scales = scales_ptr.to(tl.int64) + token.to(tl.int64) * scale_words * SCALE_BYTES
        slot = first + (i - start) * slot_bytes
        dest, places, weights, sent = _token_for(
            tables, weights_ptr, token, num_tokens, node, K, EXPERTS, RANKS, LOCAL
        )
        for block in range(blocks):
            row, row_scales = read_block(x, scales, block, items, scale_words, True, PAYLOAD, False)
            write_block(
                row, row_scales, slot, slot + scales_begin, block, items, scale_words,
                PAYLOAD, True,
            )
        places_to = (slot + places_begin).to(tl.pointer_type(tl.int32))
        tl.store(places_to + choice, places, mask=choice < K)
        tl.store((places_to + K).to(tl.pointer_type(tl.float32)) + choice, weights, mask=choice < K)
        tl.store(places_to + 2 * K + choice, dest, mask=choice < K)
        tl.store(places_to + 3 * K + numbers, sent, mask=numbers < LOCAL)
    peer = node * LOCAL + me % LOCAL
    there = arriving + (tl.load(landing_at(node_tables, node, RANKS, NODES)) + start).to(tl.int64) * slot_bytes
    signal_ptr = td.signal_at(ctx, half, 0) + me * MAX_CHUNKS + chunk
    # waiter: the peer's relay of this chunk
    if end > start:
        td.put_signal(ctx, there, first, (end - start) * slot_bytes, signal_ptr, signal, peer)
    else:
        td.signal(ctx, signal_ptr, signal, peer)


@td.jit
def _areas(ctx, half, LOCAL: tl.constexpr):
    """Return the address of each node peer's staging memory, 0 for this rank. Read once, since waits drop caches."""
    me = td.rank(ctx)
    numbers = tl.arange(0, triton.next_power_of_2(LOCAL))
    is_peer = (numbers < LOCAL) & (numbers != me % LOCAL)
    bases = tl.load(ctx + CTX_BASES + me // LOCAL * LOCAL + numbers, mask=is_peer, other=0)
    return tl.where(is_peer, bases + td.data_at(ctx, half, me) - td.symm_base(ctx, me), 0)


@td.jit
def _slots_from(
    areas, tables, node, slot_bytes, EXPERTS: tl.constexpr, RANKS: tl.constexpr, LOCAL: tl.constexpr
):
    """Return the address, at each node peer, of the first slot for tokens of the rank of our rail on ``node``."""
    numbers = tl.arange(0, triton.next_power_of_2(LOCAL))
    begin = tl.load(send_offsets_at(tables, EXPERTS, RANKS) + node * LOCAL + numbers, mask=numbers < LOCAL, other=0)
    return areas + 8 * MAX_CHUNKS * RANKS + begin.to(tl.int64) * slot_bytes


@td.jit
def _announce(ctx, half, areas, signal, source, chunk, first_sent, num_sent, CHECK_FAILED: tl.constexpr):
    """Store the first token and the number of tokens of a source's chunk at node peers, and signal the chunk."""
    beginnings = (areas + 8 * (source * MAX_CHUNKS + chunk)).to(tl.pointer_type(tl.int32))
    tl.store(beginnings, first_sent, mask=areas != 0)
    tl.store(beginnings + 1, num_sent, mask=areas != 0)
    # waiter: every node peer's receiver of this chunk
    signal_ptr = td.signal_at(ctx, half, 0) + source * MAX_CHUNKS + chunk
    td.notify_node(ctx, signal_ptr, signal, CHECK_FAILED=CHECK_FAILED)


@td.jit
def _send_here(
    ctx, half, signal, areas, chunk, chunk_tokens, num_tokens, tables, inputs, size, outputs,
    K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, LOCAL: tl.constexpr, PAYLOAD: tl.constexpr,
):
    """Send a chunk of our tokens to node peers and to the rows on this rank, and signal it."""
    items, scale_words = size
    x_ptr, scales_ptr, weights_ptr = inputs
    SCALE_BYTES: tl.constexpr = PAYLOAD.scale.primitive_bitwidth // 8
    L: tl.constexpr = triton.next_power_of_2(LOCAL)
    me = td.rank(ctx)
    row_bytes, scale_bytes = staged_bytes(size, PAYLOAD)
    scales_begin, places_begin, slot_bytes = slot_parts(row_bytes, scale_bytes, K)
    firsts = _slots_from(areas, tables, me // LOCAL, slot_bytes, EXPERTS, RANKS, LOCAL)
    blocks = tl.maximum((items + PAYLOAD.block - 1) // PAYLOAD.block, 1)
    start = chunk * chunk_tokens
    first_sent = tl.full((L,), NO_PLACE, tl.int32)
    num_sent = tl.full((L,), 0, tl.int32)
    for token in range(start, tl.minimum(start + chunk_tokens, num_tokens)):
        x = x_ptr.to(tl.int64) + tl.cast(token, tl.int64) * items * (PAYLOAD.source.primitive_bitwidth // 8)
        scales = scales_ptr.to(tl.int64) + tl.cast(token, tl.int64) * scale_words * SCALE_BYTES
        dest, places, weights, sent = _token_for(
            tables, weights_ptr, token, num_tokens, me // LOCAL, K, EXPERTS, RANKS, LOCAL
        )
        sent = tl.where(areas != 0, sent, -1)
        slots = tl.where(sent >= 0, firsts + sent.to(tl.int64) * slot_bytes, 0)
        send_token(
            x, scales, slots, scales_begin, places_begin, me % LOCAL, dest, places, weights, blocks, size, outputs,
            K, LOCAL, PAYLOAD, False,
        )
        first_sent = tl.where(sent >= 0, tl.minimum(first_sent, sent), first_sent)
        num_sent += (sent >= 0).to(tl.int32)
    _announce(ctx, half, areas, signal, me, chunk, first_sent, num_sent, False)


# ---- relays ----


@td.jit
def _relay_chunk(
    ctx, half, signal, areas, arriving, source, chunk, chunk_tokens, crossing, tables, node_tables, relayed, size,
    outputs,
    FIRST: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, LOCAL: tl.constexpr,
    PAYLOAD: tl.constexpr,
):
    """Relay a received chunk of the source's ``crossing`` tokens to node peers and to the rows on this rank.

    FIRST: also write the relayed-token map.
    """
    items, scale_words = size
    L: tl.constexpr = triton.next_power_of_2(LOCAL)
    choice, numbers = tl.arange(0, triton.next_power_of_2(K)), tl.arange(0, L)
    me = td.rank(ctx)
    row_bytes, scale_bytes = staged_bytes(size, PAYLOAD)
    scales_begin, places_begin, slot_bytes = slot_parts(row_bytes, scale_bytes, K)
    crossing_bytes = crossing_slot_parts(row_bytes, scale_bytes, K, LOCAL)[2]
    firsts = _slots_from(areas, tables, source // LOCAL, slot_bytes, EXPERTS, RANKS, LOCAL)
    blocks = tl.maximum((items + PAYLOAD.block - 1) // PAYLOAD.block, 1)
    start = chunk * chunk_tokens
    begin = tl.load(passing_at(node_tables, source // LOCAL, RANKS, RANKS // LOCAL))
    first_sent = tl.full((L,), NO_PLACE, tl.int32)
    num_sent = tl.full((L,), 0, tl.int32)
    for i in range(start, tl.minimum(start + chunk_tokens, crossing)):
        slot = arriving + (begin + i).to(tl.int64) * crossing_bytes
        places_at = (slot + places_begin).to(tl.pointer_type(tl.int32))
        places = tl.load(places_at + choice, mask=choice < K, other=-1)
        weights = tl.load((places_at + K).to(tl.pointer_type(tl.float32)) + choice, mask=choice < K, other=0.0)
        dest = tl.load(places_at + 2 * K + choice, mask=choice < K, other=-1)
        sent = tl.load(places_at + 3 * K + numbers, mask=numbers < LOCAL, other=-1)
        sent = tl.where(areas != 0, sent, -1)
        slots = tl.where(sent >= 0, firsts + sent.to(tl.int64) * slot_bytes, 0)
        send_token(
            slot, slot + scales_begin, slots, scales_begin, places_begin, me % LOCAL, dest, places, weights, blocks,
            size, outputs, K, LOCAL, PAYLOAD, True,
        )
        if FIRST:
            kept = relayed_at(relayed, begin + i, K, LOCAL)
            tl.store(kept + choice, dest, mask=choice < K)
            tl.store(kept + K + choice, places, mask=choice < K)
            tl.store(kept + 2 * K + numbers, sent, mask=numbers < LOCAL)
        first_sent = tl.where(sent >= 0, tl.minimum(first_sent, sent), first_sent)
        num_sent += (sent >= 0).to(tl.int32)
    _announce(ctx, half, areas, signal, source, chunk, first_sent, num_sent, True)


# ---- receivers ----


@td.jit
def _piece_of_receivers(piece, chunks, me, RANKS: tl.constexpr, LOCAL: tl.constexpr):
    """Return (source, chunk) of a work item: first the chunks of node peers, then of other nodes.

    ``chunks`` is the maximum number of chunks of a source.
    """
    PEERS: tl.constexpr = LOCAL - 1
    OTHERS: tl.constexpr = (RANKS // LOCAL - 1) * PEERS
    here = chunks * PEERS
    of_others = piece - here
    is_here = piece < here
    chunk = tl.where(is_here, piece // PEERS, of_others // OTHERS)
    step = tl.where(is_here, 0, 1 + of_others % OTHERS // PEERS)
    peer = tl.where(is_here, piece % PEERS, of_others % OTHERS % PEERS)
    node = (me // LOCAL + step) % (RANKS // LOCAL)
    return node * LOCAL + (me % LOCAL + 1 + peer) % LOCAL, chunk


@td.jit(
    network=True,
    do_not_specialize=[
        "num_tokens", "chunk_tokens", "num_senders", "num_relays", "here_slots", "crossing_slots", "items",
        "scale_words", "plan",
    ],
)
def ep_dispatch_nodes_kernel(
    ctx, x_ptr, scales_ptr, weights_ptr, tables, node_tables, received, relayed,
    rows_ptr, row_scales_ptr, row_weights_ptr, expert_rows_ptr, dots_ptr,
    num_tokens, chunk_tokens, num_senders, num_relays, here_slots, crossing_slots, items, scale_words, plan,
    ADVANCE: tl.constexpr, FIRST: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    LOCAL: tl.constexpr, PAYLOAD: tl.constexpr,
):
    """Do the same as ``ep_dispatch_kernel`` for a group on several nodes of LOCAL ranks; see the module.

    Signal number ``source * MAX_CHUNKS + chunk`` of a half says that a chunk of the source's tokens has arrived:
    through the network if the source is on our rail, else in our slots.
    """
    NODES: tl.constexpr = RANKS // LOCAL
    items = whole_items(items, PAYLOAD.item, PAYLOAD.aligned)
    scale_words = tl.cast(scale_words, tl.int32)
    num_tokens = tl.cast(num_tokens, tl.int32)
    size, inputs = (items, scale_words), (x_ptr, scales_ptr, weights_ptr)
    outputs = rows_ptr, row_scales_ptr, row_weights_ptr, expert_rows_ptr, dots_ptr
    epoch, half, signal = td.call(ctx, plan)
    signals = td.signal_at(ctx, half, 0)
    me = td.rank(ctx)
    node = me // LOCAL
    summary = summary_at(tables, EXPERTS, RANKS)
    valid = tl.load(summary + VALID)
    pid = tl.program_id(0)
    areas = _areas(ctx, half, LOCAL)
    row_bytes, scale_bytes = staged_bytes(size, PAYLOAD)
    slot_bytes = slot_parts(row_bytes, scale_bytes, K)[2]
    crossing_bytes = crossing_slot_parts(row_bytes, scale_bytes, K, LOCAL)[2]
    area = td.data_at(ctx, half, me)
    arriving = area + 8 * MAX_CHUNKS * RANKS + tl.cast(here_slots, tl.int64) * slot_bytes
    leaving = arriving + tl.cast(crossing_slots, tl.int64) * crossing_bytes

    # A program runs the loops of its kind. It runs none if a peer was missing in the exchange of the counts, or in a
    # void launch, because a peer or the network may still read data of an earlier launch. A rejected routing runs only
    # in its first dispatch, see ``kernel_combine``.
    runs = (valid > 0) | (FIRST & (valid == 0))
    is_void = td.is_void_for_all(signal)
    runs &= is_void == 0
    tl.store(summary + VALID, -1, mask=is_void)  # no combine may use incomplete tables
    is_sender = runs & (pid < num_senders)
    stride = tl.maximum(num_senders, 1)
    work = chunks_at_most(num_tokens, chunk_tokens) * (NODES - 1)
    for piece in range(tl.where(is_sender, pid, work), work, stride):
        to = (node + 1 + piece % (NODES - 1)) % NODES
        chunk = piece // (NODES - 1)
        crossing = tokens_across(node_tables, me, to, valid, RANKS, NODES)
        chunk_size, chunks = chunk_of(crossing, chunk_tokens)
        if chunk < chunks:
            _send_across(
                ctx, half, signal, arriving, leaving, to, chunk, chunk_size, crossing, num_tokens, tables, node_tables,
                inputs, size, K, EXPERTS, RANKS, LOCAL, PAYLOAD,
            )
    chunk_size, chunks = chunk_of(num_tokens, chunk_tokens)
    for chunk in range(tl.where(is_sender, pid, chunks), chunks, stride):
        _send_here(
            ctx, half, signal, areas, chunk, chunk_size, num_tokens, tables, inputs, size, outputs,
            K, EXPERTS, RANKS, LOCAL, PAYLOAD,
        )

    most = chunks_at_most(tl.load(summary + MOST_TOKENS), chunk_tokens)
    number = pid - num_senders
    work = most * (NODES - 1)
    is_relay = runs & (number >= 0) & (number < num_relays)
    for piece in range(tl.where(is_relay, number, work), work, tl.maximum(num_relays, 1)):
        source = (me + LOCAL * (1 + piece % (NODES - 1))) % RANKS
        chunk = piece // (NODES - 1)
        crossing = tokens_across(node_tables, source, node, valid, RANKS, NODES)
        chunk_size, chunks = chunk_of(crossing, chunk_tokens)
        if chunk < chunks:
            # producer: the source's sender of this chunk, through the network
            seen = td.await_put(ctx, signals + source * MAX_CHUNKS + chunk, signal, source)
            if td.completed(seen, signal):
                _relay_chunk(
                    ctx, half, signal, areas, arriving, source, chunk, chunk_size, crossing, tables, node_tables,
                    relayed, size, outputs, FIRST, K, EXPERTS, RANKS, LOCAL, PAYLOAD,
                )
            else:
                tl.store(summary + VALID, -1)  # no combine may use incomplete tables

    if LOCAL > 1:
        number -= num_relays
        work = most * (NODES * (LOCAL - 1))
        first_piece = tl.where(runs & (number >= 0), number, work)
        for piece in range(first_piece, work, tl.maximum(tl.num_programs(0) - num_senders - num_relays, 1)):
            source, chunk = _piece_of_receivers(piece, most, me, RANKS, LOCAL)
            tokens, sender = tokens_of(tables, source, EXPERTS, RANKS), source
            if source // LOCAL != node:
                tokens = tokens_across(node_tables, source, node, valid, RANKS, NODES)
                sender = node * LOCAL + source % LOCAL
            _, chunks = chunk_of(tokens, chunk_tokens)
            if chunk < chunks:
                staged = tl.load(recv_offsets_at(tables, EXPERTS, RANKS) + source)
                # producer: the source's sender of this chunk, or its relay
                seen = td.wait_plan(ctx, signals + source * MAX_CHUNKS + chunk, signal, sender)
                if td.completed(seen, signal):
                    receive_chunk(
                        area, source, chunk, staged, received, size, outputs,
                        FIRST, K, RANKS, PAYLOAD,
                    )
                else:
                    tl.store(summary + VALID, -1)
    td.finish(ctx, ADVANCE, (FIRST | (valid != 0)).to(tl.int32))
