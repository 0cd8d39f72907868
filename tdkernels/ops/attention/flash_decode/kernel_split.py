"""Kernels of method "split" of flash_decode: attention over parts of the keys, then a second launch that merges them.

In the kernel of method "fused" one program merges the parts of a tile or, if there are many, one program each group of
8 large parts and one the groups. So few programs read all parts, which takes long for a latent cache, where a part has
512 columns in fp32. Here many programs merge a few rows each.

A *tile* is one batch entry, one head of the cache and one block of query rows. The blocks of keys of all entries form
one sequence of work (``kernel_work``), which is divided into ``shares`` equal shares. The tiles of an entry are
computed over the same shares: program p computes share p // T of tile p % T, where T is the number of tiles of an
entry. So programs that run at the same time read the same keys, which come from the L2 cache after the first read.

A program stores every part of a tile. The part of tile t of entry e in share s has the number t * (B + shares) + e + s.
These are distinct, because a program that stores several parts goes to the next entry.

With CHUNK > 0 the units of the sequence of work are chunks of blocks. Each chunk of a tile is a part of its own, so the
parts of an entry depend on its length alone. The number of chunk c is t * B * SLOTS + e * SLOTS + c, where SLOTS is the
most chunks that an entry can have.

Progress (invariant 1). Programs of the first launch do not wait. Programs of the second launch send all of their rows
before they wait for the same rows of the peers, and their tiles are in program order, as in ``kernel``.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.attention.flash_decode.kernel import attend, cache_of, num_blocks, scales_of
from tdkernels.ops.attention.flash_decode.kernel_merge import merge_ranks, query_rows, store_parts
from tdkernels.ops.attention.flash_decode.kernel_work import blocks_of_part, end_of_part, num_units
from tdkernels.ops.attention.flash_decode.kv_cache import load_query, num_keys
from tdkernels.ops.attention.tile import LN_2

# Parts whose lse is loaded at a time.
_LSE_AT_ONCE = tl.constexpr(16)


@td.jit
def _units_of_entries(lens_ptr, B, capacity, BLOCK_N: tl.constexpr, BP: tl.constexpr, CHUNK: tl.constexpr):
    """Return (indices of entries [BP], their units; 0 from index B on)."""
    entries = tl.arange(0, BP)
    lengths = num_keys(lens_ptr, entries, entries < B, capacity)
    return entries, tl.where(entries < B, num_units(num_blocks(lengths, 0, BLOCK_N), CHUNK), 0)


@td.jit
def _parts_of_tile(B, shares, slots, CHUNK: tl.constexpr):
    """Return the number of parts for which a tile has scratch memory."""
    return B * slots if CHUNK > 0 else B + shares


# ---- the first launch ----


@td.jit(do_not_specialize=["B", "heads", "capacity", "num_pages", "shares", "slots", "score_scale", "cap"])
def flash_decode_parts_kernel(
    q_ptr, k_ptr, v_ptr, lens_ptr, table_ptr, k_scale_ptr, v_scale_ptr, rope_ptr, scratch_ptr, B, heads, capacity,
    num_pages, shares, slots, score_scale, cap, strides, BP: tl.constexpr, TILE: tl.constexpr, CACHE: tl.constexpr,
    CHUNK: tl.constexpr = 0, PDL: tl.constexpr = False,
):
    """Store o [RP, DVP] and lse [RP] to base 2 of the parts of all tiles, in fp32.

    scratch_ptr: o of all parts, then their lse
    slots: most chunks of an entry, with CHUNK
    CHUNK: minimum blocks per chunk, or 0
    PDL: whether the second launch is a programmatic dependent launch
    Other arguments as for ``flash_decode_kernel``.
    """
    if PDL:
        td.launch_dependents()
    RP: tl.constexpr = TILE.rows
    DVP: tl.constexpr = TILE.padded_dv
    BLOCKS_R: tl.constexpr = (TILE.queries * TILE.group + RP - 1) // RP
    tiles_of_entry = heads * BLOCKS_R
    entries, units = _units_of_entries(lens_ptr, B, capacity, TILE.block_n, BP, CHUNK)
    ends = td.running_sum(units, 0)
    work = td.max_of(ends, 0)
    units_per_share = (work + shares - 1) // shares
    share = tl.program_id(0) // tiles_of_entry
    which = tl.program_id(0) % tiles_of_entry
    pos = tl.minimum(share * units_per_share, work)
    end = tl.minimum(pos + units_per_share, work)
    entry = td.sum_of(((ends <= pos) & (entries < B)).to(tl.int32), 0)
    first = td.max_of(tl.where(ends <= pos, ends, 0), 0)
    head, block_r = which // BLOCKS_R, which % BLOCKS_R
    rows_m = tl.arange(0, TILE.block_m)
    row = block_r * RP + rows_m
    is_row = (rows_m < RP) & (row < TILE.queries * TILE.group)
    scale_k, scale_v, scale_k1 = scales_of(k_scale_ptr, v_scale_ptr, head, score_scale, CACHE)
    FP8_2: tl.constexpr = 0 if CACHE.rope else CACHE.fp8
    parts_of_tile = _parts_of_tile(B, shares, slots, CHUNK)
    parts = tl.cast(tiles_of_entry, tl.int64) * parts_of_tile
    while pos < end:
        length = num_keys(lens_ptr, entry, True, capacity)
        blocks = num_blocks(length, 0, TILE.block_n)
        tile_units = num_units(blocks, CHUNK)
        stop = end_of_part(pos, first, end, tile_units, CHUNK)
        first_block, past_block = blocks_of_part(pos - first, stop - first, blocks, CHUNK)
        query = query_rows(entry, head, row, heads, TILE.group, TILE.queries)
        q1 = load_query(q_ptr, query, is_row, TILE.d, 0, TILE.d1, CACHE.fp8)
        q2 = load_query(q_ptr, query, is_row, TILE.d, TILE.d1, TILE.d2, FP8_2) if TILE.d2 else q1
        cache = cache_of(k_ptr, v_ptr, rope_ptr, table_ptr, entry, head, num_pages, strides, CACHE)
        o, lse = attend(
            q1, q2, cache, strides, first_block, past_block, length, 0, tl.where(is_row, row // TILE.group, -1),
            (scale_k, cap, 0, scale_k1), TILE, CACHE,
        )
        of_tile = entry * slots + pos - first if CHUNK > 0 else entry + share
        number = tl.cast(which, tl.int64) * parts_of_tile + of_tile
        at = number * (RP * DVP) + rows_m[:, None] * DVP + tl.arange(0, DVP)[None, :]
        tl.store(scratch_ptr + at, o * scale_v, mask=(rows_m < RP)[:, None])
        tl.store(scratch_ptr + parts * (RP * DVP) + number * RP + rows_m, lse, mask=rows_m < RP)
        entry += tl.where(stop == first + tile_units, 1, 0)
        first = tl.where(stop == first + tile_units, stop, first)
        pos = stop


# ---- the second launch ----


@td.jit
def _parts_of_entry(
    lens_ptr, entry, B, capacity, shares, slots, BLOCK_N: tl.constexpr, BP: tl.constexpr, CHUNK: tl.constexpr
):
    """Return (the number of the first part of an entry among those of a tile, the number of its parts)."""
    if CHUNK > 0:
        length = num_keys(lens_ptr, entry, True, capacity)
        return entry * slots, num_units(num_blocks(length, 0, BLOCK_N), CHUNK)
    else:
        entries, units = _units_of_entries(lens_ptr, B, capacity, BLOCK_N, BP, CHUNK)
        units_per_share = (td.sum_of(units, 0) + shares - 1) // shares
        first = td.sum_of(tl.where(entries < entry, units, 0), 0)
        own = td.gather_lane(units, entries, entry)
        first_share = first // units_per_share
        return entry + first_share, (first + own - 1) // units_per_share - first_share + 1


@td.jit
def _merged(o, lse, count, rows, columns, PART_ROWS: tl.constexpr, DVP: tl.constexpr, STEP: tl.constexpr):
    """Return (o [rows, columns], lse [rows]) of ``count`` consecutive parts of PART_ROWS rows, added in order.

    The maximum is known before the first part is read, so STEP parts are loaded at a time.
    """
    top = tl.full(rows.shape, float("-inf"), tl.float32)
    for i in range(0, count, _LSE_AT_ONCE):
        parts = i + tl.arange(0, _LSE_AT_ONCE)
        numbers = tl.load(
            lse + parts[:, None] * PART_ROWS + rows[None, :], mask=(parts < count)[:, None], other=float("-inf")
        )
        top = tl.maximum(top, td.max_of(numbers, 0))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.full(rows.shape, 0.0, tl.float32)
    merged = tl.full((rows.shape[0], columns.shape[0]), 0.0, tl.float32)
    at = rows[:, None] * DVP + columns[None, :]
    for i in range(0, count, STEP):
        for j in tl.static_range(STEP):
            part = tl.cast(i + j, tl.int64)
            there = part < count
            weight = tl.exp2(tl.load(lse + part * PART_ROWS + rows, mask=there, other=float("-inf")) - base)
            values = tl.load(o + part * (PART_ROWS * DVP) + at, mask=there, other=0.0)
            total += weight
            merged += weight[:, None] * values
    nonempty = total > 0.0
    divisor = tl.where(nonempty, total, 1.0)
    return merged / divisor[:, None], tl.where(nonempty, base + tl.log2(divisor), float("-inf"))


@td.jit
def _store(outputs, o, lse, entry, head, row, columns, heads, TILE: tl.constexpr):
    """Store columns of query rows of a head in the outputs, and their lse with the first columns."""
    o_ptr, lse_ptr, lse2_ptr = outputs
    query = query_rows(entry, head, row, heads, TILE.group, TILE.queries)
    there = row < TILE.queries * TILE.group
    o = td.from_float32(o, o_ptr.dtype.element_ty)
    at = query[:, None] * TILE.dv + columns[None, :]
    tl.store(o_ptr + at, o, mask=there[:, None] & (columns < TILE.dv)[None, :])
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + query, lse * LN_2, mask=there)
        if lse2_ptr is not None:
            tl.store(lse2_ptr + query, lse, mask=there)


@td.jit(do_not_specialize=["B", "heads", "capacity", "shares", "slots", "plan"])
def flash_decode_join_kernel(
    ctx, scratch_ptr, lens_ptr, o_ptr, lse_ptr, lse2_ptr, B, heads, capacity, shares, slots, plan,
    RANKS: tl.constexpr, BP: tl.constexpr, TILE: tl.constexpr, PART_ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr = 0, PDL: tl.constexpr = False,
):
    """Merge the parts of this rank, send the results to the peers, and merge those of all ranks in rank order.

    A half of the workspace and its signals are those of ``flash_decode_kernel``, with tiles of TILE.rows query rows,
    which divides PART_ROWS. A program merges as many consecutive tiles as the others. With RANKS = 1, the
    second index of a program is that of a block of COLUMNS columns; otherwise a program merges all of them.

    slots, CHUNK: as in the first launch
    PART_ROWS, BLOCK_N: query rows of a part, and keys of a block, of the first launch
    STEP: parts loaded at a time
    PDL: whether programs may start before the first launch has ended
    """
    RP: tl.constexpr = TILE.rows
    DVP: tl.constexpr = TILE.padded_dv
    BLOCKS_R: tl.constexpr = (TILE.queries * TILE.group + RP - 1) // RP
    PART_BLOCKS: tl.constexpr = (TILE.queries * TILE.group + PART_ROWS - 1) // PART_ROWS
    half, signal = 0, 0
    if RANKS > 1:
        _, half, signal = td.call(ctx, plan)
    tiles_of_entry = heads * BLOCKS_R
    tiles = B * tiles_of_entry
    parts_of_tile = _parts_of_tile(B, shares, slots, CHUNK)
    parts = tl.cast(heads * PART_BLOCKS, tl.int64) * parts_of_tile
    of_program = (tiles + tl.num_programs(0) - 1) // tl.num_programs(0)
    begin = tl.minimum(tl.program_id(0) * of_program, tiles)
    end = tl.minimum(begin + of_program, tiles)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, RP)
    for tile in range(begin, end):
        entry, which = tile // tiles_of_entry, tile % tiles_of_entry
        head, block_r = which // BLOCKS_R, which % BLOCKS_R
        first, count = _parts_of_entry(lens_ptr, entry, B, capacity, shares, slots, BLOCK_N, BP, CHUNK)
        if PDL:
            td.wait_for_prerequisites()
        of_tile = head * PART_BLOCKS + block_r * RP // PART_ROWS
        number = tl.cast(of_tile, tl.int64) * parts_of_tile + first
        o, lse = _merged(
            scratch_ptr + number * (PART_ROWS * DVP), scratch_ptr + parts * (PART_ROWS * DVP) + number * PART_ROWS,
            count, block_r * RP % PART_ROWS + rows, columns, PART_ROWS, DVP, STEP,
        )
        if RANKS > 1:
            store_parts(ctx, half, signal, o, lse, rows, tile, tiles, RANKS, RP, DVP)
        else:
            _store((o_ptr, lse_ptr, lse2_ptr), o, lse, entry, head, block_r * RP + rows, columns, heads, TILE)
    if RANKS > 1:
        merge_ranks(
            ctx, td.rank(ctx), half, signal, begin, end - begin, tiles, tiles_of_entry, heads, o_ptr, lse_ptr,
            lse2_ptr, RANKS, TILE, RP, False, (None, 0),
        )
        td.finish(ctx)

