"""The kernel behind flash_decode: attention of a few query rows over this rank's keys, exchange and merge in one.

A *tile* is what belongs to one entry of the batch, one head of the cache and one block of query rows. All tiles' blocks
of keys make one line, in that order, of which every program takes an equal share: so any batch with any lengths fills
the GPU, and the lengths may stay on the device. Who has a part of a tile leaves it in scratch memory; the last to come
merges the parts in their order, of many parts those that the last ones of groups have made of theirs, and stores the
result in every rank's buffer. When a program has nothing left to compute it raises one signal for each of its tiles at
each peer, together, for each release waits for stores to arrive; then it waits for these tiles from all peers, and
merges them in rank order.

Nobody waits before he has sent everything. Shares are in the order of programs, so the programs of a rank that have
started, whatever their number, have sent a first part of the tiles, and wait for tiles of that part only. The rank on
which this part is smallest always gets through: no program has to be resident (law 1). Every rank waits for all peers'
tiles, so no rank can finish a call that another has not begun (law 3).

On several nodes what a program does with its tiles when it has nothing left to compute is ``kernel_multinode``.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS, NO_PEER
from tdkernels.ops.attention.flash_decode.kernel_merge import (
    exchange_lengths,
    lse_at,
    merge_ranks,
    parts_at_a_time,
    query_rows,
    rows_at_a_time,
)
from tdkernels.ops.attention.flash_decode.kernel_multinode import (
    exchange_lengths_of_nodes,
    lengths_of_nodes_at,
    merge_nodes,
)
from tdkernels.ops.attention.flash_decode.kernel_parts import give, join_part
from tdkernels.ops.attention.flash_decode.kv_cache import (
    add_scores,
    add_values,
    cache_rows,
    key_rows,
    load_query,
    num_keys,
    pages_exist,
    query_columns,
)
from tdkernels.ops.attention.tile import LOG2_E

# What a program notes with a number, at most: before its tiles, and of each of them.
TURNS_BEFORE_TILES, TURNS_OF_TILE = tl.constexpr(2), tl.constexpr(4)


# ---- attention of one tile over some blocks of keys ----


@td.jit
def _capped(scores, cap, SOFT_CAP: tl.constexpr):
    """Scores (times log2(e), as all here) within ±cap: cap * tanh(scores / cap)."""
    if SOFT_CAP:
        return cap - 2.0 * cap / (tl.exp2(scores * (2.0 * LOG2_E / cap)) + 1.0)
    else:
        return scores


@td.jit
def _sees(keys, length, after, step, window, TQ: tl.constexpr, WINDOW: tl.constexpr):
    """Whether the query of each row, the ``step``-th of TQ, sees each key of this rank; ``after`` keys follow ours."""
    seen = (keys < length)[None, :] & (step >= 0)[:, None]
    if TQ > 1 or WINDOW:
        # How many keys of the whole sequence lie between the key and the query's own place.
        behind = (after + length - TQ - keys)[None, :] + step[:, None]
        if TQ > 1:
            seen &= behind >= 0
        if WINDOW:
            seen &= behind < window
    return seen


@td.jit
def _attend(
    q1, q2, cache, strides, first, last, length, after, step, options,
    TILE: tl.constexpr, CACHE: tl.constexpr,
):
    """(o [BLOCK_M, DVP], lse [BLOCK_M] to base 2) of keys of blocks first to last; keys in two parts of D1 and D2.

    cache: (k_ptr, v_ptr, table_ptr, num_pages); strides: as of ``flash_decode_kernel``; options: (score scale, soft
    cap, window).
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    D1: tl.constexpr = TILE.d1
    D2: tl.constexpr = TILE.d2
    DVP: tl.constexpr = TILE.padded_dv
    k_ptr, v_ptr, table_ptr, num_pages = cache
    stride_kb, stride_ks, _, stride_vb, stride_vs, _, _ = strides
    score_scale, cap, window = options
    WIDTH1: tl.constexpr = TILE.d if TILE.d < D1 else D1
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.full((BLOCK_M,), 0.0, tl.float32)
    acc = tl.full((BLOCK_M, DVP // 2 if CACHE.pairs else DVP), 0.0, tl.float32)
    acc_odd = acc if CACHE.pairs else 0
    q1, q1_odd = query_columns(q1, D1, CACHE.pairs)
    if D2:
        q2, q2_odd = query_columns(q2, D2, CACHE.pairs)
    for block in range(first, last):
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        k_rows, there = key_rows(table_ptr, keys, keys < length, num_pages, stride_kb, stride_ks, CACHE.page)
        k1 = cache_rows(k_ptr, k_rows, there, WIDTH1, D1, CACHE.fp8, CACHE.pairs)
        scores = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
        scores = add_scores(scores, q1, q1_odd, k1, CACHE.fp8, CACHE.pairs, TILE.precision)
        if D2:
            k2 = cache_rows(k_ptr + D1, k_rows, there, TILE.d - D1, D2, CACHE.fp8, CACHE.pairs)
            scores = add_scores(scores, q2, q2_odd, k2, CACHE.fp8, CACHE.pairs, TILE.precision)
        scores = _capped(scores * score_scale, cap, TILE.soft_cap)
        seen = _sees(keys, length, after, step, window, TILE.queries, TILE.window)
        if CACHE.page:
            seen &= pages_exist(table_ptr, keys, keys < length, num_pages, CACHE.page)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, td.max_of(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + td.sum_of(p, 1)
        highest = higher
        if CACHE.value_is_key:
            v = k1
        else:
            v_rows, v_there = key_rows(table_ptr, keys, keys < length, num_pages, stride_vb, stride_vs, CACHE.page)
            v = cache_rows(v_ptr, v_rows, v_there, TILE.dv, DVP, CACHE.fp8, CACHE.pairs)
        acc, acc_odd = add_values(acc, acc_odd, shrink, p, v, CACHE.fp8, CACHE.pairs, TILE.precision)
    if CACHE.pairs:
        acc = tl.join(acc, acc_odd).reshape(BLOCK_M, DVP)
    some = total > 0.0
    o = acc / tl.where(some, total, 1.0)[:, None]
    return o, tl.where(some, highest + tl.log2(tl.where(some, total, 1.0)), float("-inf"))


# ---- who does what ----


@td.jit
def _keys_that_follow(
    ctx, half, signal, is_void, lengths, entries, tiles,
    RANKS: tl.constexpr, NODES: tl.constexpr, RP: tl.constexpr, DVP: tl.constexpr, trace,
):
    """Of each entry, how many keys the ranks after this one have; the ranks exchange their lengths."""
    td.mark(trace, "waits", ALL_PEERS, 0)
    if NODES > 1:
        first_signal, lens_at = lengths_of_nodes_at(tiles, RANKS, NODES, RP, DVP)
        after = exchange_lengths_of_nodes(
            ctx, half, signal, is_void, lengths, entries, first_signal, lens_at, RANKS, NODES
        )
    else:
        lens_at = (lse_at(tiles, RANKS, RP, DVP) + tl.cast(tiles, tl.int64) * (RANKS * RP)) * 4
        after = exchange_lengths(ctx, half, signal, lengths, entries, RANKS * tiles, lens_at, RANKS)
    td.mark(trace, "starts", NO_PEER, 1)
    return after


@td.jit
def _place(pos, ends, blocks, tiles_of_entry):
    """Of the line's place ``pos``: (entry, which of the entry's tiles, the tile's first place)."""
    entries = tl.arange(0, ends.shape[0])
    # Beyond the line, where nobody reads on, it is the last entry still.
    entry = tl.minimum(td.sum_of((ends <= pos).to(tl.int32), 0), ends.shape[0] - 1)
    of_tile = tl.maximum(td.gather_lane(blocks, entries, entry), 1)
    start = td.gather_lane(ends, entries, entry) - of_tile * tiles_of_entry
    which = (pos - start) // of_tile
    return entry, which, start + which * of_tile


@td.jit
def _first_blocks(lengths, after, window, TQ: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Of each entry, the block of the first key that the first query sees."""
    if WINDOW:
        first_keys = lengths + after - (window + TQ - 1)
        return tl.minimum(tl.maximum(first_keys, 0), lengths) // BLOCK_N
    else:
        return tl.full(lengths.shape, 0, tl.int32)


@td.jit
def _num_blocks(length, skipped, BLOCK_N: tl.constexpr):
    """Blocks of keys of a tile, behind those that nobody sees; one at least."""
    return tl.maximum((length + BLOCK_N - 1) // BLOCK_N - skipped, 1)


@td.jit
def _cache_of(k_ptr, v_ptr, table_ptr, entry, head, num_pages, strides, CACHE: tl.constexpr):
    """What ``_attend`` reads of one entry and one head of the cache; strides: as of ``flash_decode_kernel``."""
    stride_kb, _, stride_kh, stride_vb, _, stride_vh, stride_table = strides
    from_entry = tl.where(CACHE.page == 0, entry.to(tl.int64), 0)
    return (
        k_ptr + from_entry * stride_kb + head.to(tl.int64) * stride_kh,
        v_ptr + from_entry * stride_vb + head.to(tl.int64) * stride_vh,
        table_ptr + entry.to(tl.int64) * stride_table, num_pages,
    )


@td.jit
def _scales(k_scale_ptr, v_scale_ptr, head, score_scale, CACHE: tl.constexpr):
    """(what scores are multiplied by, what values are)"""
    scale_k, scale_v = tl.cast(score_scale, tl.float32), tl.full((), 1.0, tl.float32)
    if CACHE.scales:
        scale_k *= tl.load(k_scale_ptr + head * (CACHE.scales - 1))
        scale_v = tl.load(v_scale_ptr + head * (CACHE.scales - 1))
    return scale_k, scale_v


_OF_A_CALL = ["B", "heads", "capacity", "num_pages", "score_scale", "cap", "window", "plan"]


@td.jit(do_not_specialize=_OF_A_CALL)
def flash_decode_kernel(
    ctx, q_ptr, k_ptr, v_ptr, lens_ptr, table_ptr, k_scale_ptr, v_scale_ptr, o_ptr, lse_ptr, lse2_ptr, scratch_ptr,
    flags_ptr, B, heads, capacity, num_pages, score_scale, cap, window, plan, strides,
    RANKS: tl.constexpr, BP: tl.constexpr, TILE: tl.constexpr, CACHE: tl.constexpr, NUMBERS: tl.constexpr,
    NODES: tl.constexpr = 1, trace_ptr=None,
):
    """q [B, TQ, heads * G, D], keys and values of ``heads`` heads, lens [B] -> o [B, TQ, heads * G, DV], lse.

    A half holds o [RANKS, tiles, RP, DVP] and lse [RANKS, tiles, RP] of every rank's tiles, in fp32, then lengths
    [RANKS, BP]. Signal number ``source * tiles + tile`` says that the source's tile is there; behind these, ``source``
    says the same of its lengths. Flag number ``tile`` counts those that have left a part of it, or of a group of parts
    the sum, in scratch memory, which holds o and lse like a half does; groups' flags are behind those of the tiles.
    With NODES > 1 a half holds what ``kernel_multinode`` says.

    flags_ptr: of one rank alone, which has no workspace
    strides: (batch, sequence, head) of k, then of v, then of the block table
    BP: B, as a power of two; TILE: a ``DecodeTile``; CACHE: a ``CacheForm``; NUMBERS: that are read at a time to merge
    parts
    """
    RP: tl.constexpr = TILE.rows
    DVP: tl.constexpr = TILE.padded_dv
    BLOCKS_R: tl.constexpr = (TILE.queries * TILE.group + RP - 1) // RP
    PART: tl.constexpr = RP * DVP
    ROWS: tl.constexpr = rows_at_a_time(RP, DVP, parts_at_a_time(DVP, NUMBERS), NUMBERS)  # that are merged at a time
    KNOWS_OTHERS: tl.constexpr = RANKS > 1 and (TILE.queries > 1 or TILE.window)
    pid = tl.program_id(0)
    trace = (trace_ptr, pid)
    td.mark(trace, "starts")
    entries = tl.arange(0, BP)
    tiles_of_entry = heads * BLOCKS_R
    tiles = B * tiles_of_entry
    lengths = num_keys(lens_ptr, entries, entries < B, capacity)
    after = tl.full((BP,), 0, tl.int32)
    half, signal, flags = 0, 0, flags_ptr
    if RANKS > 1:
        flags = td.flag_at(ctx, 0)
        me = td.rank(ctx)
        epoch, half, signal = td.call(ctx, plan)
        is_void = td.is_void_for_all(signal) if NODES > 1 else False
        if KNOWS_OTHERS:
            after = _keys_that_follow(
                ctx, half, signal, is_void, lengths, entries, tiles, RANKS, NODES, RP, DVP, trace
            )

    # An equal share of all blocks. A tile without keys has one block too, so that somebody sends it.
    blocks = _num_blocks(
        lengths, _first_blocks(lengths, after, window, TILE.queries, TILE.block_n, TILE.window), TILE.block_n
    )
    ends = td.running_sum(tl.where(entries < B, blocks, 0) * tiles_of_entry, 0)
    work = td.max_of(ends, 0)
    share = (work + tl.num_programs(0) - 1) // tl.num_programs(0)
    begin = pid * share
    end = tl.minimum(begin + share, work)
    entry, which, first = _place(begin, ends, blocks, tiles_of_entry)
    rows_m = tl.arange(0, TILE.block_m)
    scratch = scratch_ptr, scratch_ptr + tl.cast(tiles + tl.num_programs(0), tl.int64) * PART, flags
    outputs = o_ptr, lse_ptr, lse2_ptr

    first_tile = entry * tiles_of_entry + which
    pos = begin
    count = 0  # of tiles that we finish, which follow each other
    last = -1  # of them
    while pos < end:
        length = num_keys(lens_ptr, entry, True, capacity)
        other_keys = td.gather_lane(after, entries, entry) if KNOWS_OTHERS else 0
        skipped = _first_blocks(length, other_keys, window, TILE.queries, TILE.block_n, TILE.window)
        of_tile = _num_blocks(length, skipped, TILE.block_n)
        stop = tl.minimum(end, first + of_tile)
        head, block_r = which // BLOCKS_R, which % BLOCKS_R
        tile = entry * tiles_of_entry + which
        place = entry, head, block_r, tile
        row = block_r * RP + rows_m
        is_row = (rows_m < RP) & (row < TILE.queries * TILE.group)
        query = query_rows(entry, head, row, heads, TILE.group, TILE.queries)
        q1 = load_query(q_ptr, query, is_row, TILE.d, 0, TILE.d1, CACHE.fp8)
        q2 = load_query(q_ptr, query, is_row, TILE.d, TILE.d1, TILE.d2, CACHE.fp8) if TILE.d2 else q1
        scale_k, scale_v = _scales(k_scale_ptr, v_scale_ptr, head, score_scale, CACHE)
        turn = TURNS_BEFORE_TILES + TURNS_OF_TILE * (tile - first_tile)
        td.mark(trace, "multiplies", NO_PEER, turn)
        cache = _cache_of(k_ptr, v_ptr, table_ptr, entry, head, num_pages, strides, CACHE)
        o, lse = _attend(
            q1, q2, cache, strides, skipped + pos - first, skipped + stop - first, length, other_keys,
            tl.where(is_row, row // TILE.group, -1), (scale_k, cap, window), TILE, CACHE,
        )
        o *= scale_v
        td.mark(trace, "stores", NO_PEER, turn + 1)
        if stop - pos == of_tile:
            count += 1
            last = tile
            give(ctx, half, signal, o, lse, rows_m, place, tiles, heads, outputs, RANKS, TILE, NODES)
        else:
            count, last = join_part(
                ctx, half, signal, o, lse, place, tiles, heads, outputs, scratch, (first, of_tile), share,
                (count, last), turn, RANKS, TILE, NUMBERS, NODES, trace,
            )
        is_last = which == tiles_of_entry - 1
        entry += tl.where(is_last, 1, 0)
        which = tl.where(is_last, 0, which + 1)
        first = first + of_tile
        pos = stop

    if NODES > 1:
        td.mark(trace, "sums")  # and all that this has to push and to wait for
        merge_nodes(
            ctx, half, signal, last - count + 1, tl.where(is_void, 0, count), tiles, tiles_of_entry, heads, o_ptr,
            lse_ptr, lse2_ptr, RANKS, NODES, TILE, ROWS, KNOWS_OTHERS,
        )
    elif RANKS > 1:
        merge_ranks(
            ctx, me, half, signal, last - count + 1, count, tiles, tiles_of_entry, heads, o_ptr, lse_ptr, lse2_ptr,
            RANKS, TILE, ROWS, KNOWS_OTHERS, trace,
        )
    td.mark(trace, "finishes")
    if RANKS > 1:
        td.finish(ctx)
    td.mark(trace, "ends")


# The same with NODES > 1, which speaks to the network, and is linked with its library.
flash_decode_nodes_kernel = td.jit(network=True, do_not_specialize=_OF_A_CALL)(flash_decode_kernel.fn)
