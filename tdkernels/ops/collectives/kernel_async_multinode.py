"""Kernels that gather shards in a group on several nodes: each byte crosses the network once for each other node.

Rank l of a node sends its shard to rank l of every other node, over the network, and each of these relays what comes to
its own node. So a shard comes to a rank by one of three ways, but always into the source's slot, and always under the
signal ``source * num_chunks + chunk`` of a half:

    from our node             ``push_to_node`` of the source stores it, as in a group of one node
    from a rank of our number ``send_shard`` of the source puts it, by the network
    from any other rank       ``relay_to_node`` of the rank of our node that has the source's number stores it

What is sent lies in our own slot: ``send_shard`` stages it there, chunk by chunk.

That memory is used again by a later call, at a moment when nobody reads it or sends from it any more. A call ends on a
rank when all shards have come there, so every put has arrived before its receiver ends the call that it belongs to. A
rank that has ended call t + 1 knows that all ranks have begun it, and so have ended call t: theirs, with all puts of
call t from and to us. Where calls use the halves in turn that is in time for call t + 2. Where they use one half,
``begin_nodes_kernel`` of call t + 1 lets nobody through before all ranks have come to it, and so have ended call t.
The words of the barrier keep their order in the same way: who has ended call t has had the shards of all ranks, each of
which was sent after its rank had seen our word of call t; so that one has arrived before the next is sent.
"""

import triton.language as tl

from tdkernels import lang as td


def num_pieces(num_comm, num_chunks, local_world_size):
    """(how many send, how many push and relay): programs or pieces of work, of which ``num_comm`` may be at it."""
    return min(num_comm, num_chunks), num_comm if local_world_size > 1 else 0


@td.jit
def source_at(step, me, ranks, local):
    """The rank whose shard comes as number ``step``; that of number 0 is our own.

    Those of our node are followed by those of our rail peers (the ranks of our number on other nodes), then come those
    that node peers relay. ``Gather.source`` says the same to the host.
    """
    elsewhere = ranks // local - 1  # other nodes
    number = tl.maximum(step - local, 0)  # among the shards from there
    is_there = step >= local
    nodes_down = tl.where(is_there, number % elsewhere + 1, 0)
    down = tl.where(is_there, number // elsewhere, step)
    return (me // local * local + ranks - nodes_down * local) % ranks + (me % local + local - down) % local


@td.jit
def send_shard(
    ctx, shard, half, signal, shard_bytes, chunk_bytes, num_chunks, slot_bytes, worker, num_workers,
    FIXED_HALF: tl.constexpr, COPY_WORDS: tl.constexpr, trace,
):
    """Stage our shard in our own slot and put it from there into that of our rail peers; one of some programs.

    Waits for nothing. Chunks go round the peers so that all of them can begin early. What is put has been stored by
    the program that puts it. FIXED_HALF: a ``begin_nodes_kernel`` has opened the call; if it has given up, a peer may
    still read what it has gathered before, and nothing is sent.
    """
    me = td.rank(ctx)
    ranks = td.num_ranks(ctx)
    local = td.local_ranks(ctx)
    elsewhere = ranks // local - 1
    slot = td.data_at(ctx, half, me) + me.to(tl.int64) * slot_bytes
    chunk_bytes = tl.cast(chunk_bytes, tl.int64)
    for chunk in range(worker, num_chunks, num_workers):
        start = chunk * chunk_bytes
        num_bytes = tl.minimum(chunk_bytes, shard_bytes - start)
        td.put(slot + start, shard + start, num_bytes, COPY_WORDS)
        for step in range(1, elsewhere + 1):
            peer = (me + step * local) % ranks
            td.mark(trace, "pushes", peer, chunk // num_workers * elsewhere + step - 1)
            # waiters: the peer's tiles of this chunk, or its await_nodes_kernel, and its relay_to_node
            td.put_signal(
                ctx, slot + start, slot + start, num_bytes, td.signal_at(ctx, half, me * num_chunks + chunk), signal,
                peer, CHECK_FAILED=FIXED_HALF,
            )


@td.jit
def push_to_node(
    ctx, shard, half, signal, shard_bytes, chunk_bytes, num_chunks, slot_bytes, worker, num_workers,
    FIXED_HALF: tl.constexpr, COPY_WORDS: tl.constexpr, trace,
):
    """Push our shard to our node peers, as ``push_shard`` does to all peers; one of ``num_workers`` programs."""
    me = td.rank(ctx)
    local = td.local_ranks(ctx)
    others = local - 1
    slot = me.to(tl.int64) * slot_bytes
    chunk_bytes = tl.cast(chunk_bytes, tl.int64)
    for item in range(worker, num_chunks * others, num_workers):
        chunk = item // others
        peer = me // local * local + (me + 1 + item % others) % local
        start = chunk * chunk_bytes
        td.mark(trace, "pushes", peer, item // num_workers)
        dst = td.data_at(ctx, half, peer) + slot + start
        td.put(dst, shard + start, tl.minimum(chunk_bytes, shard_bytes - start), COPY_WORDS)
        # waiter: the peer's tiles of this chunk, or its await_nodes_kernel
        signal_ptr = td.signal_at(ctx, half, me * num_chunks + chunk)
        td.notify(ctx, signal_ptr, peer, signal, CHECK_FAILED=FIXED_HALF)


@td.jit
def relay_of(item, me, ranks, local):
    """(source, peer, chunk) of the relay of a number: the receiver's order of arrival, see ``source_at``."""
    others = local - 1
    elsewhere = ranks // local - 1
    source = (me + ranks - (item % elsewhere + 1) * local) % ranks
    peer = me // local * local + (me + 1 + item // elsewhere % others) % local
    return source, peer, item // (others * elsewhere)


@td.jit
def relay_to_node(
    ctx, half, signal, shard_bytes, chunk_bytes, num_chunks, slot_bytes, worker, num_workers,
    COPY_WORDS: tl.constexpr, trace,
):
    """Push our rail peers' shards, as they come by the network, to our node peers; one of ``num_workers`` programs.

    Chunks come in the order in which ``send_shard`` sends them, and each goes to the next higher number first.
    """
    me = td.rank(ctx)
    ranks = td.num_ranks(ctx)
    local = td.local_ranks(ctx)
    pushes = num_chunks * (local - 1)  # of push_to_node, which come before
    chunk_bytes = tl.cast(chunk_bytes, tl.int64)
    for item in range(worker, pushes * (ranks // local - 1), num_workers):
        source, peer, chunk = relay_of(item, me, ranks, local)
        start = source.to(tl.int64) * slot_bytes + chunk * chunk_bytes
        index = source * num_chunks + chunk
        turn = (pushes - worker + num_workers - 1) // num_workers + 2 * (item // num_workers)
        td.mark(trace, "waits", source, turn)
        seen = td.await_put(ctx, td.signal_at(ctx, half, index), signal, source)  # producer: the source's send_shard
        src = td.consume_token(td.data_at(ctx, half, me) + start, seen)
        td.mark(trace, "pushes", peer, turn + 1)
        num_bytes = tl.minimum(chunk_bytes, shard_bytes - chunk * chunk_bytes)
        td.put(td.data_at(ctx, half, peer) + start, src, num_bytes, COPY_WORDS)
        # waiter: the peer's tiles of this chunk, or its await_nodes_kernel
        td.notify(ctx, td.signal_at(ctx, half, index), peer, signal, CHECK_FAILED=True)


@td.jit
def await_chunk(ctx, half, source, chunk, num_chunks, signal, FOR_TMA: tl.constexpr = False):
    """Wait for a chunk of the shard of ``source``, another rank, by whichever way it comes; what ``wait_plan`` returns.

    When a relayed chunk does not come, the rank that relays is named if nothing of its own shard has come, which it
    sends before; else the source is.
    """
    me = td.rank(ctx)
    local = td.local_ranks(ctx)
    signal_ptr = td.signal_at(ctx, half, source * num_chunks + chunk)
    if (source % local == me % local) & (source != me):
        # producer: send_shard of the source, by the network
        seen = td.await_put(ctx, signal_ptr, signal, source, FOR_TMA=FOR_TMA)
    else:
        relay = me // local * local + source % local  # the source itself, if it is on our node
        if relay != source:
            # producer: push_to_node of the relay
            td.wait_plan(ctx, td.signal_at(ctx, half, relay * num_chunks), signal, relay)
        # producer: push_to_node of the source, or relay_to_node of the relay
        seen = td.wait_plan(ctx, signal_ptr, signal, source, FOR_TMA=FOR_TMA)
    return seen


@td.jit(network=True, do_not_specialize=["plan"])
def begin_nodes_kernel(ctx, plan):
    """Open a call that gathers into one fixed half: return when every peer's stream has come to the same call.

    As ``begin_kernel``, by direct stores inside the node and by the network else.
    """
    me = td.rank(ctx)
    ranks = td.num_ranks(ctx)
    local = td.local_ranks(ctx)
    signal = td.signal_of(ctx, td.epoch(ctx) + 1, plan)
    td.keep_signal(ctx, signal)
    for step in range(1, ranks):
        peer = (me + step) % ranks
        # waiter: the peer's begin_nodes_kernel
        if peer // local == me // local:
            td.notify(ctx, td.ready_at(ctx, me), peer, signal)
        else:
            td.signal(ctx, td.ready_at(ctx, me), signal, peer, CHECK_FAILED=True)  # a void launch sends nothing
    for step in range(1, ranks):
        peer = (me + step) % ranks
        # producer: the peer's begin_nodes_kernel
        if peer // local == me // local:
            td.wait_plan(ctx, td.ready_at(ctx, peer), signal, peer)
        else:
            td.await_put(ctx, td.ready_at(ctx, peer), signal, peer)
    td.finish(ctx)


@td.jit(
    network=True, do_not_specialize=["num_send", "shard_bytes", "chunk_bytes", "num_chunks", "slot_bytes", "plan"]
)
def push_nodes_kernel(
    ctx, x_ptr, num_send, shard_bytes, chunk_bytes, num_chunks, slot_bytes, plan, COPY_WORDS: tl.constexpr
):
    """Push a shard into everybody's fixed half, our own included, after ``begin_nodes_kernel``.

    The first ``num_send`` programs wait for nothing; the others, which relay, wait for those of other ranks.
    """
    signal = td.signal_of(ctx, td.epoch(ctx), plan)
    # A void launch pushes nothing: a peer, or the network, may still read what an earlier launch has pushed.
    num_chunks = tl.where(td.is_void_for_all(signal), 0, num_chunks)
    pid = tl.program_id(0)
    if pid < num_send:
        send_shard(
            ctx, x_ptr.to(tl.int64), 0, signal, shard_bytes, chunk_bytes, num_chunks, slot_bytes,
            pid, num_send, FIXED_HALF=True, COPY_WORDS=COPY_WORDS, trace=(None, 0),
        )
    else:
        num_push = tl.num_programs(0) - num_send
        push_to_node(
            ctx, x_ptr.to(tl.int64), 0, signal, shard_bytes, chunk_bytes, num_chunks, slot_bytes,
            pid - num_send, num_push, FIXED_HALF=True, COPY_WORDS=COPY_WORDS, trace=(None, 0),
        )
        relay_to_node(
            ctx, 0, signal, shard_bytes, chunk_bytes, num_chunks, slot_bytes,
            pid - num_send, num_push, COPY_WORDS=COPY_WORDS, trace=(None, 0),
        )


@td.jit(
    network=True, do_not_specialize=["num_chunks", "first_chunk", "last_chunk", "first_step", "last_step", "plan"]
)
def await_nodes_kernel(ctx, num_chunks, first_chunk, last_chunk, first_step, last_step, plan):
    """Return when chunks of the shards that come as numbers ``first_step`` to ``last_step`` have arrived.

    The last of both are excluded.
    """
    me = td.rank(ctx)
    ranks = td.num_ranks(ctx)
    local = td.local_ranks(ctx)
    signal = td.signal_of(ctx, td.epoch(ctx), plan)
    for step in range(first_step, last_step):
        source = source_at(step, me, ranks, local)
        for chunk in range(first_chunk, last_chunk):
            await_chunk(ctx, 0, source, chunk, num_chunks, signal)
    td.end_wait(ctx)
