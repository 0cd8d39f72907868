"""Log-sum-exp merge of partial tiles of flash_decode: parts from the programs of a rank, and from the ranks of a node.

``kernel.py`` defines tiles and explains why no wait deadlocks.
"""

import triton
import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.attention.tile import LN_2

# fp32 elements that a warp loads at a time to merge parts, and parts merged at a time. Many loads are in flight at
# once, because a load takes far longer than an addition.
NUMBERS_OF_WARP, PARTS_AT_A_TIME = 4096, tl.constexpr(32)
# If a tile has more than MOST_PARTS parts, they are merged in two steps: first in groups of PARTS_OF_GROUP parts, which
# the last programs of the groups merge in parallel, then the groups. The limits are lower for large parts (at least
# LARGE_PART elements), where the amount that one program reads from the L2 cache matters, not the number of its waits.
MOST_PARTS, PARTS_OF_GROUP = tl.constexpr(64), tl.constexpr(16)
MOST_LARGE_PARTS, LARGE_PARTS_OF_GROUP, LARGE_PART = tl.constexpr(16), tl.constexpr(8), tl.constexpr(16384)


@triton.constexpr_function
def parts_at_a_time(width, numbers):
    """Return the parts to merge at a time if ``numbers`` elements are loaded; fewer for wide rows, so more rows fit."""
    return PARTS_AT_A_TIME.value // (2 if 2 * width * PARTS_AT_A_TIME.value >= numbers else 1)


@triton.constexpr_function
def rows_at_a_time(rows, width, parts, numbers):
    """Return the rows to merge at a time, so that ``parts`` parts of them have ``numbers`` elements; at least 1."""
    return min(rows, max(numbers // (parts * width), 1))


@td.jit
def query_rows(entry, head, row, heads, G: tl.constexpr, TQ: tl.constexpr):
    """Return the rows of q [B * TQ * heads * G, D] for row indices of a head of the cache, which has TQ * G rows."""
    return (tl.cast(entry, tl.int64) * TQ + row // G) * (heads * G) + head * G + row % G


@td.jit
def merge_parts(o, lse, stride_o, stride_lse, count, rows, DVP: tl.constexpr, STEP: tl.constexpr):
    """Merge rows of ``count`` parts of a tile in order, and return (o [rows, DVP], lse [rows] to base 2).

    The fp32 o of part i is at ``o + i * stride_o``, its lse at ``lse + i * stride_lse``.
    """
    running_max = tl.full(rows.shape, float("-inf"), tl.float32)
    weight_sum = tl.full(rows.shape, 0.0, tl.float32)
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
        new_max = tl.maximum(running_max, td.max_of(weights, 0))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(weights - base[None, :])
        rescale = tl.exp2(running_max - base)
        weight_sum = weight_sum * rescale + td.sum_of(weights, 0)
        merged = merged * rescale[:, None] + td.sum_of(weights[:, :, None] * values, 0)
        running_max = new_max
    nonempty = weight_sum > 0.0
    merged = merged / tl.where(nonempty, weight_sum, 1.0)[:, None]
    return merged, tl.where(nonempty, running_max + tl.log2(tl.where(nonempty, weight_sum, 1.0)), float("-inf"))


@td.jit
def merge_group(
    o, lse, flags, number, first, parts, ROWS: tl.constexpr, RP: tl.constexpr, DVP: tl.constexpr, GROUP: tl.constexpr
):
    """Merge the group of part ``number`` if this program is the last of the group, and return whether it is.

    The result replaces the first part of the group. The parts of the tile are stored at their numbers, which start at
    ``first``.
    """
    begin = first + (number - first) // GROUP * GROUP
    count = tl.minimum(GROUP, first + parts - begin)
    # Each group has its own flag: groups of a tile begin GROUP parts apart, and ``flags`` is offset by one per tile.
    is_last = td.is_last_arriver(flags + begin // GROUP, count)
    if is_last:
        o += begin * (RP * DVP)
        lse += begin * RP
        for from_row in range(0, RP, ROWS):
            rows = from_row + tl.arange(0, ROWS)
            merged, merged_lse = merge_parts(o, lse, RP * DVP, RP, count, rows, DVP, GROUP)
            tl.debug_barrier()  # all threads have read the parts before the first one is overwritten
            tl.store(o + rows[:, None] * DVP + tl.arange(0, DVP)[None, :], merged)
            tl.store(lse + rows, merged_lse)
    return is_last


@td.jit
def store_output(o_ptr, lse_ptr, lse2_ptr, o, lse, entry, head, row, heads, TILE: tl.constexpr):
    """Store query rows of a head in the outputs: o [B, TQ, heads * G, DV], and lse in natural log.

    lse2_ptr: output for lse to base 2, or None. The backward uses it because converting back from natural log would
    round once more.
    """
    query = query_rows(entry, head, row, heads, TILE.group, TILE.queries)
    there = row < TILE.queries * TILE.group
    columns = tl.arange(0, TILE.padded_dv)
    o = td.from_float32(o, o_ptr.dtype.element_ty)
    tl.store(o_ptr + query[:, None] * TILE.dv + columns[None, :], o, mask=there[:, None] & (columns < TILE.dv)[None, :])
    tl.store(lse_ptr + query, lse * LN_2, mask=there)
    if lse2_ptr is not None:
        tl.store(lse2_ptr + query, lse, mask=there)


# ---- exchange between ranks on one node ----


@td.jit
def store_parts(
    ctx, half, signal, o, lse, rows, tile, tiles, RANKS: tl.constexpr, RP: tl.constexpr, DVP: tl.constexpr
):
    """Store rows of a tile in this rank's slot in the buffer of every rank, its own first.

    A void launch stores nothing, because a peer may still read the data of an earlier launch.
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
    """Return the offset of the lse of all tiles in a half, in fp32 elements."""
    return tl.cast(tiles, tl.int64) * (RANKS * RP * DVP)


@td.jit
def exchange_lengths(ctx, half, signal, lengths, entries, first_signal, lens_at, RANKS: tl.constexpr):
    """Exchange lengths, and return the number of keys of each entry on later ranks. Program 0 sends the own lengths."""
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
    # After a timeout, threads may have read different lengths, but loops with barriers depend on them.
    return tl.where(completed, after, 0)


@td.jit
def merge_ranks(
    ctx, me, half, signal, ours, count, tiles, tiles_of_entry, heads, o_ptr, lse_ptr, lse2_ptr,
    RANKS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, CHECK_FAILED: tl.constexpr, trace,
):
    """Signal ``count`` tiles from number ``ours`` on, wait for them from all peers, merge, and store the outputs."""
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
