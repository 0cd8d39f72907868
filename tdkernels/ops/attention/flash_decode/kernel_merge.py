"""Parts of a tile of flash_decode put together: those of a rank's programs, and those of the ranks of one node.

What a tile is, and why nobody waits for ever, is said in ``flash_decode_kernel``.
"""

import triton
import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.attention.tile import LN_2

# Numbers that a warp reads at a time to merge parts, for a read takes far longer than an addition, and parts at a time.
NUMBERS_OF_WARP, PARTS_AT_A_TIME = 4096, tl.constexpr(32)
# Of more parts than these a tile's are merged in two steps, so many at first: groups side by side, by their last ones.
# Of large parts fewer, since what one program reads from the L2 cache is what counts then, not how often it waits.
MOST_PARTS, PARTS_OF_GROUP = tl.constexpr(64), tl.constexpr(16)
MOST_LARGE_PARTS, LARGE_PARTS_OF_GROUP, LARGE_PART = tl.constexpr(16), tl.constexpr(8), tl.constexpr(16384)  # numbers


@triton.constexpr_function
def parts_at_a_time(width, numbers):
    """The parts to merge at a time if ``numbers`` are read: of wide rows fewer, so that more rows fit."""
    return PARTS_AT_A_TIME.value // (2 if 2 * width * PARTS_AT_A_TIME.value >= numbers else 1)


@triton.constexpr_function
def rows_at_a_time(rows, width, parts, numbers):
    """Of so many rows of a part, so wide, as many as make ``numbers`` with those of ``parts`` parts; one at least."""
    return min(rows, max(numbers // (parts * width), 1))


@td.jit
def query_rows(entry, head, row, heads, G: tl.constexpr, TQ: tl.constexpr):
    """Which rows of q [B * TQ * heads * G, D] a head's query rows are, [TQ, G] of them."""
    return (tl.cast(entry, tl.int64) * TQ + row // G) * (heads * G) + head * G + row % G


@td.jit
def merge_parts(o, lse, stride_o, stride_lse, count, rows, DVP: tl.constexpr, STEP: tl.constexpr):
    """(o [rows, DVP], lse [rows] to base 2) of some rows of a tile, over its ``count`` parts in their order.

    Part i has its o at ``o`` + i * stride_o, pointer to fp32, and its lse at ``lse`` + i * stride_lse.
    """
    highest = tl.full(rows.shape, float("-inf"), tl.float32)
    total = tl.full(rows.shape, 0.0, tl.float32)
    merged = tl.full((rows.shape[0], DVP), 0.0, tl.float32)
    offs = rows[:, None] * DVP + tl.arange(0, DVP)[None, :]
    for first in range(0, count, STEP):
        parts = first + tl.arange(0, STEP)
        there = parts < count
        at = parts.to(tl.int64)
        values = tl.load(
            o + (at * stride_o)[:, None, None] + offs[None, :, :], mask=there[:, None, None], other=0.0
        )
        weights = tl.load(
            lse + (at * stride_lse)[:, None] + rows[None, :], mask=there[:, None], other=float("-inf")
        )
        higher = tl.maximum(highest, td.max_of(weights, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(weights - base[None, :])
        shrink = tl.exp2(highest - base)
        total = total * shrink + td.sum_of(weights, 0)
        merged = merged * shrink[:, None] + td.sum_of(weights[:, :, None] * values, 0)
        highest = higher
    some = total > 0.0
    merged = merged / tl.where(some, total, 1.0)[:, None]
    return merged, tl.where(some, highest + tl.log2(tl.where(some, total, 1.0)), float("-inf"))


@td.jit
def merge_group(
    o, lse, flags, number, first, parts, ROWS: tl.constexpr, RP: tl.constexpr, DVP: tl.constexpr, GROUP: tl.constexpr
):
    """Leave in the place of its first part what part ``number`` and its group make, if we are the group's last to come.

    Returns whether we were. Parts of the tile have numbers from ``first`` on, and lie by their number.
    """
    begin = first + (number - first) // GROUP * GROUP
    count = tl.minimum(GROUP, first + parts - begin)
    # Each group has a word of its own: a tile's begin GROUP apart, and ``flags`` is one further for each tile.
    is_last = td.is_last_arriver(flags + begin // GROUP, count)
    if is_last:
        o += begin * (RP * DVP)
        lse += begin * RP
        for from_row in range(0, RP, ROWS):
            rows = from_row + tl.arange(0, ROWS)
            merged, merged_lse = merge_parts(o, lse, RP * DVP, RP, count, rows, DVP, GROUP)
            tl.debug_barrier()  # all threads have read what is now written over
            tl.store(o + rows[:, None] * DVP + tl.arange(0, DVP)[None, :], merged)
            tl.store(lse + rows, merged_lse)
    return is_last


@td.jit
def store_output(o_ptr, lse_ptr, lse2_ptr, o, lse, entry, head, row, heads, TILE: tl.constexpr):
    """Store query rows ``row`` … of a head as the caller gets them: o [B, TQ, heads * G, DV], lse in natural log.

    lse2_ptr: where lse is wanted to base 2, as it is, by the gradient: what is rounded once more is another number.
    """
    query = query_rows(entry, head, row, heads, TILE.group, TILE.queries)
    there = row < TILE.queries * TILE.group
    columns = tl.arange(0, TILE.padded_dv)
    o = td.from_float32(o, o_ptr.dtype.element_ty)
    tl.store(o_ptr + query[:, None] * TILE.dv + columns[None, :], o, mask=there[:, None] & (columns < TILE.dv)[None, :])
    tl.store(lse_ptr + query, lse * LN_2, mask=there)
    if lse2_ptr is not None:
        tl.store(lse2_ptr + query, lse, mask=there)


# ---- between the ranks of one node, all of which reach each other ----


@td.jit
def store_parts(
    ctx, half, signal, o, lse, rows, tile, tiles, RANKS: tl.constexpr, RP: tl.constexpr, DVP: tl.constexpr
):
    """Store some rows of a tile in the slot of this rank in every rank's buffer, our own first.

    A void launch stores nothing: a peer may still read what an earlier launch has stored.
    """
    me = td.rank(ctx)
    there = (rows < RP) & (td.is_void(signal) == 0)
    number = me.to(tl.int64) * tiles + tile
    offs = number * (RP * DVP) + rows[:, None] * DVP + tl.arange(0, DVP)[None, :]
    for step in tl.static_range(RANKS):
        data = td.pointer_to(td.data_at(ctx, half, (me + step) % RANKS), tl.float32)
        tl.store(data + offs, o, mask=there[:, None])
        tl.store(data + lse_at(tiles, RANKS, RP, DVP) + number * RP + rows, lse, mask=there)


@td.jit
def lse_at(tiles, RANKS: tl.constexpr, RP: tl.constexpr, DVP: tl.constexpr):
    """Where in a half the lse of all ranks' tiles begin, in numbers of fp32."""
    return tl.cast(tiles, tl.int64) * (RANKS * RP * DVP)


@td.jit
def exchange_lengths(ctx, half, signal, lengths, entries, first_signal, lens_at, RANKS: tl.constexpr):
    """How many keys the ranks after us have, of each entry; program 0 tells the peers how many are ours."""
    me = td.rank(ctx)
    BP: tl.constexpr = entries.shape[0]
    if tl.program_id(0) == 0:
        for step in tl.static_range(1, RANKS):
            data = (td.data_at(ctx, half, (me + step) % RANKS) + lens_at).to(tl.pointer_type(tl.int32))
            tl.store(data + me * BP + entries, lengths, mask=(entries >= 0) & (td.is_void(signal) == 0))
        td.notify_all(ctx, td.signal_at(ctx, half, first_signal + me), signal)  # waiter: all programs of all peers
    # producer: program 0 of every peer
    completed = td.wait_plan_all(ctx, td.signal_at(ctx, half, first_signal), 1, signal)
    after = tl.full(entries.shape, 0, tl.int32)
    data = (td.data_at(ctx, half, me) + lens_at).to(tl.pointer_type(tl.int32))
    for source in tl.static_range(RANKS):
        after += tl.load(data + source * BP + entries, mask=(entries >= 0) & (source > me), other=0)
    # Without all lengths, threads may have read different ones, and loops with barriers depend on them.
    return tl.where(completed, after, 0)


@td.jit
def merge_ranks(
    ctx, me, half, signal, ours, count, tiles, tiles_of_entry, heads, o_ptr, lse_ptr, lse2_ptr,
    RANKS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, CHECK_FAILED: tl.constexpr, trace,
):
    """Say that ``count`` tiles from number ``ours`` on are there, wait for the peers' and store what all make."""
    RP: tl.constexpr = TILE.rows
    DVP: tl.constexpr = TILE.padded_dv
    BLOCKS_R: tl.constexpr = (TILE.queries * TILE.group + RP - 1) // RP
    PART: tl.constexpr = RP * DVP
    RANKS_P: tl.constexpr = triton.next_power_of_2(RANKS)
    data = td.pointer_to(td.data_at(ctx, half, me), tl.float32)
    if count > 0:
        td.mark(trace, "pushes", ALL_PEERS)
        # waiter: the programs of each peer that finish these tiles there
        td.notify_all(ctx, td.signal_at(ctx, half, me * tiles + ours), signal, CHECK_FAILED=CHECK_FAILED, count=count)
        td.mark(trace, "waits", ALL_PEERS)
        # producer: the programs of each peer that finish these tiles there
        td.wait_plan_all(ctx, td.signal_at(ctx, half, ours), tiles, signal, count=count)
        td.mark(trace, "sums")
    for tile in range(ours, ours + count):
        which = tile % tiles_of_entry
        at = tl.cast(tile, tl.int64)
        for from_row in range(0, RP, ROWS):
            rows = from_row + tl.arange(0, ROWS)
            merged, merged_lse = merge_parts(
                data + at * PART, data + lse_at(tiles, RANKS, RP, DVP) + at * RP,
                tl.cast(tiles, tl.int64) * PART, tl.cast(tiles, tl.int64) * RP, RANKS, rows, DVP,
                RANKS_P if RANKS_P < PARTS_AT_A_TIME else PARTS_AT_A_TIME,
            )
            store_output(
                o_ptr, lse_ptr, lse2_ptr, merged, merged_lse, tile // tiles_of_entry, which // BLOCKS_R,
                which % BLOCKS_R * RP + rows, heads, TILE,
            )
