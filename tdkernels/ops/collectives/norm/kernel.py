"""Kernels of all_reduce_rms_norm and all_reduce_layer_norm: all-reduce, residual addition and norm in one launch.

    r = round(sum over ranks of x + residual)        y = norm(r)

Sums are computed in fp32 in rank order and rounded once, so r and y are bitwise equal on all ranks. With NORM.tree
they are computed by ``reduce_in_tree``, also in a group of one rank.

"one_shot", for few rows. The first half of the programs send: each stores pieces of rows of x, SEND_COLUMNS columns,
in the peers' buffers, and sets one signal per piece and peer. The other programs receive: ROW_PROGRAMS of them share a
row. Each waits for all pieces of the row from all peers, adds the whole row, because the norm needs all of it, and
stores its columns of r and y. To read the parts of the other columns, too, is cheaper than another exchange between
programs.

"two_shot", for many rows. W * piece_rows consecutive rows form a round, in which each rank owns piece_rows rows. The
owner adds the parts of its rows and the residual, and sends r to all ranks. Every rank normalizes all rows. If the
owner normalized them, y would have to be sent in addition to r. All ranks normalize a row with the same instructions,
the owner, too, which reads r from its own buffer. Otherwise the order of the additions in a row, and so y, could
differ.

Progress (invariant 1). In "one_shot" a program that receives waits only for programs that send, which have lower ids
and wait for nothing. In "two_shot" a program waits only for programs with its id on the peers, which send before they
wait. So it suffices that programs start in the order of their ids.

There is no barrier: call t uses half t mod 2, as in ``collectives.kernel``.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.collectives.kernel import _begin
from tdkernels.ops.common.gemm_tile import as_aligned
from tdkernels.ops.common.norm_rows import load_if, normalize_memory, normalize_registers
from tdkernels.ops.common.rank_reduce import reduce_partials


@td.jit
def _row_bytes(hidden, ITEM_BYTES: tl.constexpr):
    """Return the bytes of a row in a buffer, int64: rows begin at multiples of 16."""
    return (tl.cast(hidden, tl.int64) * ITEM_BYTES + 15) // 16 * 16


@td.jit
def _send_to_all(ctx, slot, values, offs, mask, me, RANKS: tl.constexpr, DTYPE: tl.constexpr):
    """Store values in every peer's buffer, at offset ``slot``."""
    for step in tl.static_range(1, RANKS):
        dst = td.symm_base(ctx, (me + step) % RANKS) + slot
        tl.store(td.pointer_to(dst, DTYPE) + offs, values, mask=mask)


@td.jit
def _rounded_sum(
    own, residual, parts, part_bytes, offs, mask, me, RANKS: tl.constexpr, DTYPE: tl.constexpr, TREE: tl.constexpr
):
    """Return the sum of all ranks' parts (``reduce_partials``), plus the residual, as DTYPE.

    With TREE the sum is rounded before the residual is added, because the part of a group of one rank is rounded.
    """
    total = reduce_partials(parts, part_bytes, offs, mask, td.to_float32(own), me, RANKS, DTYPE, TREE)
    if TREE:
        total = td.to_float32(td.from_float32(total, DTYPE))
    return td.from_float32(total + td.to_float32(residual), DTYPE)


@td.jit
def _send_pieces(
    ctx, x_ptr, rows, hidden, row_bytes, call,
    DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, RANKS: tl.constexpr, SEND_COLUMNS: tl.constexpr,
):
    """Store every senders-th piece of x at all peers; ``call`` is the result of ``_begin``."""
    me, ranks, signal, signals, area, sent = call
    pieces = (hidden + SEND_COLUMNS - 1) // SEND_COLUMNS
    for unit in range(tl.program_id(0), rows * pieces, tl.num_programs(0) // 2):
        row, piece = tl.cast(unit // pieces, tl.int64), unit % pieces
        columns = piece * SEND_COLUMNS + tl.arange(0, SEND_COLUMNS)
        mask = columns < hidden
        values = tl.load(x_ptr + row * hidden + columns, mask=mask)
        slot = area + (me * tl.cast(rows, tl.int64) + row) * row_bytes
        _send_to_all(ctx, slot, values, columns, mask & sent, me, RANKS, DTYPE)
        # waiter: the programs of every peer that receive this row
        td.notify_all(ctx, signals + (me * tl.cast(rows, tl.int64) + row) * pieces + piece, signal)


@td.jit
def _receive_row(
    ctx, x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, r_ptr, scale_ptr, stats_ptr, row, part, rows, hidden, share,
    eps, row_bytes, pieces, call,
    NORM: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Add and normalize one row of at most BLOCK elements; store columns part * share to (part + 1) * share - 1.

    Everything that does not depend on the peers is loaded before the wait.
    """
    me, ranks, signal, signals, area, sent = call
    offs = tl.arange(0, BLOCK)
    mask = offs < hidden
    own = tl.load(x_ptr + row * hidden + offs, mask=mask, other=0.0)
    residual = load_if(residual_ptr, row * hidden + offs, mask, NORM.has_residual)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
    bias = load_if(bias_ptr, offs, mask, NORM.has_bias)
    # producer: the programs of every peer that send pieces of this row
    td.wait_plan_all(ctx, signals + row * pieces, tl.cast(rows, tl.int64) * pieces, signal, count=pieces)
    parts = td.symm_base(ctx, me) + area + row * row_bytes
    r = _rounded_sum(own, residual, parts, rows * row_bytes, offs, mask, me, RANKS, DTYPE, NORM.tree)
    stored = mask & (offs >= part * share) & (offs < part * share + share)
    tl.store(r_ptr + row * hidden + offs, r, mask=stored)
    normalize_registers(
        td.to_float32(r), row, offs, mask, stored, part == 0, weight, bias, eps, y_ptr, scale_ptr, stats_ptr, hidden,
        NORM, FORMAT, DTYPE,
    )


@td.jit
def _receive_long_row(
    ctx, x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, r_ptr, scale_ptr, stats_ptr, row, rows, hidden, eps,
    row_bytes, pieces, call,
    NORM: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``_receive_row`` for a row of more than BLOCK elements, which one program stores."""
    me, ranks, signal, signals, area, sent = call
    offs = tl.arange(0, BLOCK)
    # producer: the programs of every peer that send pieces of this row
    td.wait_plan_all(ctx, signals + row * pieces, tl.cast(rows, tl.int64) * pieces, signal, count=pieces)
    parts = td.symm_base(ctx, me) + area + row * row_bytes
    for start in range(0, hidden, BLOCK):
        mask = offs < hidden - start
        own = tl.load(x_ptr + row * hidden + start + offs, mask=mask, other=0.0)
        residual = load_if(residual_ptr, row * hidden + start + offs, mask, NORM.has_residual)
        at = parts + tl.cast(start, tl.int64) * ITEM_BYTES
        r = _rounded_sum(own, residual, at, rows * row_bytes, offs, mask, me, RANKS, DTYPE, NORM.tree)
        tl.store(r_ptr + row * hidden + start + offs, r, mask=mask)
    normalize_memory(
        r_ptr + row * hidden, row, weight_ptr, bias_ptr, eps, y_ptr, scale_ptr, stats_ptr, hidden,
        NORM, FORMAT, DTYPE, BLOCK,
    )


@td.jit(do_not_specialize=["rows", "hidden", "share", "eps", "plan"])
def all_reduce_norm_one_shot_kernel(
    ctx, x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, r_ptr, scale_ptr, stats_ptr, rows, hidden, share, eps, plan,
    NORM: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, RANKS: tl.constexpr,
    IN_REGISTERS: tl.constexpr, ROW_PROGRAMS: tl.constexpr, SEND_COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute r and y [rows, hidden]. Every rank receives all x and adds them.

    The data of a half is [ranks, rows] rows. Signal number ``(source * rows + row) * pieces + piece`` is set when a
    piece of a row of ``source`` is stored there. A program that receives stores ``share`` columns of a row. Without
    IN_REGISTERS a row has more than BLOCK elements, and ROW_PROGRAMS is 1.
    """
    hidden, share = as_aligned(hidden, NORM.aligned), as_aligned(share, True)
    call = _begin(ctx, plan)
    row_bytes = _row_bytes(hidden, ITEM_BYTES)
    senders = tl.num_programs(0) // 2
    if tl.program_id(0) < senders:
        _send_pieces(ctx, x_ptr, rows, hidden, row_bytes, call, DTYPE, ITEM_BYTES, RANKS, SEND_COLUMNS)
    else:
        pieces = (hidden + SEND_COLUMNS - 1) // SEND_COLUMNS
        for unit in range(tl.program_id(0) - senders, rows * ROW_PROGRAMS, senders):
            row, part = tl.cast(unit // ROW_PROGRAMS, tl.int64), unit % ROW_PROGRAMS
            if IN_REGISTERS:
                _receive_row(
                    ctx, x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, r_ptr, scale_ptr, stats_ptr, row, part,
                    rows, hidden, share, eps, row_bytes, pieces, call, NORM, FORMAT, DTYPE, RANKS, BLOCK,
                )
            else:
                _receive_long_row(
                    ctx, x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, r_ptr, scale_ptr, stats_ptr, row,
                    rows, hidden, eps, row_bytes, pieces, call, NORM, FORMAT, DTYPE, ITEM_BYTES, RANKS, BLOCK,
                )
    td.finish(ctx)


@td.jit
def _load_row_of(
    i, me, x_ptr, row, piece_rows, rows, hidden, columns, RANKS: tl.constexpr
):
    """Load columns of the row that peer ``me + 1 + i`` owns: ``row`` is the row at the same place of rank 0's rows."""
    theirs = row + (me + 1 + i) % RANKS * piece_rows
    mask = (columns < hidden) & (theirs < rows) & (i < RANKS - 1)
    return tl.load(x_ptr + theirs * hidden + columns, mask=mask)


@td.jit
def _send_row_of(
    ctx, i, me, slot, values, row, piece_rows, rows, hidden, columns, sent, RANKS: tl.constexpr, DTYPE: tl.constexpr
):
    """Store the values of ``_load_row_of`` in the buffer of the peer that owns the row, at offset ``slot``."""
    peer = (me + 1 + i) % RANKS
    mask = (columns < hidden) & (row + peer * piece_rows < rows) & (i < RANKS - 1) & sent
    tl.store(td.pointer_to(td.symm_base(ctx, peer) + slot, DTYPE) + columns, values, mask=mask)


@td.jit
def _send_row_to_owners(
    ctx, me, x_ptr, slot, row, piece_rows, rows, hidden, sent,
    RANKS: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Send one row to every peer that owns it, see ``_load_row_of``. Four loads are in flight at a time."""
    for start in range(0, hidden, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        for i in tl.static_range(0, RANKS - 1, 4):
            row0 = _load_row_of(i, me, x_ptr, row, piece_rows, rows, hidden, columns, RANKS)
            row1 = _load_row_of(i + 1, me, x_ptr, row, piece_rows, rows, hidden, columns, RANKS)
            row2 = _load_row_of(i + 2, me, x_ptr, row, piece_rows, rows, hidden, columns, RANKS)
            row3 = _load_row_of(i + 3, me, x_ptr, row, piece_rows, rows, hidden, columns, RANKS)
            _send_row_of(ctx, i, me, slot, row0, row, piece_rows, rows, hidden, columns, sent, RANKS, DTYPE)
            _send_row_of(ctx, i + 1, me, slot, row1, row, piece_rows, rows, hidden, columns, sent, RANKS, DTYPE)
            _send_row_of(ctx, i + 2, me, slot, row2, row, piece_rows, rows, hidden, columns, sent, RANKS, DTYPE)
            _send_row_of(ctx, i + 3, me, slot, row3, row, piece_rows, rows, hidden, columns, sent, RANKS, DTYPE)


@td.jit
def _sum_row(
    ctx, me, x_ptr, residual_ptr, parts, part_bytes, slot, row, hidden, sent,
    NORM: tl.constexpr, RANKS: tl.constexpr, DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):
    """Add an own row, and store it in the buffer of every rank, at offset ``slot``.

    The part of rank r is at ``parts + r * part_bytes``.
    """
    offs = tl.arange(0, BLOCK)
    for start in range(0, hidden, BLOCK):
        mask = offs < hidden - start
        at = tl.cast(start, tl.int64) * ITEM_BYTES
        own = tl.load(x_ptr + row * hidden + start + offs, mask=mask, other=0.0)
        residual = load_if(residual_ptr, row * hidden + start + offs, mask, NORM.has_residual)
        r = _rounded_sum(own, residual, parts + at, part_bytes, offs, mask, me, RANKS, DTYPE, NORM.tree)
        _send_to_all(ctx, slot + at, r, offs, mask & sent, me, RANKS, DTYPE)
        tl.store(td.pointer_to(td.symm_base(ctx, me) + slot + at, DTYPE) + offs, r, mask=mask & sent)


@td.jit
def _normalize_row(
    source, row, weight_ptr, bias_ptr, y_ptr, r_ptr, scale_ptr, stats_ptr, hidden, eps,
    NORM: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, IN_REGISTERS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Copy the row at ``source``, in the buffer, to r and normalize it."""
    offs = tl.arange(0, BLOCK)
    if IN_REGISTERS:
        mask = offs < hidden
        r = tl.load(source + offs, mask=mask, other=0.0)
        tl.store(r_ptr + row * hidden + offs, r, mask=mask)
        weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
        bias = load_if(bias_ptr, offs, mask, NORM.has_bias)
        normalize_registers(
            td.to_float32(r), row, offs, mask, mask, True, weight, bias, eps, y_ptr, scale_ptr, stats_ptr, hidden,
            NORM, FORMAT, DTYPE,
        )
    else:
        for start in range(0, hidden, BLOCK):
            mask = offs < hidden - start
            r = tl.load(source + start + offs, mask=mask)
            tl.store(r_ptr + row * hidden + start + offs, r, mask=mask)
        normalize_memory(
            r_ptr + row * hidden, row, weight_ptr, bias_ptr, eps, y_ptr, scale_ptr, stats_ptr, hidden,
            NORM, FORMAT, DTYPE, BLOCK,
        )


@td.jit(do_not_specialize=["rows", "hidden", "piece_rows", "eps", "plan"])
def all_reduce_norm_two_shot_kernel(
    ctx, x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, r_ptr, scale_ptr, stats_ptr, rows, hidden, piece_rows, eps,
    plan,
    NORM: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, RANKS: tl.constexpr,
    IN_REGISTERS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute r and y [rows, hidden]. The owner of a row adds it and sends r; every rank normalizes all rows.

    A program processes whole rounds. The data of a half is the parts of this rank's rows, [ranks, rounds, piece_rows]
    rows, then r, [rounds, ranks, piece_rows] rows. Signal number ``source * rounds + round`` is set when the parts of
    ``source`` for this rank's rows of a round are stored, signal number ``(ranks + owner) * rounds + round`` when r of
    the rows of ``owner`` is stored.
    """
    hidden = as_aligned(hidden, NORM.aligned)
    me, ranks, signal, signals, area, sent = _begin(ctx, plan)
    row_bytes = _row_bytes(hidden, ITEM_BYTES)
    rounds = (rows + RANKS * piece_rows - 1) // (RANKS * piece_rows)
    part_bytes = rounds * piece_rows * row_bytes  # bytes of the parts of one source
    sums = area + RANKS * part_bytes
    buffer = td.symm_base(ctx, me)
    for round_ in range(tl.program_id(0), rounds, tl.num_programs(0)):
        first = tl.cast(round_, tl.int64) * RANKS * piece_rows
        slots = area + round_ * piece_rows * row_bytes
        for i in range(piece_rows):
            _send_row_to_owners(
                ctx, me, x_ptr, slots + me * part_bytes + i * row_bytes, first + i, piece_rows, rows, hidden, sent,
                RANKS, DTYPE, BLOCK,
            )
        # waiter: every peer's program of this round, before it sums
        td.notify_all(ctx, signals + me * rounds + round_, signal)
        # producer: every peer's program of this round, before it waits
        td.wait_plan_all(ctx, signals + round_, rounds, signal)
        own = first + me * piece_rows
        for row in range(own, tl.minimum(own + piece_rows, rows)):
            _sum_row(
                ctx, me, x_ptr, residual_ptr, buffer + slots + (row - own) * row_bytes, part_bytes,
                sums + row * row_bytes, row, hidden, sent, NORM, RANKS, DTYPE, ITEM_BYTES, BLOCK,
            )
        # waiter: every peer's program of this round, before it normalizes the peers' rows
        td.notify_all(ctx, signals + (RANKS + me) * rounds + round_, signal, CHECK_FAILED=True)
        tl.debug_barrier()  # other threads of this program may have stored an element of r
        for i in range(RANKS * piece_rows):  # this rank's rows first
            if i == piece_rows:
                # producer: every peer's program of this round, after it has summed
                td.wait_plan_all(ctx, signals + RANKS * rounds + round_, rounds, signal)
            row = first + (me * piece_rows + i) % (RANKS * piece_rows)
            if row < rows:
                _normalize_row(
                    td.pointer_to(buffer + sums + row * row_bytes, DTYPE), row, weight_ptr, bias_ptr, y_ptr, r_ptr,
                    scale_ptr, stats_ptr, hidden, eps, NORM, FORMAT, DTYPE, IN_REGISTERS, BLOCK,
                )
    td.finish(ctx)
