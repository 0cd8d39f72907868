"""Forward kernel of flash_decode: attention of a few query rows over this rank's keys, then exchange and merge.

A *tile* is one batch entry, one head of the cache and one block of query rows. The blocks of keys of all tiles form one
sequence of work, in this order, and each program computes an equal, contiguous share of it (as in Stream-K). So any
batch with any lengths fills the GPU, and the lengths can stay on the device.

A program that computes only a part of a tile stores the partial result in scratch memory. The last program to store a
part merges the parts in order, and stores the result in the buffer of every rank. If a tile has many parts, they are
merged in groups first, each group by the last of its programs. When a program has no work left, it sets one signal per
finished tile at each peer. It sets all of them together, because each release waits for earlier stores to arrive. Then
it waits for the same tiles from all peers, and merges them in rank order.

Progress (invariant 1). No program waits before it has sent all its tiles. Shares are in program order. So the programs
of a rank that have started, however many, have sent a prefix of the tiles and wait only for tiles in this prefix. The
rank with the shortest prefix can always proceed, so not all programs need to be resident.

Buffer reuse (invariant 3). Every rank waits for tiles of all peers, so no rank can finish a call that another rank has
not begun.

If the group spans several nodes, ``kernel_multinode`` exchanges and merges the finished tiles.

With CHUNK > 0 the sequence of work consists of chunks of blocks instead of single blocks. A chunk of a tile is then a
part of its own, so the parts of a tile do not depend on other tiles, nor on the number of programs.
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
from tdkernels.ops.attention.flash_decode.kernel_work import (
    blocks_of_part,
    end_of_part,
    num_units,
    tile_after,
    tile_at,
)
from tdkernels.ops.attention.flash_decode.kv_cache import (
    FP8_NONE,
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

# Upper bounds of numbered trace marks: before the tiles of a program, and per tile.
TURNS_BEFORE_TILES, TURNS_OF_TILE = tl.constexpr(2), tl.constexpr(4)


# ---- attention of one tile over a range of blocks of keys ----


@td.jit
def _capped(scores, cap, SOFT_CAP: tl.constexpr):
    """Return cap * tanh(scores / cap). As everywhere in this module, scores contain the factor log2(e)."""
    if SOFT_CAP:
        return cap - 2.0 * cap / (tl.exp2(scores * (2.0 * LOG2_E / cap)) + 1.0)
    else:
        return scores


@td.jit
def _attention_mask(keys, length, after, step, window, TQ: tl.constexpr, WINDOW: tl.constexpr):
    """Return the mask [rows, keys] of the keys of this rank that each query row attends to.

    ``step`` is the index of each row's query among TQ, negative for padding. ``after`` keys are on later ranks.
    """
    visible = (keys < length)[None, :] & (step >= 0)[:, None]
    if TQ > 1 or WINDOW:
        # Distance from the key to the position of the query in the whole sequence.
        behind = (after + length - TQ - keys)[None, :] + step[:, None]
        if TQ > 1:
            visible &= behind >= 0
        if WINDOW:
            visible &= behind < window
    return visible


@td.jit
def _add_second_part(
    scores, q2, q2_odd, cache, strides, keys, length, k_rows, there, k1_scale, TILE: tl.constexpr, CACHE: tl.constexpr
):
    """Add the scores of the columns of keys after the first D1, which may have a cache of their own.

    Such a cache is neither fp8 nor scaled. Other arguments as for ``attend``.
    """
    k_ptr, _, rope_ptr, table_ptr, num_pages = cache
    WIDTH: tl.constexpr = TILE.d - TILE.d1
    if CACHE.rope:
        if CACHE.scales:
            scores *= k1_scale
        k_rows, there = key_rows(table_ptr, keys, keys < length, num_pages, strides[6], strides[7], CACHE.page)
        k2 = cache_rows(rope_ptr, k_rows, there, WIDTH, TILE.d2, FP8_NONE, False)
        return add_scores(scores, q2, q2_odd, k2, FP8_NONE, False, TILE.precision)
    else:
        k2 = cache_rows(k_ptr + TILE.d1, k_rows, there, WIDTH, TILE.d2, CACHE.fp8, CACHE.pairs)
        return add_scores(scores, q2, q2_odd, k2, CACHE.fp8, CACHE.pairs, TILE.precision)


@td.jit
def attend(
    q1, q2, cache, strides, first, last, length, after, step, options,
    TILE: tl.constexpr, CACHE: tl.constexpr,
):
    """Return (o [BLOCK_M, DVP], lse [BLOCK_M] to base 2) over blocks ``first`` to ``last - 1`` of the keys.

    Keys are loaded in two parts of D1 and D2 columns.

    cache: from ``cache_of``
    strides: as for ``flash_decode_kernel``
    options: (score scale, soft cap, window, scale of k1 if k2 has a cache of its own)
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    D1: tl.constexpr = TILE.d1
    D2: tl.constexpr = TILE.d2
    DVP: tl.constexpr = TILE.padded_dv
    k_ptr, v_ptr, _, table_ptr, num_pages = cache
    stride_kb, stride_ks, _, stride_vb, stride_vs, _, _, _, _, _ = strides
    score_scale, cap, window, k1_scale = options
    WIDTH1: tl.constexpr = TILE.d if TILE.d < D1 else D1
    running_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight_sum = tl.full((BLOCK_M,), 0.0, tl.float32)
    acc = tl.full((BLOCK_M, DVP // 2 if CACHE.pairs else DVP), 0.0, tl.float32)
    acc_odd = acc if CACHE.pairs else 0
    q1, q1_odd = query_columns(q1, D1, CACHE.pairs)
    if D2:
        q2, q2_odd = query_columns(q2, D2, CACHE.pairs and not CACHE.rope)
    for block in range(first, last):
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        k_rows, there = key_rows(table_ptr, keys, keys < length, num_pages, stride_kb, stride_ks, CACHE.page)
        k1 = cache_rows(k_ptr, k_rows, there, WIDTH1, D1, CACHE.fp8, CACHE.pairs)
        scores = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
        scores = add_scores(scores, q1, q1_odd, k1, CACHE.fp8, CACHE.pairs, TILE.precision)
        if D2:
            scores = _add_second_part(
                scores, q2, q2_odd, cache, strides, keys, length, k_rows, there, k1_scale, TILE, CACHE
            )
        scores = _capped(scores * score_scale, cap, TILE.soft_cap)
        visible = _attention_mask(keys, length, after, step, window, TILE.queries, TILE.window)
        if CACHE.page:
            visible &= pages_exist(table_ptr, keys, keys < length, num_pages, CACHE.page)[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(running_max, td.max_of(scores, 1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(running_max - base)
        weight_sum = weight_sum * rescale + td.sum_of(p, 1)
        running_max = new_max
        if CACHE.value_is_key:
            v = k1
        else:
            v_rows, v_there = key_rows(table_ptr, keys, keys < length, num_pages, stride_vb, stride_vs, CACHE.page)
            v = cache_rows(v_ptr, v_rows, v_there, TILE.dv, DVP, CACHE.fp8, CACHE.pairs)
        acc, acc_odd = add_values(acc, acc_odd, rescale, p, v, CACHE.fp8, CACHE.pairs, TILE.precision)
    if CACHE.pairs:
        acc = tl.join(acc, acc_odd).reshape(BLOCK_M, DVP)
    nonempty = weight_sum > 0.0
    o = acc / tl.where(nonempty, weight_sum, 1.0)[:, None]
    return o, tl.where(nonempty, running_max + tl.log2(tl.where(nonempty, weight_sum, 1.0)), float("-inf"))


# ---- assignment of work to programs ----


@td.jit
def _keys_on_later_ranks(
    ctx, half, signal, is_void, lengths, entries, tiles,
    RANKS: tl.constexpr, NODES: tl.constexpr, RP: tl.constexpr, DVP: tl.constexpr, trace,
):
    """Exchange lengths between the ranks, and return the number of keys of each entry on later ranks."""
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
def _first_blocks(lengths, after, window, TQ: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Return for each entry the block with the first key that is visible to its first query."""
    if WINDOW:
        first_keys = lengths + after - (window + TQ - 1)
        return tl.minimum(tl.maximum(first_keys, 0), lengths) // BLOCK_N
    else:
        return tl.full(lengths.shape, 0, tl.int32)


@td.jit
def num_blocks(length, skipped, BLOCK_N: tl.constexpr):
    """Return the number of blocks of keys of a tile after the ``skipped`` invisible ones, at least 1."""
    return tl.maximum((length + BLOCK_N - 1) // BLOCK_N - skipped, 1)


@td.jit
def cache_of(k_ptr, v_ptr, rope_ptr, table_ptr, entry, head, num_pages, strides, CACHE: tl.constexpr):
    """Return the argument ``cache`` of ``attend`` for one entry and head; strides as for ``flash_decode_kernel``."""
    stride_kb, _, stride_kh, stride_vb, _, stride_vh, stride_rb, _, stride_rh, stride_table = strides
    from_entry = tl.where(CACHE.page == 0, entry.to(tl.int64), 0)
    return (
        k_ptr + from_entry * stride_kb + head.to(tl.int64) * stride_kh,
        v_ptr + from_entry * stride_vb + head.to(tl.int64) * stride_vh,
        rope_ptr + from_entry * stride_rb + head.to(tl.int64) * stride_rh,
        table_ptr + entry.to(tl.int64) * stride_table, num_pages,
    )


@td.jit
def scales_of(k_scale_ptr, v_scale_ptr, head, score_scale, CACHE: tl.constexpr):
    """Return the factors of (scores, values, scores of k1 before those of k2 are added).

    They include the scales of an fp8 cache.
    """
    scale, one = tl.cast(score_scale, tl.float32), tl.full((), 1.0, tl.float32)
    if CACHE.scales:
        scale_k = tl.load(k_scale_ptr + head * (CACHE.scales - 1))
        scale_v = tl.load(v_scale_ptr + head * (CACHE.scales - 1))
        if CACHE.rope:
            return scale, scale_v, scale_k
        else:
            return scale * scale_k, scale_v, one
    else:
        return scale, one, one


_NOT_SPECIALIZED = ["B", "heads", "capacity", "num_pages", "score_scale", "cap", "window", "plan"]


@td.jit(do_not_specialize=_NOT_SPECIALIZED)
def flash_decode_kernel(
    ctx, q_ptr, k_ptr, v_ptr, lens_ptr, table_ptr, k_scale_ptr, v_scale_ptr, rope_ptr, o_ptr, lse_ptr, lse2_ptr,
    scratch_ptr, flags_ptr, B, heads, capacity, num_pages, score_scale, cap, window, plan, strides,
    RANKS: tl.constexpr, BP: tl.constexpr, TILE: tl.constexpr, CACHE: tl.constexpr, NUMBERS: tl.constexpr,
    NODES: tl.constexpr = 1, CHUNK: tl.constexpr = 0, trace_ptr=None,
):
    """Compute o [B, TQ, heads * G, DV] and lse from q [B, TQ, heads * G, D], the caches, and lens [B].

    A half of the workspace holds o [RANKS, tiles, RP, DVP] and lse [RANKS, tiles, RP] of the tiles of every rank, in
    fp32, then lengths [RANKS, BP]. Signal ``source * tiles + tile`` is set when the source's tile is stored, signal
    ``RANKS * tiles + source`` when its lengths are stored. With NODES > 1 the layout is that of ``kernel_multinode``.

    Scratch memory holds partial tiles as (o, lse), like a half. Flag ``tile`` counts the parts of a tile, or its groups
    of parts, that are stored there. The flags of groups come after the flags of tiles.

    rope_ptr: with CACHE.rope, the columns of the keys after the first D1; otherwise any pointer
    flags_ptr: flags of a single rank, which has no workspace
    strides: (batch, sequence, head) of k, of v and of the rope columns, then the row stride of the block table
    BP: B, rounded up to a power of two
    TILE: a ``DecodeTile``
    CACHE: a ``CacheForm``
    NUMBERS: fp32 elements loaded at a time to merge parts
    CHUNK: minimum blocks of keys per chunk, or 0
    """
    RP: tl.constexpr = TILE.rows
    DVP: tl.constexpr = TILE.padded_dv
    BLOCKS_R: tl.constexpr = (TILE.queries * TILE.group + RP - 1) // RP
    PART: tl.constexpr = RP * DVP
    FP8_2: tl.constexpr = 0 if CACHE.rope else CACHE.fp8
    ROWS: tl.constexpr = rows_at_a_time(RP, DVP, parts_at_a_time(DVP, NUMBERS), NUMBERS)  # rows merged at a time
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
            after = _keys_on_later_ranks(
                ctx, half, signal, is_void, lengths, entries, tiles, RANKS, NODES, RP, DVP, trace
            )

    # An equal share of all units of work: blocks, or chunks of them. A tile without keys counts as one block, so that a
    # program sends it.
    blocks = num_blocks(
        lengths, _first_blocks(lengths, after, window, TILE.queries, TILE.block_n, TILE.window), TILE.block_n
    )
    units = num_units(blocks, CHUNK)
    ends = td.running_sum(tl.where(entries < B, units, 0) * tiles_of_entry, 0)
    work = td.max_of(ends, 0)
    share = (work + tl.num_programs(0) - 1) // tl.num_programs(0)
    begin = pid * share
    end = tl.minimum(begin + share, work)
    entry, which, first = tile_at(begin, ends, units, tiles_of_entry)
    rows_m = tl.arange(0, TILE.block_m)
    parts = tiles + (work if CHUNK > 0 else tl.num_programs(0))
    scratch = scratch_ptr, scratch_ptr + tl.cast(parts, tl.int64) * PART, flags
    outputs = o_ptr, lse_ptr, lse2_ptr

    first_tile = entry * tiles_of_entry + which
    pos = begin
    count = 0  # number of tiles that this program finishes; they are consecutive
    last = -1  # the last of them
    while pos < end:
        length = num_keys(lens_ptr, entry, True, capacity)
        other_keys = td.gather_lane(after, entries, entry) if KNOWS_OTHERS else 0
        skipped = _first_blocks(length, other_keys, window, TILE.queries, TILE.block_n, TILE.window)
        tile_blocks = num_blocks(length, skipped, TILE.block_n)
        tile_units = num_units(tile_blocks, CHUNK)
        stop = end_of_part(pos, first, end, tile_units, CHUNK)
        first_block, past_block = blocks_of_part(pos - first, stop - first, tile_blocks, CHUNK)
        head, block_r = which // BLOCKS_R, which % BLOCKS_R
        tile = entry * tiles_of_entry + which
        place = entry, head, block_r, tile
        row = block_r * RP + rows_m
        is_row = (rows_m < RP) & (row < TILE.queries * TILE.group)
        query = query_rows(entry, head, row, heads, TILE.group, TILE.queries)
        q1 = load_query(q_ptr, query, is_row, TILE.d, 0, TILE.d1, CACHE.fp8)
        q2 = load_query(q_ptr, query, is_row, TILE.d, TILE.d1, TILE.d2, FP8_2) if TILE.d2 else q1
        scale_k, scale_v, scale_k1 = scales_of(k_scale_ptr, v_scale_ptr, head, score_scale, CACHE)
        turn = TURNS_BEFORE_TILES + TURNS_OF_TILE * (tile - first_tile)
        td.mark(trace, "multiplies", NO_PEER, turn)
        cache = cache_of(k_ptr, v_ptr, rope_ptr, table_ptr, entry, head, num_pages, strides, CACHE)
        o, lse = attend(
            q1, q2, cache, strides, skipped + first_block, skipped + past_block, length, other_keys,
            tl.where(is_row, row // TILE.group, -1), (scale_k, cap, window, scale_k1), TILE, CACHE,
        )
        o *= scale_v
        td.mark(trace, "stores", NO_PEER, turn + 1)
        if stop - pos == tile_units:
            count += 1
            last = tile
            give(ctx, half, signal, o, lse, rows_m, place, tiles, heads, outputs, RANKS, TILE, NODES)
        else:
            count, last = join_part(
                ctx, half, signal, o, lse, place, tiles, heads, outputs, scratch, (first, tile_units),
                pos if CHUNK > 0 else pid, 1 if CHUNK > 0 else share, (count, last), turn, RANKS, TILE, NUMBERS, NODES,
                trace,
            )
        entry, which, first = tile_after(entry, which, first, stop, tile_units, tiles_of_entry, CHUNK)
        pos = stop

    if NODES > 1:
        td.mark(trace, "sums")  # includes all transfers and waits of merge_nodes
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


# The same kernel for NODES > 1, linked with the network library.
flash_decode_nodes_kernel = td.jit(network=True, do_not_specialize=_NOT_SPECIALIZED)(flash_decode_kernel.fn)
