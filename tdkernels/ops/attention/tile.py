"""What the kernels of ag_attention share: which rows a rank needs of another, how they travel, where they are read.

A shard is [B, S / W, H, D], its rows are the B * S / W positions. They travel in chunks of ``chunk_rows`` rows. Signal
number ``source * num_chunks + chunk`` of a half is raised by ``source`` when a chunk of each of its tensors stands in
our memory; the waiters are the tiles that read it. Signal number ``ranks * num_chunks + source`` says that the source
has begun the call; its waiter is the last piece of work, since a rank may need no rows of a peer.

Shards arrive in the order of steps: first that of the rank below ours, then the next lower one. So all ranks send to
different peers at a time, and what is needed first comes first, whole.
"""

from typing import NamedTuple

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.gemm_tile import add_product

# Which keys a query sees: all; those before it; those before it, of ranks that have two pieces each.
ALL, CONTIGUOUS, ZIGZAG = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
STAT_ROWS = tl.constexpr(16)  # rows of a head whose numbers lie side by side in the statistics
_BYTES = tl.constexpr(16)  # what slots and chunks begin at a multiple of


class AttentionTile(NamedTuple):
    """What a kernel of ag_attention is compiled for; its argument ``TILE``.

    Args:
        d, dv: elements of a head of queries and keys, and of values
        block_d, block_dv: what takes them
        block_q, block_k: queries and keys of a tile
        mask: ``ALL``, ``CONTIGUOUS`` or ``ZIGZAG``
        straddles: a block of keys overlaps both pieces of a rank
        use_tma: operands are read through tensor descriptors
        precision: of a product of fp32 operands, as of ``tl.dot``
        stages: of the loop over blocks
    """

    d: int
    dv: int
    block_d: int
    block_dv: int
    block_q: int
    block_k: int
    mask: int
    straddles: bool
    elem_bytes: int
    use_tma: bool
    precision: str
    stages: int


@td.jit
def pieces_of(rows):
    """How many positions a rank's first piece has; where it has an odd number, the second has one less."""
    return (rows + 1) // 2


@td.jit
def keys_seen(source, me, rows, MASK: tl.constexpr):
    """How many of the first keys of another rank our queries see: (those of our first piece, those of the second)."""
    if MASK == ALL:
        return rows, rows
    elif MASK == CONTIGUOUS:
        seen = tl.where(source < me, rows, 0)
        return seen, seen
    else:
        return tl.where(source < me, pieces_of(rows), 0), tl.where(source < me, pieces_of(rows), rows)


@td.jit
def queries_seeing(source, me, rows, MASK: tl.constexpr):
    """From which query on those of another rank see our keys: (those of our first piece, those of the second)."""
    if MASK == ALL:
        return rows * 0, rows * 0
    elif MASK == CONTIGUOUS:
        start = tl.where(source > me, 0, rows)
        return start, start
    else:
        return tl.where(source > me, 0, pieces_of(rows)), tl.where(source > me, rows, pieces_of(rows))


@td.jit
def travels(source, peer, chunk, chunk_rows, rows, total, MASK: tl.constexpr, OF_QUERIES: tl.constexpr):
    """Whether a peer needs any row of a chunk of the source's keys, or of its queries."""
    if MASK == ALL:
        return source != peer
    elif MASK == CONTIGUOUS:
        return (source > peer) if OF_QUERIES else (source < peer)
    else:
        start = chunk * chunk_rows % rows
        stop = start + tl.minimum(chunk_rows, total - chunk * chunk_rows)
        if OF_QUERIES:  # the second piece alone is what the ranks above need
            return (source > peer) | (stop > pieces_of(rows))
        else:  # of keys it is the first
            return (source > peer) | (start < pieces_of(rows)) | (stop > rows)


@td.jit
def slot_bytes(total, row_bytes):
    """What one rank's shard takes; those of all ranks lie one after the other."""
    return (tl.cast(total, tl.int64) * row_bytes + _BYTES - 1) // _BYTES * _BYTES


@td.jit
def _push_part(ctx, at, slot_at, start, count, row_bytes, half, peer, COPY_WORDS: tl.constexpr):
    begin = start.to(tl.int64) * row_bytes
    td.put(td.data_at(ctx, half, peer) + slot_at + begin, at + begin, count.to(tl.int64) * row_bytes, COPY_WORDS)


@td.jit
def push_rows(
    ctx, half, signal, worker, num_workers, rows, total, chunk_rows, a_at, a_bytes, b_at, b_bytes, c_at, c_bytes,
    MASK: tl.constexpr, OF_QUERIES: tl.constexpr, COPY_WORDS: tl.constexpr, trace,
):
    """Push our rows of tensors a, b and perhaps c to the peers that need them; one of ``num_workers`` programs.

    ``a_at``: address of the first row; ``a_bytes``: of a row. Of c, which is None or of whole STAT_ROWS, ``c_bytes``
    are those of STAT_ROWS rows.
    """
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    num_chunks = (total + chunk_rows - 1) // chunk_rows
    a_slot, b_slot = slot_bytes(total, a_bytes), slot_bytes(total, b_bytes)
    if worker == 0:
        # waiter: the peers' last pieces of work
        td.notify_all(ctx, td.signal_at(ctx, half, ranks * num_chunks + me), signal)
    for item in range(worker, num_chunks * (ranks - 1), num_workers):
        peer = (me + 1 + item // num_chunks) % ranks
        chunk = item % num_chunks
        if travels(me, peer, chunk, chunk_rows, rows, total, MASK, OF_QUERIES):
            start = chunk * chunk_rows
            count = tl.minimum(chunk_rows, total - start)
            td.mark(trace, "pushes", peer, item // num_workers)
            _push_part(ctx, a_at, me * a_slot, start, count, a_bytes, half, peer, COPY_WORDS)
            _push_part(ctx, b_at, ranks * a_slot + me * b_slot, start, count, b_bytes, half, peer, COPY_WORDS)
            if c_at is not None:
                c_slot = slot_bytes((total + STAT_ROWS - 1) // STAT_ROWS, c_bytes)
                _push_part(
                    ctx, c_at, ranks * (a_slot + b_slot) + me * c_slot, start // STAT_ROWS,
                    (count + STAT_ROWS - 1) // STAT_ROWS, c_bytes, half, peer, COPY_WORDS,
                )
            # waiter: the peer's tiles that need these rows
            td.notify(ctx, td.signal_at(ctx, half, me * num_chunks + chunk), peer, signal)


@td.jit
def await_peers(ctx, half, signal, num_chunks):
    """Return when every peer has begun this call, without which nobody may end it: see law 3."""
    # producer: push_rows of each peer
    td.wait_plan_all(ctx, td.signal_at(ctx, half, td.num_ranks(ctx) * num_chunks), 1, signal)


@td.jit
def await_chunks(
    ctx, half, signal, at, known, until, rows, total, chunk_rows,
    MASK: tl.constexpr, OF_QUERIES: tl.constexpr, FOR_TMA: tl.constexpr,
):
    """``at``, tied to the arrival of chunks, of which ``known`` are known to be there and ``until`` shall be.

    They are counted as they arrive: all chunks of the rank below ours, then those of the next.
    """
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    num_chunks = (total + chunk_rows - 1) // chunk_rows
    for number in range(known, until):
        source = (me + ranks - 1 - number // num_chunks) % ranks
        chunk = number % num_chunks
        if travels(source, me, chunk, chunk_rows, rows, total, MASK, OF_QUERIES):
            signal_ptr = td.signal_at(ctx, half, source * num_chunks + chunk)
            seen = td.wait_plan(ctx, signal_ptr, signal, source, FOR_TMA=FOR_TMA)  # producer: push_rows of the source
            at = td.consume_token(at, seen)
    return at


@td.jit
def chunks_of(first_row, begin, end, chunk_rows, known, before):
    """How a tile goes through rows ``begin`` to ``end`` of one batch entry of a source: (segments, its last chunk).

    One segment, if all chunks are known to be there, else one for each chunk. The blocks, and the order in which they
    come, are the same. ``first_row``: of the batch entry; ``before``: the chunks of the sources before.
    """
    last = (first_row + end - 1) // chunk_rows
    segments = tl.where(known > before + last, 1, last - (first_row + begin) // chunk_rows + 1)
    return tl.where(begin < end, segments, 0), last


@td.jit
def blocks_of(segment, segments, last, first_row, begin, end, chunk_rows, BLOCK: tl.constexpr):
    """Of a segment: its last chunk, and its blocks of rows from ``begin`` on, first and past the last."""
    blocks = (end - begin + BLOCK - 1) // BLOCK
    chunk = last - segments + 1 + segment
    start = tl.maximum(chunk * chunk_rows - first_row - begin, 0) // BLOCK
    stop = ((chunk + 1) * chunk_rows - first_row - begin) // BLOCK
    return chunk, tl.where(segment == 0, 0, start), tl.where(chunk == last, blocks, stop)


@td.jit
def load_rows(
    desc, at, plane, sheet, first_row, head, heads, row, stop,
    DTYPE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    USE_TMA: tl.constexpr, CLEAN: tl.constexpr,
):
    """Rows ``row`` to row + BLOCK of one head and batch entry, [BLOCK, BLOCK_WIDTH]; zeros past WIDTH and the shard.

    ``at``: address of the shard; ``first_row``: of the batch entry in it; ``plane, sheet``: where the descriptor has
    it. What is at ``stop`` and after it is zero too without TMA, and with it if CLEAN, for memory that nobody has
    written may hold NaN.
    """
    offs = row + tl.arange(0, BLOCK)
    if USE_TMA:
        tile = desc.load([plane, sheet, head, row, 0]).reshape(BLOCK, BLOCK_WIDTH)
        if CLEAN:
            tile = tl.where((offs < stop)[:, None], tile, tl.full((BLOCK, BLOCK_WIDTH), 0.0, DTYPE))
    else:
        cols = tl.arange(0, BLOCK_WIDTH)
        mask = (offs < stop)[:, None] & (cols < WIDTH)[None, :]
        places = (tl.cast(first_row, tl.int64) + offs) * heads + head
        tile = tl.load(td.pointer_to(at, DTYPE) + places[:, None] * WIDTH + cols[None, :], mask=mask, other=0.0)
    return tile


@td.jit
def store_rows_of(
    ptr, tile, first_row, head, heads, row, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):
    """Store what ``load_rows`` would load, from fp32."""
    offs, cols = row + tl.arange(0, BLOCK), tl.arange(0, BLOCK_WIDTH)
    places = (tl.cast(first_row, tl.int64) + offs) * heads + head
    mask = (offs < rows)[:, None] & (cols < WIDTH)[None, :]
    tl.store(
        ptr + places[:, None] * WIDTH + cols[None, :], td.from_float32(tile, ptr.dtype.element_ty), mask=mask
    )


@td.jit
def accumulate(acc, a, b, PRECISION: tl.constexpr):
    """acc + a @ b, with a rounded to the type of b."""
    return add_product(acc, td.from_float32(a, b.dtype), b, PRECISION)
