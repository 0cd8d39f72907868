"""Kernels of ``async_all_gather`` for groups on several nodes: each byte crosses the network once per other node.

Each rank sends its shard over the network to the ranks with the same local rank on other nodes (its rail peers), and
these relay it to the other ranks of their node (their node peers). A shard reaches a rank in one of three ways, always
in the slot of its source and with signal number ``source * num_chunks + chunk`` of a half:

    source            how its shard arrives
    a node peer       ``push_to_node`` of the source stores it, as in a group on one node
    a rail peer       ``send_shard`` of the source puts it over the network
    any other rank    ``relay_to_node`` stores it, on the node peer with the local rank of the source

``send_shard`` stages data in this rank's own slot, chunk by chunk, and sends it from there.

Buffer reuse (invariant 3). A call ends on a rank when all shards have arrived there. So every put has arrived before
its receiver ends the call. When a rank has ended call t + 1, all ranks have begun it and thus ended call t, including
all puts of call t from and to this rank. If calls alternate between the halves, this is in time for call t + 2. If
calls use one half, ``begin_nodes_kernel`` of call t + 1 returns only after all ranks have reached it and thus ended
call t. The signal words of this barrier stay in order for the same reason: a rank that has ended call t has received
the shards of all ranks. Each of them was sent after its rank had seen this rank's word of call t, so that word has
arrived before the next one is sent.
"""

import triton.language as tl

from tdkernels import lang as td


def num_pieces(num_comm: int, num_chunks: int, local_world_size: int) -> tuple[int, int]:
    """Return (number of programs or work items that send, number that push and relay), each at most ``num_comm``."""
    return min(num_comm, num_chunks), num_comm if local_world_size > 1 else 0


@td.jit
def source_at(step, me, ranks, local):
    """Return the rank whose shard arrives in position ``step``. Position 0 is this rank.

    The node peers' shards come first, then the rail peers' shards, then the shards that node peers relay.
    ``AsyncAllGather.source`` is the same function on the host.
    """
    elsewhere = ranks // local - 1  # other nodes
    number = tl.maximum(step - local, 0)  # position among the shards from other nodes
    is_there = step >= local
    nodes_down = tl.where(is_there, number % elsewhere + 1, 0)
    down = tl.where(is_there, number // elsewhere, step)
    return (me // local * local + ranks - nodes_down * local) % ranks + (me % local + local - down) % local


@td.jit
def send_shard(
    ctx, shard, half, signal, shard_bytes, chunk_bytes, num_chunks, slot_bytes, worker, num_workers,
    FIXED_HALF: tl.constexpr, COPY_WORDS: tl.constexpr, trace,
):
    """Stage this rank's shard in its own slot and put it from there into the slots of the rail peers.

    The work is shared by ``num_workers`` programs; this is program ``worker``. It has no waits. Each chunk is sent to
    all rail peers before the next one, so that all can start early. A program only puts data that it has stored itself.
    FIXED_HALF: a ``begin_nodes_kernel`` has begun the call. If its wait has failed, nothing is sent, because a peer may
    still read the data of an earlier call.
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
    """Push this rank's shard to the node peers. Arguments and order as in ``push_shard``."""
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
    """Return (source, peer, chunk) of a relay, in the receiver's order of arrival (``source_at``)."""
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
    """Push the rail peers' shards to the node peers as they arrive over the network.

    The work is shared by ``num_workers`` programs; this is program ``worker``. Chunks are relayed in the order in which
    ``send_shard`` sends them, each to local rank + 1 first.
    """
    me = td.rank(ctx)
    ranks = td.num_ranks(ctx)
    local = td.local_ranks(ctx)
    pushes = num_chunks * (local - 1)  # trace events of push_to_node, which come before
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
    """Wait for a chunk of the shard of another rank, however it arrives; return the result of ``wait_plan``.

    If a relayed chunk does not arrive, the error names the relaying rank if its own shard, which it sends first, has
    not arrived either. Otherwise it names the source.
    """
    me = td.rank(ctx)
    local = td.local_ranks(ctx)
    signal_ptr = td.signal_at(ctx, half, source * num_chunks + chunk)
    if (source % local == me % local) & (source != me):
        # producer: send_shard of the source, by the network
        seen = td.await_put(ctx, signal_ptr, signal, source, FOR_TMA=FOR_TMA)
    else:
        relay = me // local * local + source % local  # the source itself, if it is on this node
        if relay != source:
            # producer: push_to_node of the relay
            td.wait_plan(ctx, td.signal_at(ctx, half, relay * num_chunks), signal, relay)
        # producer: push_to_node of the source, or relay_to_node of the relay
        seen = td.wait_plan(ctx, signal_ptr, signal, source, FOR_TMA=FOR_TMA)
    return seen


@td.jit(network=True, do_not_specialize=["plan"])
def begin_nodes_kernel(ctx, plan):
    """Begin a call that gathers into one fixed half: return when the stream of every peer has reached the same call.

    As ``begin_kernel``, with direct stores inside the node and puts over the network.
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
    """Send a shard into the fixed half of all ranks, including this rank, after ``begin_nodes_kernel``.

    The first ``num_send`` programs have no waits. The others relay, and wait for the first programs of other ranks.
    """
    signal = td.signal_of(ctx, td.epoch(ctx), plan)
    # A void launch pushes nothing: a peer, or the network, may still read the data of an earlier launch.
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
    """Wait for a range of chunks of the shards in a range of positions (``source_at``).

    Both ranges exclude their last index.
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
