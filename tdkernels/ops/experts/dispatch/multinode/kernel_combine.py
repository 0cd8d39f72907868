"""Combine kernel for groups on several nodes: one row per token and node crosses the network.

On each node, the rank that relayed a token in the dispatch sums the token's rows on that node, rounds the sum to the
dtype of the rows, and sends it to the token's rank. The token's rank adds the sums of all nodes in node order, in fp32.
It computes the sum of its own node itself, without rounding. A node's sum is computed as in ``ep_combine_kernel``: the
parts of its ranks in rank order ("per_rank"; each part is rounded when it is sent), or the weighted rows in the order
of the assignments (PER_EXPERT; nothing is rounded before the node's sum). There are three kinds of programs, in this
order:

1. Senders. They take a chunk of a rank's tokens, with the chunks of the dispatch to our node, and store the results of
   this rank in the memory of the rank that computes the sum: the token's rank, or the rank of its rail on our node.
   They signal the chunk.
2. Relays. They take a chunk of the tokens that this rank has relayed, wait for all node peers, compute the sums, and
   put them into the memory of the tokens' rank, with a signal.
3. Receivers. They take a chunk of our own tokens, wait for node peers and for the chunks of other nodes that contain
   any of these tokens, and compute the sums.

Progress (invariant 1). Senders do not wait, relays wait for senders, receivers wait for senders and relays.

Memory. A half has the slots that node peers write, then the slots that are sent through the network, then the slots
that the network writes.

Buffer reuse (invariant 3). A half is used again two calls later. A rank finishes call t + 1 only after it has received
the first chunk of every rank, from node peers and from relays that waited for their node peers. So all ranks have begun
call t + 1 and have finished call t, in which each rank waited for everything that was put into its memory. When call
t + 2 writes to the half, no data of call t are being sent from there or read.
"""

import triton
import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.experts.dispatch.kernel_combine import own_token, part_bytes, row_addresses, send_chunk, slot_bytes
from tdkernels.ops.experts.dispatch.layout import (
    MAX_CHUNKS,
    MOST_TOKENS,
    VALID,
    chunk_of,
    chunks_at_most,
    parts_at,
    sent_at,
    summary_at,
    tokens_of,
    whole_items,
)
from tdkernels.ops.experts.dispatch.multinode.layout import (
    going_at,
    home_at,
    number_at,
    passing_at,
    relayed_at,
    tokens_across,
)


@td.jit
def crossing_bytes(items, DTYPE: tl.constexpr, K: tl.constexpr):
    """Return the bytes of a slot with a node's sum and K numbers; see ``routing.sum_slot_memory``."""
    return (part_bytes(items, DTYPE) + 4 * K + 127) // 128 * 128


@td.jit
def _add_rows(
    total, addresses, weights, block, items, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """Add a block of each row whose address is not 0, in order. ``weights`` are factors of the rows, or None."""
    turns, count = td.compact_indices(addresses != 0)
    offs = block * BLOCK + tl.arange(0, BLOCK)
    for turn in range(0, count, 2):  # two loads are in flight at a time
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


@td.jit
def _slots_at(
    ctx, half, tables, node, sent, bytes_of_slot, EXPERTS: tl.constexpr, RANKS: tl.constexpr, LOCAL: tl.constexpr
):
    """Return the addresses of node peers' results for a token of the rank of our rail on ``node``; 0 for none."""
    numbers = tl.arange(0, triton.next_power_of_2(LOCAL))
    me = td.rank(ctx)
    there = (numbers < LOCAL) & (numbers != me % LOCAL) & (sent >= 0)
    first = tl.load(parts_at(tables, EXPERTS, RANKS) + node * LOCAL + numbers, mask=there, other=0)
    return tl.where(there, td.data_at(ctx, half, me) + (first + sent).to(tl.int64) * bytes_of_slot, 0)


@td.jit
def _slots_of_choices(slots, dest, LOCAL: tl.constexpr):
    """Return the slot with the row of each assignment, 0 for none. ``slots`` is indexed by local rank, ``dest`` too."""
    numbers = tl.arange(0, triton.next_power_of_2(LOCAL))
    return td.sum_of(tl.where(dest[:, None] == numbers[None, :], slots[None, :], 0), 1)


@td.jit
def _sum_on_node(
    local, slots, choice_slots, own, weights, block, items, PER_EXPERT: tl.constexpr, DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Return a block of the sum of a token's rows on our node: node peers' results in slots, and rows on this rank."""
    total = tl.full((BLOCK,), 0.0, tl.float32)
    if PER_EXPERT:
        choice = tl.arange(0, own.shape[0])
        addresses = tl.where(choice_slots != 0, choice_slots + choice * part_bytes(items, DTYPE), own)
        return _add_rows(total, addresses, weights, block, items, DTYPE, ALIGNED, BLOCK)
    else:
        numbers = tl.arange(0, slots.shape[0])
        before, after = tl.where(numbers < local, slots, 0), tl.where(numbers > local, slots, 0)
        total = _add_rows(total, before, None, block, items, DTYPE, ALIGNED, BLOCK)
        total = _add_rows(total, own, weights, block, items, DTYPE, ALIGNED, BLOCK)
        return _add_rows(total, after, None, block, items, DTYPE, ALIGNED, BLOCK)


# ---- relays ----


@td.jit
def _send_sums(
    ctx, half, leaving, arriving, signal, owner, chunk, chunk_tokens, crossing,
    rows_ptr, row_weights_ptr, row_numbers_ptr, tables, node_tables, relayed, items,
    PER_EXPERT: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, LOCAL: tl.constexpr,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Sum our node's rows for a chunk of the owner's ``crossing`` tokens, and put the sums into the owner's memory.

    ``leaving`` and ``arriving`` are the addresses of our slots that the network reads, and that it writes.
    """
    NODES: tl.constexpr = RANKS // LOCAL
    choice, numbers = tl.arange(0, triton.next_power_of_2(K)), tl.arange(0, triton.next_power_of_2(LOCAL))
    me = td.rank(ctx)
    local, node = me % LOCAL, owner // LOCAL
    parts, bytes_of_slot = slot_bytes(items, DTYPE, K, PER_EXPERT, True)
    bytes_of_sum = crossing_bytes(items, DTYPE, K)
    blocks = (items + BLOCK - 1) // BLOCK
    start = chunk * chunk_tokens
    end = tl.minimum(start + chunk_tokens, crossing)
    begin = tl.load(passing_at(node_tables, node, RANKS, NODES))
    first = leaving + (begin + start).to(tl.int64) * bytes_of_sum
    for i in range(start, end):
        kept = relayed_at(relayed, begin + i, K, LOCAL)
        dest = tl.load(kept + choice, mask=choice < K, other=-1)
        places = tl.load(kept + K + choice, mask=choice < K, other=-1)
        sent = tl.load(kept + 2 * K + numbers, mask=numbers < LOCAL, other=-1)
        here = tl.where(dest == local, places, -1)
        own = row_addresses(rows_ptr, here, items, DTYPE)
        slots = _slots_at(ctx, half, tables, node, sent, bytes_of_slot, EXPERTS, RANKS, LOCAL)
        choice_slots = _slots_of_choices(slots, dest, LOCAL)
        numbers_at = (choice_slots + parts).to(tl.pointer_type(tl.float32)) + choice
        away = choice_slots != 0
        weights = tl.full(places.shape, 1.0, tl.float32)
        if row_weights_ptr is not None:
            weights = tl.load(row_weights_ptr + here, mask=here >= 0, other=0.0)
            if PER_EXPERT:
                weights = tl.where(away, tl.load(numbers_at + K, mask=away, other=0.0), weights)
        to = first + (i - start) * bytes_of_sum
        for block in range(blocks):
            offs = block * BLOCK + tl.arange(0, BLOCK)
            total = _sum_on_node(
                local, slots, choice_slots, own, weights, block, items, PER_EXPERT, DTYPE, ALIGNED, BLOCK
            )
            tl.store(td.pointer_to(to, DTYPE) + offs, td.from_float32(total, DTYPE), mask=offs < items)
        if row_numbers_ptr is not None:
            received = tl.load(numbers_at, mask=away, other=0.0)
            ours = tl.load(row_numbers_ptr + here, mask=here >= 0, other=0.0)
            numbers_to = (to + part_bytes(items, DTYPE)).to(tl.pointer_type(tl.float32)) + choice
            tl.store(numbers_to, tl.where(away, received, ours), mask=choice < K)
    there = arriving + (tl.load(home_at(node_tables, node, RANKS, NODES)) + start).to(tl.int64) * bytes_of_sum
    signal_ptr = td.signal_at(ctx, half, 0) + me * MAX_CHUNKS + chunk
    # waiter: the owner's receivers of the chunks with these tokens
    if end > start:
        td.put_signal(ctx, there, first, (end - start) * bytes_of_sum, signal_ptr, signal, owner, CHECK_FAILED=True)
    else:
        td.signal(ctx, signal_ptr, signal, owner, CHECK_FAILED=True)


# ---- receivers ----


@td.jit
def _numbers_before(node_tables, token, node, RANKS: tl.constexpr, NODES: tl.constexpr):
    """Return (number of our earlier tokens for a node, 1 if this token is for it too, else 0)."""
    number = tl.load(number_at(node_tables, token, node, RANKS, NODES))
    return tl.where(number >= 0, number, -1 - number), (number >= 0).to(tl.int32)


@td.jit
def _await_sums(
    ctx, signals, signal, valid, chunk, start, end, chunk_tokens, node_tables, RANKS: tl.constexpr, LOCAL: tl.constexpr
):
    """Wait for the sums of other nodes for our tokens from ``start`` to ``end``.

    With chunk 0, wait at least for the first chunk of each node (invariant 3).
    """
    NODES: tl.constexpr = RANKS // LOCAL
    me = td.rank(ctx)
    for step in range(1, NODES):
        node = (me // LOCAL + step) % NODES
        size, _ = chunk_of(tokens_across(node_tables, me, node, valid, RANKS, NODES), chunk_tokens)
        first_chunk, chunks = 0, 0
        if end > start:
            first, _ = _numbers_before(node_tables, start, node, RANKS, NODES)
            last, is_one = _numbers_before(node_tables, end - 1, node, RANKS, NODES)
            first_chunk, chunks = first // size, (last + is_one + size - 1) // size
        if chunk == 0:
            first_chunk, chunks = 0, tl.maximum(chunks, 1)
        for number in range(first_chunk, chunks):
            source = node * LOCAL + me % LOCAL
            # producer: the source's relay of this chunk, through the network
            td.await_put(ctx, signals + source * MAX_CHUNKS + number, signal, source)


@td.jit
def _receive_chunk(
    ctx, half, arriving, chunk, start, end, num_tokens,
    rows_ptr, row_numbers_ptr, weights_ptr, tables, node_tables, y_ptr, numbers_ptr, items,
    PER_EXPERT: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, LOCAL: tl.constexpr,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute the sums of our tokens from ``start`` to ``end``, from received data and the rows on this rank."""
    NODES: tl.constexpr = RANKS // LOCAL
    choice, nodes = tl.arange(0, triton.next_power_of_2(K)), tl.arange(0, triton.next_power_of_2(NODES))
    numbers = tl.arange(0, triton.next_power_of_2(LOCAL))
    me = td.rank(ctx)
    node, local = me // LOCAL, me % LOCAL
    parts, bytes_of_slot = slot_bytes(items, DTYPE, K, PER_EXPERT, True)
    bytes_of_sum = crossing_bytes(items, DTYPE, K)
    blocks = (items + BLOCK - 1) // BLOCK
    begin = tl.load(going_at(node_tables, nodes, RANKS, NODES), mask=nodes < NODES, other=0)
    for token in range(start, end):
        dest, places, weights = own_token(tables, weights_ptr, token, num_tokens, K, EXPERTS, RANKS)
        on_node = tl.where((dest >= 0) & (dest // LOCAL == node), dest % LOCAL, -1)
        here = tl.where(dest == me, places, -1)
        own = row_addresses(rows_ptr, here, items, DTYPE)
        sent_ptr = sent_at(tables, token, num_tokens, K, EXPERTS, RANKS) + node * LOCAL
        sent = tl.load(sent_ptr + numbers, mask=numbers < LOCAL, other=-1)
        slots = _slots_at(ctx, half, tables, node, sent, bytes_of_slot, EXPERTS, RANKS, LOCAL)
        choice_slots = _slots_of_choices(slots, on_node, LOCAL)
        number = tl.load(number_at(node_tables, token, nodes, RANKS, NODES), mask=nodes < NODES, other=-1)
        sums = tl.where(number >= 0, arriving + (begin + number).to(tl.int64) * bytes_of_sum, 0)
        for block in range(blocks):
            offs = block * BLOCK + tl.arange(0, BLOCK)
            total = tl.full((BLOCK,), 0.0, tl.float32)
            total = _add_rows(total, tl.where(nodes < node, sums, 0), None, block, items, DTYPE, ALIGNED, BLOCK)
            total += _sum_on_node(
                local, slots, choice_slots, own, weights, block, items, PER_EXPERT, DTYPE, ALIGNED, BLOCK
            )
            total = _add_rows(total, tl.where(nodes > node, sums, 0), None, block, items, DTYPE, ALIGNED, BLOCK)
            y = y_ptr.to(tl.int64) + tl.cast(token, tl.int64) * items * (DTYPE.primitive_bitwidth // 8)
            tl.store(td.pointer_to(y, DTYPE, ALIGNED) + offs, td.from_float32(total, DTYPE), mask=offs < items)
        if row_numbers_ptr is not None:
            of_nodes = _slots_of_choices(sums, tl.where(dest >= 0, dest // LOCAL, -1), NODES)
            received_at = tl.where(of_nodes != 0, of_nodes + part_bytes(items, DTYPE), choice_slots + parts)
            away = (of_nodes != 0) | (choice_slots != 0)
            received = tl.load(received_at.to(tl.pointer_type(tl.float32)) + choice, mask=away, other=0.0)
            ours = tl.load(row_numbers_ptr + here, mask=here >= 0, other=0.0)
            entry = tl.cast(token, tl.int64) * K + choice
            tl.store(numbers_ptr + entry, tl.where(away, received, ours), mask=choice < K)


@td.jit(
    network=True,
    do_not_specialize=[
        "num_tokens", "chunk_tokens", "num_senders", "num_relays", "here_slots", "crossing_slots", "items", "plan",
    ],
)
def ep_combine_nodes_kernel(
    ctx, rows_ptr, row_weights_ptr, row_numbers_ptr, weights_ptr, tables, node_tables, received, relayed,
    y_ptr, numbers_ptr, num_tokens, chunk_tokens, num_senders, num_relays, here_slots, crossing_slots, items, plan,
    ADVANCE: tl.constexpr, PER_EXPERT: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    LOCAL: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Do the same as ``ep_combine_kernel`` for a group on several nodes of LOCAL ranks; see the module.

    Signal number ``(m * LOCAL + l) * MAX_CHUNKS + chunk`` of a half says that the results of local rank l on our node,
    for a chunk of tokens of the rank of our rail on node m, are in our slots. If l is our own local rank, it says that
    the sums of node m for a chunk of our own tokens have arrived.
    """
    NODES: tl.constexpr = RANKS // LOCAL
    items = whole_items(items, DTYPE, ALIGNED)
    num_tokens = tl.cast(num_tokens, tl.int32)
    epoch, half, signal = td.call(ctx, plan)
    signals = td.signal_at(ctx, half, 0)
    me = td.rank(ctx)
    node = me // LOCAL
    summary = summary_at(tables, EXPERTS, RANKS)
    # A void launch does nothing, because a peer or the network may still read data of an earlier launch.
    valid = tl.where(td.is_void_for_all(signal), -1, tl.load(summary + VALID))
    pid = tl.program_id(0)
    bytes_of_slot = slot_bytes(items, DTYPE, K, PER_EXPERT, True)[1]
    leaving = td.data_at(ctx, half, me) + tl.cast(here_slots, tl.int64) * bytes_of_slot
    arriving = leaving + tl.cast(crossing_slots, tl.int64) * crossing_bytes(items, DTYPE, K)
    most = chunks_at_most(tl.load(summary + MOST_TOKENS), chunk_tokens)

    # A program runs the loop of its kind, or none if a peer was missing in the exchange of the counts.
    if LOCAL > 1:
        PEERS: tl.constexpr = NODES * (LOCAL - 1)
        work = most * PEERS
        is_sender = (valid > 0) & (pid < num_senders)
        for piece in range(tl.where(is_sender, pid, work), work, tl.maximum(num_senders, 1)):
            chunk = piece // PEERS
            # Tokens of other nodes come first, because their results take longer.
            owner_node = (node + 1 + piece % PEERS // (LOCAL - 1)) % NODES
            owner = owner_node * LOCAL + (me % LOCAL + 1 + piece % PEERS % (LOCAL - 1)) % LOCAL
            tokens = tokens_of(tables, owner, EXPERTS, RANKS)
            if owner_node != node:
                tokens = tokens_across(node_tables, owner, node, valid, RANKS, NODES)
            _, chunks = chunk_of(tokens, chunk_tokens)
            if chunk < chunks:
                send_chunk(
                    ctx, half, signal, owner, chunk, rows_ptr, row_weights_ptr, row_numbers_ptr, tables, received,
                    items, PER_EXPERT, K, EXPERTS, RANKS, LOCAL, DTYPE, ALIGNED, BLOCK, False, (None, 0),
                )

    number = pid - num_senders
    work = most * (NODES - 1)
    is_relay = (valid > 0) & (number >= 0) & (number < num_relays)
    for piece in range(tl.where(is_relay, number, work), work, tl.maximum(num_relays, 1)):
        owner = (me + LOCAL * (1 + piece % (NODES - 1))) % RANKS
        chunk = piece // (NODES - 1)
        crossing = tokens_across(node_tables, owner, node, valid, RANKS, NODES)
        size, chunks = chunk_of(crossing, chunk_tokens)
        if chunk < chunks:
            # producer: every node peer's sender of this chunk
            first_signal = signals + owner // LOCAL * LOCAL * MAX_CHUNKS + chunk
            td.wait_plan_node(ctx, first_signal, MAX_CHUNKS, signal)
            _send_sums(
                ctx, half, leaving, arriving, signal, owner, chunk, size, crossing,
                rows_ptr, row_weights_ptr, row_numbers_ptr, tables, node_tables, relayed, items,
                PER_EXPERT, K, EXPERTS, RANKS, LOCAL, DTYPE, ALIGNED, BLOCK,
            )

    number -= num_relays
    size, chunks = chunk_of(num_tokens, chunk_tokens)
    first_chunk = tl.where((valid >= 0) & (number >= 0), number, chunks)
    for chunk in range(first_chunk, chunks, tl.maximum(tl.num_programs(0) - num_senders - num_relays, 1)):
        start = chunk * size
        end = tl.minimum(start + size, num_tokens)
        if valid > 0:
            # producer: every node peer's sender of this chunk
            td.wait_plan_node(ctx, signals + node * LOCAL * MAX_CHUNKS + chunk, MAX_CHUNKS, signal)
            _await_sums(ctx, signals, signal, valid, chunk, start, end, chunk_tokens, node_tables, RANKS, LOCAL)
        _receive_chunk(
            ctx, half, arriving, chunk, start, end, num_tokens,
            rows_ptr, row_numbers_ptr, weights_ptr, tables, node_tables, y_ptr, numbers_ptr, items,
            PER_EXPERT, K, EXPERTS, RANKS, LOCAL, DTYPE, ALIGNED, BLOCK,
        )
    td.finish(ctx, ADVANCE, (valid != 0).to(tl.int32))
