"""Kernels of ``async_all_gather``: begin a gather, push this rank's shard to all peers, and wait for shards.

Rank ``source`` sets signal number ``source * num_chunks + chunk`` of a half when it has stored that chunk of its shard
in this rank's memory. In ``ag_gemm`` a chunk can have several consecutive signals (SLICES).
"""

import triton.language as tl

from tdkernels import lang as td


@td.jit
def push_shard(
    ctx, shard, half, signal, shard_bytes, chunk_bytes, num_chunks, slot_bytes, worker, num_workers,
    COPY_OWN: tl.constexpr, COPY_WORDS: tl.constexpr, trace, scales=None, SLICES: tl.constexpr = 1,
):
    """Push this rank's shard to all peers, chunk by chunk, and set a signal per chunk.

    The work is shared by ``num_workers`` programs; this is program ``worker``. Each chunk is sent to all peers before
    the next one, so that all peers can start early. Each rank begins with rank + 1, so that no link is used twice at a
    time.

    ``scales``: further data that is sent with each chunk, before its signal: (address of this rank's, offset of this
    rank's in a half, bytes for a chunk, bytes for the shard). None: only the shard is sent.
    ``SLICES``: consecutive signals of a chunk. All of them are set when the chunk has been sent.
    """
    me = td.rank(ctx)
    others = td.num_ranks(ctx) - 1
    slot = me.to(tl.int64) * slot_bytes
    chunk_bytes = tl.cast(chunk_bytes, tl.int64)
    for item in range(worker, num_chunks * others, num_workers):
        chunk = item // others
        peer = (me + 1 + item % others) % (others + 1)
        start = chunk * chunk_bytes
        td.mark(trace, "pushes", peer, item // num_workers)
        dst = td.data_at(ctx, half, peer) + slot + start
        td.put(dst, shard + start, tl.minimum(chunk_bytes, shard_bytes - start), COPY_WORDS)
        if scales is not None:
            _push_scales(td.data_at(ctx, half, peer), chunk, scales)
        word = td.signal_at(ctx, half, (me * num_chunks + chunk) * SLICES)
        td.notify(ctx, word, peer, signal)  # waiter: the peer's tiles of this chunk
        if SLICES > 1:
            for slice_id in range(1, SLICES):
                td.notify(ctx, word + slice_id, peer, signal)
    if COPY_OWN:
        for chunk in range(worker, num_chunks, num_workers):
            start = chunk * chunk_bytes
            dst = td.data_at(ctx, half, me) + slot + start
            td.put(dst, shard + start, tl.minimum(chunk_bytes, shard_bytes - start), COPY_WORDS)


@td.jit
def _push_scales(data_at_peer, chunk, scales):
    """Store the scales of a chunk in the half at this address of a peer; ``scales`` as for ``push_shard``."""
    src, offset, chunk_bytes, shard_bytes = scales
    start = chunk * chunk_bytes
    td.put(data_at_peer + offset + start, src + start, tl.minimum(chunk_bytes, shard_bytes - start), 512)


@td.jit(do_not_specialize=["plan"])
def begin_kernel(ctx, plan):
    """Begin a call that gathers into one fixed half: return when the stream of every peer has reached the same call.

    Then all ranks have finished reading the data of the previous call. The kernel advances the epoch at once, because
    the pushes of this call are separate launches.
    """
    me = td.rank(ctx)
    ranks = td.num_ranks(ctx)
    signal = td.signal_of(ctx, td.epoch(ctx) + 1, plan)
    td.keep_signal(ctx, signal)
    for step in range(1, ranks):
        # waiter: the peer's begin_kernel
        td.notify(ctx, td.ready_at(ctx, me), (me + step) % ranks, signal)
    for step in range(1, ranks):
        peer = (me + step) % ranks
        td.wait_plan(ctx, td.ready_at(ctx, peer), signal, peer)  # producer: the peer's begin_kernel
    td.announce_failure(ctx)  # before copies by the host, which are executed in any case
    td.finish(ctx)


@td.jit
def end_kernel(ctx):
    """End a call with copies by the host: record a failure if a peer may have overwritten data while it was read."""
    td.check_peers(ctx)


@td.jit(do_not_specialize=["shard_bytes", "chunk_bytes", "num_chunks", "slot_bytes", "plan"])
def push_kernel(
    ctx, x_ptr, shard_bytes, chunk_bytes, num_chunks, slot_bytes, plan, COPY_WORDS: tl.constexpr
):
    """Push a shard into the fixed half of all ranks, including this rank, after ``begin_kernel``. It has no waits."""
    signal = td.signal_of(ctx, td.epoch(ctx), plan)
    # A void launch pushes nothing: a peer may still read the data of an earlier launch.
    num_chunks = tl.where(td.is_void_for_all(signal), 0, num_chunks)
    push_shard(
        ctx, x_ptr.to(tl.int64), 0, signal, shard_bytes, chunk_bytes, num_chunks, slot_bytes,
        tl.program_id(0), tl.num_programs(0), COPY_OWN=True, COPY_WORDS=COPY_WORDS, trace=(None, 0),
    )


@td.jit(do_not_specialize=["index", "peer", "plan"])
def notify_kernel(ctx, index, peer, plan, CHECK_FAILED: tl.constexpr):
    """Set signal number ``index`` at a peer, after the host has copied data to it."""
    signal = td.signal_of(ctx, td.epoch(ctx), plan)
    # waiter: the peer's await_kernel, or its tiles of this chunk
    td.notify(ctx, td.signal_at(ctx, 0, index), peer, signal, CHECK_FAILED=CHECK_FAILED)


@td.jit(do_not_specialize=["num_signals", "first_signal", "last_signal", "first_step", "last_step", "plan"])
def await_kernel(ctx, num_signals, first_signal, last_signal, first_step, last_step, plan):
    """Wait for a range of the signals of rank - ``first_step``, rank - ``first_step`` - 1, and so on.

    num_signals: signals of a rank, one or more for each chunk
    Both ranges, of signals and of steps, exclude their last index.
    """
    me = td.rank(ctx)
    ranks = td.num_ranks(ctx)
    signal = td.signal_of(ctx, td.epoch(ctx), plan)
    for step in range(first_step, last_step):
        source = (me + ranks - step) % ranks
        for number in range(first_signal, last_signal):
            # producer: push_kernel, the copy engine, notify_kernel or the kernel of ag_gemm of the source
            td.wait_plan(ctx, td.signal_at(ctx, 0, source * num_signals + number), signal, source)
    td.end_wait(ctx)
