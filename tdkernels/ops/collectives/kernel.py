"""Kernels of all_gather, reduce_scatter and all_reduce: a program exchanges chunks with the same program on the peers.

A message is divided into chunks (``piece``) of ``piece_blocks`` blocks. A program processes every num_programs-th
chunk: it stores the chunk in the peers' buffers, sets one signal for it at each peer, waits for the signals of the same
chunk from all peers, and copies the received data, or its sum, to the output. There is no barrier: call t uses half
t mod 2, and no rank can finish call t + 1 before all ranks have begun it, because each rank waits for all ranks.

Progress (invariant 1). A program waits only for programs with the same id on the peers. They send a chunk before they
wait for it, so it suffices that programs start in the order of their ids. Several programs per SM hide the latency of
signals: while some wait, others send and copy.

A load takes far longer than the work on its result, so four loads are in flight at a time. Addresses in buffers are
multiples of 16. ALIGNED means that addresses in x and in the output, and the length, are multiples of 16 bytes too.
Then 16 bytes are moved at once.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.context import MAX_RANKS
from tdkernels.ops.common.rank_reduce import reduce_in_tree


@td.jit
def _begin(ctx, plan):
    """Begin a call; return (rank, number of ranks, signal, first signal word, offset of the half in a buffer, sent).

    ``sent`` is whether data is stored at peers, for masks. It is not in a void launch (``td.is_void``), because a peer
    may still read the data of an earlier launch. The context table is read only once: after a wait it is not in L1.
    """
    me = td.rank(ctx)
    epoch, half, signal = td.call(ctx, plan)
    area = td.data_at(ctx, half, me) - td.symm_base(ctx, me)
    return me, td.num_ranks(ctx), signal, td.signal_at(ctx, half, 0), area, td.is_void(signal) == 0


@td.jit
def _length(n, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr):
    """Return ``n`` as int64. If ALIGNED, the compiler knows that ``n`` items are a multiple of 16 bytes."""
    n = tl.cast(n, tl.int64)
    return n // (16 // ITEM_BYTES) * (16 // ITEM_BYTES) if ALIGNED else n


@td.jit
def _blocks(left, piece_blocks, BLOCK: tl.constexpr):
    """Return the number of blocks of a chunk, if ``left`` items are left from its beginning."""
    return tl.minimum((left + BLOCK - 1) // BLOCK, tl.cast(piece_blocks, tl.int64)).to(tl.int32)


@td.jit
def _first_block(
    x_ptr, piece, piece_blocks, n,
    DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Load the first block of a chunk of x. Nothing is loaded for a chunk that does not exist."""
    start = tl.cast(piece, tl.int64) * piece_blocks * BLOCK
    offs = tl.arange(0, BLOCK)
    x = td.pointer_to(x_ptr.to(tl.int64) + start * ITEM_BYTES, DTYPE, ALIGNED)
    return tl.load(x + offs, mask=offs < n - start)


@td.jit
def _send_to_all(
    ctx, me, ranks, block, x, slot, y, left, sent, blocks,
    KEEP: tl.constexpr, DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Store ``left`` items of blocks at address x in every peer's buffer, at offset ``slot``; if KEEP, also at y.

    ``block`` is the first block, which is already loaded. Nothing is stored at peers if not ``sent``.
    """
    offs = tl.arange(0, BLOCK)
    for b in range(blocks):
        start = tl.cast(b, tl.int64) * BLOCK
        mask = offs < left - start
        after = start + BLOCK  # the next block is loaded while this one is stored
        ahead = tl.load(
            td.pointer_to(x + after * ITEM_BYTES, DTYPE, ALIGNED) + offs, mask=(offs < left - after) & (b + 1 < blocks)
        )
        for step in range(1, ranks):
            dst = td.symm_base(ctx, (me + step) % ranks) + slot + start * ITEM_BYTES
            tl.store(td.pointer_to(dst, DTYPE) + offs, block, mask=mask & sent)
        if KEEP:
            tl.store(td.pointer_to(y + start * ITEM_BYTES, DTYPE, ALIGNED) + offs, block, mask=mask)
        block = ahead


@td.jit
def _mask_of(i, me, ranks, offs, left, spacing):
    """Return the mask of the items of peer ``me + 1 + i``. The items of rank r begin ``r * spacing`` items later."""
    return (offs < left - (me + 1 + i) % ranks * spacing) & (i < ranks - 1)


@td.jit
def _read_from(
    i, me, ranks, first, stride, offs, left, spacing, DTYPE: tl.constexpr, ALIGNED: tl.constexpr
):
    """Load the block of peer ``me + 1 + i``. The block of rank r is at address ``first + r * stride``."""
    address = first + (me + 1 + i) % ranks * stride
    return tl.load(td.pointer_to(address, DTYPE, ALIGNED) + offs, mask=_mask_of(i, me, ranks, offs, left, spacing))


@td.jit
def _send_to(ctx, i, me, ranks, slot, part, offs, left, spacing, sent, DTYPE: tl.constexpr):
    """Store a part in the buffer of peer ``me + 1 + i``, at offset ``slot``, if ``sent``."""
    dst = td.symm_base(ctx, (me + 1 + i) % ranks) + slot
    tl.store(td.pointer_to(dst, DTYPE) + offs, part, mask=_mask_of(i, me, ranks, offs, left, spacing) & sent)


@td.jit
def _send_to_each(
    ctx, me, ranks, x, stride, slot, left, spacing, sent, blocks,
    DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    """For every peer r, store blocks at address ``x + r * stride`` in its buffer, at offset ``slot``, if ``sent``.

    The blocks for peer r have ``left - r * spacing`` items.
    """
    offs = tl.arange(0, BLOCK)
    for b in range(blocks):
        start = tl.cast(b, tl.int64) * BLOCK
        src = x + start * ITEM_BYTES
        dst = slot + start * ITEM_BYTES
        rest = left - start
        for i in range(0, ranks - 1, 4):
            part0 = _read_from(i, me, ranks, src, stride, offs, rest, spacing, DTYPE, ALIGNED)
            part1 = _read_from(i + 1, me, ranks, src, stride, offs, rest, spacing, DTYPE, ALIGNED)
            part2 = _read_from(i + 2, me, ranks, src, stride, offs, rest, spacing, DTYPE, ALIGNED)
            part3 = _read_from(i + 3, me, ranks, src, stride, offs, rest, spacing, DTYPE, ALIGNED)
            _send_to(ctx, i, me, ranks, dst, part0, offs, rest, spacing, sent, DTYPE)
            _send_to(ctx, i + 1, me, ranks, dst, part1, offs, rest, spacing, sent, DTYPE)
            _send_to(ctx, i + 2, me, ranks, dst, part2, offs, rest, spacing, sent, DTYPE)
            _send_to(ctx, i + 3, me, ranks, dst, part3, offs, rest, spacing, sent, DTYPE)


@td.jit
def _bring(i, me, ranks, y, stride, part, offs, left, spacing, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Store the part of peer ``me + 1 + i`` in the output."""
    address = y + (me + 1 + i) % ranks * stride
    tl.store(td.pointer_to(address, DTYPE, ALIGNED) + offs, part, mask=_mask_of(i, me, ranks, offs, left, spacing))


@td.jit
def _receive_from_each(
    me, ranks, slots, slot_bytes, y, stride, left, spacing, blocks,
    DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    """For every peer r, copy blocks from ``slots + r * slot_bytes`` in this rank's buffer to ``y + r * stride``."""
    offs = tl.arange(0, BLOCK)
    for b in range(blocks):
        start = tl.cast(b, tl.int64) * BLOCK
        src = slots + start * ITEM_BYTES
        dst = y + start * ITEM_BYTES
        rest = left - start
        for i in range(0, ranks - 1, 4):
            part0 = _read_from(i, me, ranks, src, slot_bytes, offs, rest, spacing, DTYPE, True)
            part1 = _read_from(i + 1, me, ranks, src, slot_bytes, offs, rest, spacing, DTYPE, True)
            part2 = _read_from(i + 2, me, ranks, src, slot_bytes, offs, rest, spacing, DTYPE, True)
            part3 = _read_from(i + 3, me, ranks, src, slot_bytes, offs, rest, spacing, DTYPE, True)
            _bring(i, me, ranks, dst, stride, part0, offs, rest, spacing, DTYPE, ALIGNED)
            _bring(i + 1, me, ranks, dst, stride, part1, offs, rest, spacing, DTYPE, ALIGNED)
            _bring(i + 2, me, ranks, dst, stride, part2, offs, rest, spacing, DTYPE, ALIGNED)
            _bring(i + 3, me, ranks, dst, stride, part3, offs, rest, spacing, DTYPE, ALIGNED)


@td.jit
def _part_of(source, me, ranks, parts, part_bytes, offs, mask, DTYPE: tl.constexpr):
    """Load a peer's part of a sum; zeros if ``source`` is this rank or not a rank."""
    is_peer = (source < ranks) & (source != me)
    return tl.load(td.pointer_to(parts + source * part_bytes, DTYPE) + offs, mask=mask & is_peer, other=0.0)


@td.jit
def _sum_of_ranks(
    me, ranks, x, parts, part_bytes, offs, mask, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, TREE: tl.constexpr
):
    """Return the sum in fp32, as DTYPE; own part at x, part of rank r at parts + r * part_bytes.

    It is in rank order, or if TREE, the number of ranks, is not 0, by ``reduce_in_tree``.
    """
    own = tl.load(td.pointer_to(x, DTYPE, ALIGNED) + offs, mask=mask, other=0.0)
    if TREE:
        total = reduce_in_tree(parts, part_bytes, offs, mask, td.to_float32(own), me, 0, TREE, DTYPE)
        return td.from_float32(total, DTYPE)
    total = tl.full(own.shape, 0.0, tl.float32)
    for source in range(0, ranks, 4):
        part0 = _part_of(source, me, ranks, parts, part_bytes, offs, mask, DTYPE)
        part1 = _part_of(source + 1, me, ranks, parts, part_bytes, offs, mask, DTYPE)
        part2 = _part_of(source + 2, me, ranks, parts, part_bytes, offs, mask, DTYPE)
        part3 = _part_of(source + 3, me, ranks, parts, part_bytes, offs, mask, DTYPE)
        # This adds zero, but depends on all four loads. Otherwise the assembler would move each load after the previous
        # addition to save registers.
        total += td.to_float32(tl.where(ranks > MAX_RANKS, (part0 + part1) + (part2 + part3), 0.0))
        total += td.to_float32(tl.where(source == me, own, part0))
        total += td.to_float32(tl.where(source + 1 == me, own, part1))
        total += td.to_float32(tl.where(source + 2 == me, own, part2))
        total += td.to_float32(tl.where(source + 3 == me, own, part3))
    return td.from_float32(total, DTYPE)


@td.jit
def _sum_blocks(
    ctx, me, ranks, x, parts, part_bytes, sums, z, left, sent, blocks,
    SEND: tl.constexpr, DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    TREE: tl.constexpr,
):
    """Store the sums of blocks in z; own part at address x, part of rank r at ``parts + r * part_bytes``.

    SEND: also store them in every peer's buffer, at offset ``sums``, if ``sent``.
    """
    offs = tl.arange(0, BLOCK)
    for b in range(blocks):
        start = tl.cast(b, tl.int64) * BLOCK
        at = start * ITEM_BYTES
        mask = offs < left - start
        total = _sum_of_ranks(me, ranks, x + at, parts + at, part_bytes, offs, mask, DTYPE, ALIGNED, TREE)
        if SEND:
            for step in range(1, ranks):
                dst = td.symm_base(ctx, (me + step) % ranks) + sums + at
                tl.store(td.pointer_to(dst, DTYPE) + offs, total, mask=mask & sent)
        tl.store(td.pointer_to(z + at, DTYPE, ALIGNED) + offs, total, mask=mask)


@td.jit
def _pieces(n, piece_blocks, ITEM_BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """Return (number of chunks of n items, bytes of a slot for these chunks)."""
    piece = tl.cast(piece_blocks, tl.int64) * BLOCK
    pieces = (n + piece - 1) // piece
    return pieces.to(tl.int32), pieces * piece * ITEM_BYTES


# Each kernel is compiled once per block size and type, for all lengths, plans and numbers of programs.
@td.jit(do_not_specialize=["n", "piece_blocks", "plan"])
def all_gather_kernel(
    ctx, x_ptr, y_ptr, n, piece_blocks, plan,
    DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute y [ranks, n] = x [n] of all ranks, for items of any meaning, moved as DTYPE.

    The data of a half is [ranks, pieces * PIECE]. Signal number ``source * pieces + piece`` is set when a chunk of
    ``source`` is stored there.
    """
    n = _length(n, ITEM_BYTES, ALIGNED)
    # Loaded while the context table is read.
    block = _first_block(x_ptr, tl.program_id(0), piece_blocks, n, DTYPE, ITEM_BYTES, ALIGNED, BLOCK)
    me, ranks, signal, signals, area, sent = _begin(ctx, plan)
    pieces, slot_bytes = _pieces(n, piece_blocks, ITEM_BYTES, BLOCK)
    buffer = td.symm_base(ctx, me)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        start = tl.cast(piece, tl.int64) * piece_blocks * BLOCK
        left = n - start
        blocks = _blocks(left, piece_blocks, BLOCK)
        x = x_ptr.to(tl.int64) + start * ITEM_BYTES
        y = y_ptr.to(tl.int64) + start * ITEM_BYTES
        slots = area + start * ITEM_BYTES
        _send_to_all(
            ctx, me, ranks, block, x, slots + me * slot_bytes, y + me * n * ITEM_BYTES, left, sent, blocks,
            True, DTYPE, ITEM_BYTES, ALIGNED, BLOCK,
        )
        # waiter: every peer's program of this piece
        td.notify_all(ctx, signals + me * pieces + piece, signal)
        # producer: every peer's program of this piece
        td.wait_plan_all(ctx, signals + piece, pieces, signal)
        _receive_from_each(
            me, ranks, buffer + slots, slot_bytes, y, n * ITEM_BYTES, left, 0, blocks, DTYPE, ITEM_BYTES, ALIGNED, BLOCK
        )
        block = _first_block(
            x_ptr, piece + tl.num_programs(0), piece_blocks, n, DTYPE, ITEM_BYTES, ALIGNED, BLOCK
        )
    td.finish(ctx)


@td.jit(do_not_specialize=["n", "piece_blocks", "plan"])
def reduce_scatter_kernel(
    ctx, x_ptr, z_ptr, n, piece_blocks, plan,
    DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    TREE: tl.constexpr = 0,
):
    """Compute z [n] = sum over ranks of row ``me`` of x [ranks, n].

    The data of a half is [ranks, pieces * PIECE]. Signal number ``source * pieces + piece`` is set when a chunk of the
    part that ``source`` has for this rank is stored there.
    """
    n = _length(n, ITEM_BYTES, ALIGNED)
    me, ranks, signal, signals, area, sent = _begin(ctx, plan)
    pieces, slot_bytes = _pieces(n, piece_blocks, ITEM_BYTES, BLOCK)
    buffer = td.symm_base(ctx, me)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        start = tl.cast(piece, tl.int64) * piece_blocks * BLOCK
        left = n - start
        blocks = _blocks(left, piece_blocks, BLOCK)
        x = x_ptr.to(tl.int64) + start * ITEM_BYTES
        z = z_ptr.to(tl.int64) + start * ITEM_BYTES
        slots = area + start * ITEM_BYTES
        _send_to_each(
            ctx, me, ranks, x, n * ITEM_BYTES, slots + me * slot_bytes, left, 0, sent, blocks,
            DTYPE, ITEM_BYTES, ALIGNED, BLOCK,
        )
        # waiter: every peer's program of this piece
        td.notify_all(ctx, signals + me * pieces + piece, signal)
        # producer: every peer's program of this piece
        td.wait_plan_all(ctx, signals + piece, pieces, signal)
        _sum_blocks(
            ctx, me, ranks, x + me * n * ITEM_BYTES, buffer + slots, slot_bytes, 0, z, left, sent, blocks,
            False, DTYPE, ITEM_BYTES, ALIGNED, BLOCK, TREE,
        )
    td.finish(ctx)


@td.jit(do_not_specialize=["n", "piece_blocks", "plan"])
def all_reduce_one_shot_kernel(
    ctx, x_ptr, z_ptr, n, piece_blocks, plan,
    DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    TREE: tl.constexpr = 0,
):
    """Compute z [n] = sum over ranks of x [n]. Every rank receives all x and adds them (``_sum_of_ranks``).

    Signals and data of a half are as in ``all_gather_kernel``.
    """
    n = _length(n, ITEM_BYTES, ALIGNED)
    # Loaded while the context table is read.
    block = _first_block(x_ptr, tl.program_id(0), piece_blocks, n, DTYPE, ITEM_BYTES, ALIGNED, BLOCK)
    me, ranks, signal, signals, area, sent = _begin(ctx, plan)
    pieces, slot_bytes = _pieces(n, piece_blocks, ITEM_BYTES, BLOCK)
    buffer = td.symm_base(ctx, me)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        start = tl.cast(piece, tl.int64) * piece_blocks * BLOCK
        left = n - start
        blocks = _blocks(left, piece_blocks, BLOCK)
        x = x_ptr.to(tl.int64) + start * ITEM_BYTES
        z = z_ptr.to(tl.int64) + start * ITEM_BYTES
        slots = area + start * ITEM_BYTES
        _send_to_all(
            ctx, me, ranks, block, x, slots + me * slot_bytes, z, left, sent, blocks,
            False, DTYPE, ITEM_BYTES, ALIGNED, BLOCK,
        )
        # waiter: every peer's program of this piece
        td.notify_all(ctx, signals + me * pieces + piece, signal)
        # producer: every peer's program of this piece
        td.wait_plan_all(ctx, signals + piece, pieces, signal)
        _sum_blocks(
            ctx, me, ranks, x, buffer + slots, slot_bytes, 0, z, left, sent, blocks,
            False, DTYPE, ITEM_BYTES, ALIGNED, BLOCK, TREE,
        )
        block = _first_block(
            x_ptr, piece + tl.num_programs(0), piece_blocks, n, DTYPE, ITEM_BYTES, ALIGNED, BLOCK
        )
    td.finish(ctx)


@td.jit(do_not_specialize=["n", "piece_blocks", "plan"])
def all_reduce_two_shot_kernel(
    ctx, x_ptr, z_ptr, n, piece_blocks, plan,
    DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    TREE: tl.constexpr = 0,
):
    """Compute z [n] = sum over ranks of x [n]. Rank j mod W sums chunk j and sends the sum to all ranks.

    W consecutive chunks form a round, in which each rank owns one chunk. A program processes whole rounds. The data of
    a half is the parts of this rank's chunks, [ranks, rounds * PIECE], then the sums of all chunks,
    [rounds, ranks, PIECE]. Signal number ``source * rounds + round`` is set when the part of ``source`` for this rank's
    chunk of a round is stored, signal number ``(ranks + owner) * rounds + round`` when the sum of ``owner`` is stored.
    """
    n = _length(n, ITEM_BYTES, ALIGNED)
    me, ranks, signal, signals, area, sent = _begin(ctx, plan)
    piece = tl.cast(piece_blocks, tl.int64) * BLOCK
    piece_bytes = piece * ITEM_BYTES
    rounds = ((n + ranks * piece - 1) // (ranks * piece)).to(tl.int32)
    part_bytes = rounds * piece_bytes  # bytes of the parts of one source
    buffer = td.symm_base(ctx, me)
    own = me * piece_bytes
    for round_ in range(tl.program_id(0), rounds, tl.num_programs(0)):
        start = tl.cast(round_, tl.int64) * ranks * piece
        left = n - start
        blocks = _blocks(left, piece_blocks, BLOCK)
        x = x_ptr.to(tl.int64) + start * ITEM_BYTES
        z = z_ptr.to(tl.int64) + start * ITEM_BYTES
        slots = area + round_ * piece_bytes
        sums = area + ranks * part_bytes + start * ITEM_BYTES
        _send_to_each(
            ctx, me, ranks, x, piece_bytes, slots + me * part_bytes, left, piece, sent, blocks,
            DTYPE, ITEM_BYTES, ALIGNED, BLOCK,
        )
        # waiter: every peer's program of this round, before it sums
        td.notify_all(ctx, signals + me * rounds + round_, signal)
        # producer: every peer's program of this round, before it waits
        td.wait_plan_all(ctx, signals + round_, rounds, signal)
        _sum_blocks(
            ctx, me, ranks, x + own, buffer + slots, part_bytes, sums + own, z + own, left - me * piece, sent,
            blocks, True, DTYPE, ITEM_BYTES, ALIGNED, BLOCK, TREE,
        )
        # waiter: every peer's program of this round, at its end
        td.notify_all(ctx, signals + (ranks + me) * rounds + round_, signal, CHECK_FAILED=True)
        # producer: every peer's program of this round, after it has summed
        td.wait_plan_all(ctx, signals + ranks * rounds + round_, rounds, signal)
        _receive_from_each(
            me, ranks, buffer + sums, piece_bytes, z, piece_bytes, left, piece, blocks,
            DTYPE, ITEM_BYTES, ALIGNED, BLOCK,
        )
    td.finish(ctx)
