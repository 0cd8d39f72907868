"""The kernels of all_gather, reduce_scatter and all_reduce: each program exchanges pieces with its like on the peers.

A message is cut into pieces of ``piece_blocks`` blocks. A program takes every num_programs-th piece, stores it in the
peers' buffers, raises one signal for it at each of them, waits for the signals of the same piece from all peers, and
brings what they have stored, or the sum of it, to the output. There is no barrier: call t uses half t mod 2, and no
rank can finish call t + 1 before all have begun it, since each waits for all.

A program waits only for the program of the same id on the peers, for what that has sent before any wait for this piece;
by the order of the ids, and of the pieces within a program, all of it comes about (law 1), however few programs run at
a time. That many of them run at a time hides the way of a signal: while some wait, others send and copy.

A read takes far longer than whatever is done with it, so four are on their way at a time. Addresses in buffers are
multiples of 16; where those in x and in the output are, and the length, ALIGNED says so: 16 bytes are moved at once.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.context import MAX_RANKS


@td.jit
def _begin(ctx, plan):
    """(our rank, how many there are, this call's signal, its first signal word, where in a buffer its half begins,
    sent).

    ``sent``: whether anything is stored at peers, for masks (``td.is_void``). Not in a void launch, since a peer may
    still read what an earlier launch has stored. All of it is read once: after a wait the table is in no cache near by.
    """
    me = td.rank(ctx)
    epoch, half, signal = td.call(ctx, plan)
    area = td.data_at(ctx, half, me) - td.symm_base(ctx, me)
    return me, td.num_ranks(ctx), signal, td.signal_at(ctx, half, 0), area, td.is_void(signal) == 0


@td.jit
def _length(n, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr):
    """``n`` items as int64, in whole multiples of 16 bytes if ALIGNED, as the compiler then knows."""
    n = tl.cast(n, tl.int64)
    return n // (16 // ITEM_BYTES) * (16 // ITEM_BYTES) if ALIGNED else n


@td.jit
def _blocks(left, piece_blocks, BLOCK: tl.constexpr):
    """Blocks that there are of a piece with which ``left`` items are left."""
    return tl.minimum((left + BLOCK - 1) // BLOCK, tl.cast(piece_blocks, tl.int64)).to(tl.int32)


@td.jit
def _first_block(
    x_ptr, piece, piece_blocks, n,
    DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    """The first block of a piece of x; of a piece that there is not, nothing is read."""
    start = tl.cast(piece, tl.int64) * piece_blocks * BLOCK
    offs = tl.arange(0, BLOCK)
    x = td.pointer_to(x_ptr.to(tl.int64) + start * ITEM_BYTES, DTYPE, ALIGNED)
    return tl.load(x + offs, mask=offs < n - start)


@td.jit
def _send_to_all(
    ctx, me, ranks, block, x, slot, y, left, sent, blocks,
    KEEP: tl.constexpr, DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Store blocks at x, of which ``left`` items exist, ``slot`` bytes into every peer's buffer; KEEP: at y too.

    ``block`` is the first of them. Nothing goes to peers if not ``sent``.
    """
    offs = tl.arange(0, BLOCK)
    for b in range(blocks):
        start = tl.cast(b, tl.int64) * BLOCK
        mask = offs < left - start
        after = start + BLOCK  # on its way while the block before is stored
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
    """Which items there are of the i-th peer above us, each rank having its own ``spacing`` items after the last's."""
    return (offs < left - (me + 1 + i) % ranks * spacing) & (i < ranks - 1)


@td.jit
def _read_from(
    i, me, ranks, first, stride, offs, left, spacing, DTYPE: tl.constexpr, ALIGNED: tl.constexpr
):
    """What belongs to the i-th peer above us: that of rank r is at address first + r * stride."""
    address = first + (me + 1 + i) % ranks * stride
    return tl.load(td.pointer_to(address, DTYPE, ALIGNED) + offs, mask=_mask_of(i, me, ranks, offs, left, spacing))


@td.jit
def _send_to(ctx, i, me, ranks, slot, part, offs, left, spacing, sent, DTYPE: tl.constexpr):
    """Store a part ``slot`` bytes into the buffer of the i-th peer above us, if it is ``sent``."""
    dst = td.symm_base(ctx, (me + 1 + i) % ranks) + slot
    tl.store(td.pointer_to(dst, DTYPE) + offs, part, mask=_mask_of(i, me, ranks, offs, left, spacing) & sent)


@td.jit
def _send_to_each(
    ctx, me, ranks, x, stride, slot, left, spacing, sent, blocks,
    DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Store blocks at address x + r * stride ``slot`` bytes into the buffer of rank r, for every peer r.

    Of them ``left - r * spacing`` items exist; none is stored if they are not ``sent``.
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
    """Store the part of the i-th peer above us where the output has it."""
    address = y + (me + 1 + i) % ranks * stride
    tl.store(td.pointer_to(address, DTYPE, ALIGNED) + offs, part, mask=_mask_of(i, me, ranks, offs, left, spacing))


@td.jit
def _receive_from_each(
    me, ranks, slots, slot_bytes, y, stride, left, spacing, blocks,
    DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Bring blocks from address slots + r * slot_bytes, in our buffer, to y + r * stride, for every peer r."""
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
    """A peer's part of a sum; zeros for ourselves and for ranks that there are not."""
    is_peer = (source < ranks) & (source != me)
    return tl.load(td.pointer_to(parts + source * part_bytes, DTYPE) + offs, mask=mask & is_peer, other=0.0)


@td.jit
def _sum_of_ranks(
    me, ranks, x, parts, part_bytes, offs, mask, DTYPE: tl.constexpr, ALIGNED: tl.constexpr
):
    """The sum in fp32, in rank order, of what we have at x and rank r has left at parts + r * part_bytes, as DTYPE."""
    own = tl.load(td.pointer_to(x, DTYPE, ALIGNED) + offs, mask=mask, other=0.0)
    total = tl.full(own.shape, 0.0, tl.float32)
    for source in range(0, ranks, 4):
        part0 = _part_of(source, me, ranks, parts, part_bytes, offs, mask, DTYPE)
        part1 = _part_of(source + 1, me, ranks, parts, part_bytes, offs, mask, DTYPE)
        part2 = _part_of(source + 2, me, ranks, parts, part_bytes, offs, mask, DTYPE)
        part3 = _part_of(source + 3, me, ranks, parts, part_bytes, offs, mask, DTYPE)
        # Nothing, but of all four: to save registers the assembler would put each load behind the addition before it.
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
):
    """z = the sums of blocks, ours at address x and that of rank r at parts + r * part_bytes in our buffer.

    SEND: they are stored ``sums`` bytes into every peer's buffer, too, if ``sent``.
    """
    offs = tl.arange(0, BLOCK)
    for b in range(blocks):
        start = tl.cast(b, tl.int64) * BLOCK
        at = start * ITEM_BYTES
        mask = offs < left - start
        total = _sum_of_ranks(me, ranks, x + at, parts + at, part_bytes, offs, mask, DTYPE, ALIGNED)
        if SEND:
            for step in range(1, ranks):
                dst = td.symm_base(ctx, (me + step) % ranks) + sums + at
                tl.store(td.pointer_to(dst, DTYPE) + offs, total, mask=mask & sent)
        tl.store(td.pointer_to(z + at, DTYPE, ALIGNED) + offs, total, mask=mask)


@td.jit
def _pieces(n, piece_blocks, ITEM_BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """(pieces of n items, bytes of a slot that holds them whole)"""
    piece = tl.cast(piece_blocks, tl.int64) * BLOCK
    pieces = (n + piece - 1) // piece
    return pieces.to(tl.int32), pieces * piece * ITEM_BYTES


# Each is compiled once for a block and a type, whatever the length, plan and number of programs.
@td.jit(do_not_specialize=["n", "piece_blocks", "plan"])
def all_gather_kernel(
    ctx, x_ptr, y_ptr, n, piece_blocks, plan,
    DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    """y [ranks, n] = all ranks' x [n], in items of DTYPE, whatever they mean.

    Signal number ``source * pieces + piece`` of a half says that a piece of the source's x is in our buffer, which is
    [ranks, pieces * PIECE].
    """
    n = _length(n, ITEM_BYTES, ALIGNED)
    # On its way while the table is read.
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
):
    """z [n] = the sum over ranks of their x[our rank], x being [ranks, n].

    Signal number ``source * pieces + piece`` of a half says that a piece of what the source has for us is in our
    buffer, which is [ranks, pieces * PIECE].
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
            False, DTYPE, ITEM_BYTES, ALIGNED, BLOCK,
        )
    td.finish(ctx)


@td.jit(do_not_specialize=["n", "piece_blocks", "plan"])
def all_reduce_one_shot_kernel(
    ctx, x_ptr, z_ptr, n, piece_blocks, plan,
    DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    """z [n] = the sum of all ranks' x [n]: everybody gets everything and adds it up, in the same order.

    Signals and buffer are those of ``all_gather_kernel``.
    """
    n = _length(n, ITEM_BYTES, ALIGNED)
    # On its way while the table is read.
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
            False, DTYPE, ITEM_BYTES, ALIGNED, BLOCK,
        )
        block = _first_block(
            x_ptr, piece + tl.num_programs(0), piece_blocks, n, DTYPE, ITEM_BYTES, ALIGNED, BLOCK
        )
    td.finish(ctx)


@td.jit(do_not_specialize=["n", "piece_blocks", "plan"])
def all_reduce_two_shot_kernel(
    ctx, x_ptr, z_ptr, n, piece_blocks, plan,
    DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    """z [n] = the sum of all ranks' x [n]: rank j mod W adds up piece j and sends the sum to everybody.

    W consecutive pieces are a round, of which each rank owns one; a program takes whole rounds. Of a half's signals,
    number ``source * rounds + round`` says that the source's part of our piece of that round is here, number
    ``(ranks + owner) * rounds + round`` that the owner's sum is. Of its data, the parts of our own pieces come first,
    [ranks, rounds * PIECE], then the sums of all pieces, [rounds, ranks, PIECE].
    """
    n = _length(n, ITEM_BYTES, ALIGNED)
    me, ranks, signal, signals, area, sent = _begin(ctx, plan)
    piece = tl.cast(piece_blocks, tl.int64) * BLOCK
    piece_bytes = piece * ITEM_BYTES
    rounds = ((n + ranks * piece - 1) // (ranks * piece)).to(tl.int32)
    part_bytes = rounds * piece_bytes  # of one source
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
            blocks, True, DTYPE, ITEM_BYTES, ALIGNED, BLOCK,
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
