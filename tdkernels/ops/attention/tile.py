"""Building blocks of the ag_attention kernels: which rows a rank needs from each peer, how to send and read them.

A shard is [B, S / W, H, D]. Its rows are the B * S / W positions, which are sent in chunks of ``chunk_rows`` rows.
Signal ``source * num_chunks + chunk`` of a half is set by ``source`` when a chunk of each of its tensors is in this
rank's memory; the waiters are the tiles that read it. Signal ``ranks * num_chunks + source`` is set when the source has
begun the call; its waiter is the last work item, since a rank may need no rows of a peer.

A rank receives the shard of the next lower rank first, then of the rank below that, and so on (modulo W). So all ranks
send to different peers at any time, and the shard that is needed first arrives completely before the next one.
"""

from typing import NamedTuple

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.gemm_tile import add_product

# Masks: none; causal with contiguous shards; causal with zigzag shards, which consist of two pieces per rank.
ALL, CONTIGUOUS, ZIGZAG = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
STAT_ROWS = tl.constexpr(16)  # inner size of the statistics: [rows / STAT_ROWS, 2, heads, STAT_ROWS]
_BYTES = tl.constexpr(16)  # alignment of slots and chunks


class AttentionTile(NamedTuple):
    """Compile-time parameters of the ag_attention kernels, their argument ``TILE``.

    Attributes:
        d: Elements per head of queries and keys.
        dv: Elements per head of values.
        block_d: d, padded to the block size.
        block_dv: dv, padded to the block size.
        block_q: Queries per tile.
        block_k: Keys per block.
        mask: ``ALL``, ``CONTIGUOUS`` or ``ZIGZAG``.
        straddles: Whether a block of keys can overlap both pieces of a rank.
        elem_bytes: Bytes per element.
        use_tma: Whether operands are read through tensor descriptors.
        precision: ``input_precision`` of ``tl.dot`` for fp32 operands.
        stages: Pipeline stages of the loop over blocks.
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
    """Return the positions in a rank's first piece. If ``rows`` is odd, the second piece has one less."""
    return (rows + 1) // 2


@td.jit
def keys_seen(source, me, rows, MASK: tl.constexpr):
    """Return how many of another rank's keys are visible to the queries of our (first piece, second piece).

    The visible keys are always the first ones of the shard.
    """
    if MASK == ALL:
        return rows, rows
    elif MASK == CONTIGUOUS:
        seen = tl.where(source < me, rows, 0)
        return seen, seen
    else:
        return tl.where(source < me, pieces_of(rows), 0), tl.where(source < me, pieces_of(rows), rows)


@td.jit
def queries_seeing(source, me, rows, MASK: tl.constexpr):
    """Return the first query of another rank to which the keys of our (first piece, second piece) are visible."""
    if MASK == ALL:
        return rows * 0, rows * 0
    elif MASK == CONTIGUOUS:
        start = tl.where(source > me, 0, rows)
        return start, start
    else:
        return tl.where(source > me, 0, pieces_of(rows)), tl.where(source > me, rows, pieces_of(rows))


@td.jit
def travels(source, peer, chunk, chunk_rows, rows, total, MASK: tl.constexpr, OF_QUERIES: tl.constexpr):
    """Return whether a peer needs any row of a chunk of the source's keys, or of its queries if OF_QUERIES."""
    if MASK == ALL:
        return source != peer
    elif MASK == CONTIGUOUS:
        return (source > peer) if OF_QUERIES else (source < peer)
    else:
        start = chunk * chunk_rows % rows
        stop = start + tl.minimum(chunk_rows, total - chunk * chunk_rows)
        if OF_QUERIES:  # higher ranks need only the second piece
            return (source > peer) | (stop > pieces_of(rows))
        else:  # higher ranks need only the first piece
            return (source > peer) | (start < pieces_of(rows)) | (stop > rows)


@td.jit
def slot_bytes(total, row_bytes):
    """Return the bytes of the slot for one rank's shard. The slots of all ranks are adjacent."""
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
    """Push our rows of tensors a, b and optionally c to the peers that need them, as one of ``num_workers`` programs.

    Args:
        a_at: Address of the first row of a.
        a_bytes: Bytes per row of a.
        b_at: Address of the first row of b.
        b_bytes: Bytes per row of b.
        c_at: Address of c, or None. c consists of whole groups of STAT_ROWS rows.
        c_bytes: Bytes per STAT_ROWS rows of c.
    """
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    num_chunks = (total + chunk_rows - 1) // chunk_rows
    a_slot, b_slot = slot_bytes(total, a_bytes), slot_bytes(total, b_bytes)
    if worker == 0:
        # waiter: the last work item of each peer
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
    """Wait until every peer has begun this call. No rank may finish a call before that (invariant 3)."""
    # producer: push_rows of each peer
    td.wait_plan_all(ctx, td.signal_at(ctx, half, td.num_ranks(ctx) * num_chunks), 1, signal)


@td.jit
def await_chunks(
    ctx, half, signal, at, known, until, rows, total, chunk_rows,
    MASK: tl.constexpr, OF_QUERIES: tl.constexpr, FOR_TMA: tl.constexpr,
):
    """Wait for the chunks ``known`` to ``until - 1``, and return ``at`` with a dependency on their arrival.

    Chunks are counted in the order of their arrival: all chunks of the next lower rank, then of the rank below that.
    The first ``known`` chunks are known to have arrived.
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
    """Return (segments, last chunk) of rows ``begin`` to ``end - 1`` of one batch entry of a source.

    There is one segment if all chunks are known to have arrived, otherwise one per chunk. The blocks and their order
    are the same in both cases.

    first_row: first row of the batch entry
    before: number of chunks of the sources before this one
    """
    last = (first_row + end - 1) // chunk_rows
    segments = tl.where(known > before + last, 1, last - (first_row + begin) // chunk_rows + 1)
    return tl.where(begin < end, segments, 0), last


@td.jit
def blocks_of(segment, segments, last, first_row, begin, end, chunk_rows, BLOCK: tl.constexpr):
    """Return (last chunk, first block, end block) of a segment. Blocks count rows from ``begin`` on."""
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
    """Load rows ``row`` to ``row + BLOCK - 1`` of one head and batch entry, [BLOCK, BLOCK_WIDTH].

    Elements beyond WIDTH or beyond the shard are zero. Rows from ``stop`` on are zero without TMA; with TMA only if
    CLEAN, which is needed because uninitialized memory may hold NaN.

    Args:
        at: Address of the shard.
        plane: First index in the descriptor, which selects the shard.
        sheet: Second index in the descriptor, which selects the batch entry.
        first_row: First row of the batch entry in the shard.
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
    """Store an fp32 tile to the rows that ``load_rows`` reads, converted to the dtype of ``ptr``."""
    offs, cols = row + tl.arange(0, BLOCK), tl.arange(0, BLOCK_WIDTH)
    places = (tl.cast(first_row, tl.int64) + offs) * heads + head
    mask = (offs < rows)[:, None] & (cols < WIDTH)[None, :]
    tl.store(
        ptr + places[:, None] * WIDTH + cols[None, :], td.from_float32(tile, ptr.dtype.element_ty), mask=mask
    )


@td.jit
def accumulate(acc, a, b, PRECISION: tl.constexpr):
    """Return acc + a @ b, with a rounded to the dtype of b."""
    return add_product(acc, td.from_float32(a, b.dtype), b, PRECISION)
