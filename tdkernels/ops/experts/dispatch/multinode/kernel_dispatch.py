"""Tokens to their experts in a group on several nodes: each crosses the network once for a node.

The rank of our rail on a node (the one of our number there) gets our tokens for it, and passes each on to the ranks of
its node that have an expert of it; there it is put in its rows, as on one node. Programs of three kinds, in this order:

1. Senders. First they take chunks of our tokens for each other node (``listed``), which they gather in our memory, one
   behind the other, and put into that of the rank of our rail there, a chunk with its signal at a time. Then chunks of
   all our tokens, for our own node, as ``ep_dispatch_kernel`` sends them.
2. Relays. They take a chunk that has come by the network and do with it what its sender does on its own node: each
   token is stored in its slots at node peers and goes to its rows on this rank; then the node peers are signalled.
3. Receivers. They take a chunk of a node peer, of its own tokens or of those that it passes on, the former first, and
   copy each token from its slot to its rows.

Senders wait for nobody, relays for senders, receivers for senders and relays (law 1). All chunks are known to all by
the counts: of a rank's tokens for its own node they are those of all its tokens, of those for another node of these.

Memory. A half holds where chunks begin, slots that node peers fill, then what arrives by the network, then what we
send by it: those slots hold besides what all slots do the numbers on the node of the choices' ranks and which of the
tokens for each rank of the node it is. A half is used again two calls later. A rank ends call t + 1 only when it has
heard of every rank's first chunk of it, at first hand or by a relay which waited for it: so all ranks have begun call
t + 1, and have ended call t, in which each has waited for all that was put into its memory. So nothing of call t is
still on its way when call t + 2 writes where it was, nor is it being read.
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
    passed_at,
    passing_at,
    tokens_across,
)


@td.jit
def crossing_slot_parts(row_bytes, scale_bytes, K: tl.constexpr, LOCAL: tl.constexpr):
    """As ``slot_parts``, of a token that crosses the network; see ``routing.crossing_slot_memory``."""
    scales_begin, places_begin, _ = slot_parts(row_bytes, scale_bytes, K)
    return scales_begin, places_begin, (places_begin + 4 * (3 * K + LOCAL) + 127) // 128 * 128


# ---- senders ----


@td.jit
def _token_for(
    tables, weights_ptr, token, num_tokens, node, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """(numbers on a node of the ranks of a token's choices, its rows there, weights; its place among ours for each).

    -1 is nowhere on that node.
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
    """Gather a chunk of our ``crossing`` tokens for a node, and put it where the rank of our rail there passes it on.

    ``arriving`` and ``leaving`` are our own memory for what comes by the network and for what goes.
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
    """The address of every node peer's staging memory; 0 for ourselves. Read once: no cache has it after a wait."""
    me = td.rank(ctx)
    numbers = tl.arange(0, triton.next_power_of_2(LOCAL))
    is_peer = (numbers < LOCAL) & (numbers != me % LOCAL)
    bases = tl.load(ctx + CTX_BASES + me // LOCAL * LOCAL + numbers, mask=is_peer, other=0)
    return tl.where(is_peer, bases + td.data_at(ctx, half, me) - td.symm_base(ctx, me), 0)


@td.jit
def _slots_from(
    areas, tables, node, slot_bytes, EXPERTS: tl.constexpr, RANKS: tl.constexpr, LOCAL: tl.constexpr
):
    """Where at every node peer the slots begin for the tokens of the rank of our rail on ``node``, our own or not."""
    numbers = tl.arange(0, triton.next_power_of_2(LOCAL))
    begin = tl.load(send_offsets_at(tables, EXPERTS, RANKS) + node * LOCAL + numbers, mask=numbers < LOCAL, other=0)
    return areas + 8 * MAX_CHUNKS * RANKS + begin.to(tl.int64) * slot_bytes


@td.jit
def _announce(ctx, half, areas, signal, source, chunk, first_sent, num_sent, CHECK_FAILED: tl.constexpr):
    """Tell node peers where a chunk of the source's tokens begins, and how many it has for them."""
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
    """Send a chunk of our tokens to node peers and to our own rows, and signal it."""
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
def _pass_on(
    ctx, half, signal, areas, arriving, source, chunk, chunk_tokens, crossing, tables, node_tables, passed, size,
    outputs,
    FIRST: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, LOCAL: tl.constexpr,
    PAYLOAD: tl.constexpr,
):
    """Send a chunk of the source's ``crossing`` tokens, which has come, to node peers and to our own rows.

    FIRST: keep what is known of each token.
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
            kept = passed_at(passed, begin + i, K, LOCAL)
            tl.store(kept + choice, dest, mask=choice < K)
            tl.store(kept + K + choice, places, mask=choice < K)
            tl.store(kept + 2 * K + numbers, sent, mask=numbers < LOCAL)
        first_sent = tl.where(sent >= 0, tl.minimum(first_sent, sent), first_sent)
        num_sent += (sent >= 0).to(tl.int32)
    _announce(ctx, half, areas, signal, source, chunk, first_sent, num_sent, True)


# ---- receivers ----


@td.jit
def _piece_of_receivers(piece, chunks, me, RANKS: tl.constexpr, LOCAL: tl.constexpr):
    """(source, chunk) of a piece, of at most so many chunks of a source: first of node peers, then of other nodes."""
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
    ctx, x_ptr, scales_ptr, weights_ptr, tables, node_tables, came, passed,
    rows_ptr, row_scales_ptr, row_weights_ptr, expert_rows_ptr, dots_ptr,
    num_tokens, chunk_tokens, num_senders, num_relays, here_slots, crossing_slots, items, scale_words, plan,
    ADVANCE: tl.constexpr, FIRST: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    LOCAL: tl.constexpr, PAYLOAD: tl.constexpr,
):
    """``ep_dispatch_kernel`` for a group on several nodes of LOCAL ranks; see the module.

    Signal number ``source * MAX_CHUNKS + chunk`` of a half says that a chunk of the source's tokens is here: for a
    source of our rail by the network, for others in our slots.
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
    goes = tl.load(summary + VALID)
    pid = tl.program_id(0)
    areas = _areas(ctx, half, LOCAL)
    row_bytes, scale_bytes = staged_bytes(size, PAYLOAD)
    slot_bytes = slot_parts(row_bytes, scale_bytes, K)[2]
    crossing_bytes = crossing_slot_parts(row_bytes, scale_bytes, K, LOCAL)[2]
    area = td.data_at(ctx, half, me)
    arriving = area + 8 * MAX_CHUNKS * RANKS + tl.cast(here_slots, tl.int64) * slot_bytes
    leaving = arriving + tl.cast(crossing_slots, tl.int64) * crossing_bytes

    # The loops of one kind of program run; none if a peer did not come when the routing was exchanged, or in a void
    # launch: a peer, or the network, may still read what an earlier launch has sent.
    runs = (goes > 0) | (FIRST & (goes == 0))  # of one that was refused only what its call launches: see the combine
    is_void = td.is_void_for_all(signal)
    runs &= is_void == 0
    tl.store(summary + VALID, -1, mask=is_void)  # no combine may go by tables that are not complete
    is_sender = runs & (pid < num_senders)
    stride = tl.maximum(num_senders, 1)
    work = chunks_at_most(num_tokens, chunk_tokens) * (NODES - 1)
    for piece in range(tl.where(is_sender, pid, work), work, stride):
        to = (node + 1 + piece % (NODES - 1)) % NODES
        chunk = piece // (NODES - 1)
        crossing = tokens_across(node_tables, me, to, goes, RANKS, NODES)
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
        crossing = tokens_across(node_tables, source, node, goes, RANKS, NODES)
        chunk_size, chunks = chunk_of(crossing, chunk_tokens)
        if chunk < chunks:
            # producer: the source's sender of this chunk, by the network
            seen = td.await_put(ctx, signals + source * MAX_CHUNKS + chunk, signal, source)
            if td.completed(seen, signal):
                _pass_on(
                    ctx, half, signal, areas, arriving, source, chunk, chunk_size, crossing, tables, node_tables,
                    passed, size, outputs, FIRST, K, EXPERTS, RANKS, LOCAL, PAYLOAD,
                )
            else:
                tl.store(summary + VALID, -1)  # no combine may go by tables that are not complete

    if LOCAL > 1:
        number -= num_relays
        work = most * (NODES * (LOCAL - 1))
        first_piece = tl.where(runs & (number >= 0), number, work)
        for piece in range(first_piece, work, tl.maximum(tl.num_programs(0) - num_senders - num_relays, 1)):
            source, chunk = _piece_of_receivers(piece, most, me, RANKS, LOCAL)
            tokens, sender = tokens_of(tables, source, EXPERTS, RANKS), source
            if source // LOCAL != node:
                tokens = tokens_across(node_tables, source, node, goes, RANKS, NODES)
                sender = node * LOCAL + source % LOCAL
            _, chunks = chunk_of(tokens, chunk_tokens)
            if chunk < chunks:
                staged = tl.load(recv_offsets_at(tables, EXPERTS, RANKS) + source)
                # producer: the source's sender of this chunk, or the relay that it comes by
                seen = td.wait_plan(ctx, signals + source * MAX_CHUNKS + chunk, signal, sender)
                if td.completed(seen, signal):
                    receive_chunk(
                        area, source, chunk, staged, came, size, outputs,
                        FIRST, K, RANKS, PAYLOAD,
                    )
                else:
                    tl.store(summary + VALID, -1)
    td.finish(ctx, ADVANCE, (FIRST | (goes != 0)).to(tl.int32))
