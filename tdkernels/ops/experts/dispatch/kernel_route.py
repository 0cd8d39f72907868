"""Kernels that count tokens, exchange the counts between the ranks, and compute the destination of every row.

1. Each program counts a tile of tokens, at most N ids. It numbers the tile's rows for each expert, and the tile's
   tokens for each rank.
2. The tiles are added up. With few tiles the last program to finish does it. With many tiles ``ep_agree_kernel`` does
   it, in which each program adds a few columns.
3. The last program sends this rank's totals to all peers (one signal each, 4 bytes per expert) and waits for their
   totals. From these it computes all offsets, on this rank and at the peers (``layout``).

The result is deterministic. No number depends on the order of atomics, so the same ids give the same rows. All ranks
have the same totals, so they make the same decision about whether the rows fit.
"""

import triton
import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.experts.dispatch.layout import (
    BAD_RANK,
    MOST_ROWS,
    MOST_STAGED,
    MOST_TOKENS,
    ROWS,
    VALID,
    counts_of,
    experts_at,
    parts_at,
    peer_offset_at,
    places_at,
    recv_offsets_at,
    rows_at,
    send_offsets_at,
    sent_at,
    summary_at,
    tiles_at,
)

# Kinds of notes in the host error mailbox (``lang.host_error``), with their numbers.
NOTE_BAD_IDS = tl.constexpr(1)  # the rank, and its number of invalid ids; or minus its number of tokens if too many
NOTE_OVERFLOW = tl.constexpr(2)  # maximum number of rows and of staged tokens, and the capacity


@td.jit
def count_tile(
    ids_ptr, tables, tile, num_tokens, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, N: tl.constexpr
):
    """Number the tile's rows for each expert (``places``) and its tokens for each rank (``sent``). Store the counts.

    The ids are copied to the tables (``experts``), because the caller may overwrite them before a backward.

    All ids of the tile are compared with each other: axis 0 is the id in question, axis 1 the id it is compared with.
    """
    TOKENS: tl.constexpr = N // K
    COLUMNS: tl.constexpr = triton.next_power_of_2(EXPERTS + RANKS + 2)
    SENT: tl.constexpr = triton.next_power_of_2(TOKENS * RANKS)
    offs = tl.arange(0, N)
    first_token = tl.cast(tile, tl.int64) * TOKENS
    left = num_tokens - first_token
    here = (offs < TOKENS * K) & (offs < left * K)
    ids = tl.load(ids_ptr + first_token * K + offs, mask=here, other=-1)
    valid = (ids >= 0) & (ids < EXPERTS)
    bad = here & (ids != -1) & (valid == 0)
    expert = tl.where(valid, ids, -1 - offs).to(tl.int32)  # a dropped id is equal to no other
    dest = tl.where(valid, expert // (EXPERTS // RANKS), -1 - offs)
    token = offs // K
    earlier = offs[None, :] < offs[:, None]
    later = offs[None, :] > offs[:, None]

    same = expert[:, None] == expert[None, :]
    place = td.sum_of((same & earlier).to(tl.int32), 1)
    is_last = td.sum_of((same & later).to(tl.int32), 1) == 0

    # A token is sent to a rank once, even if it has several experts there. Only its first assignment counts.
    to_same = dest[:, None] == dest[None, :]
    again = to_same & (token[:, None] == token[None, :])
    is_first = (td.sum_of((again & earlier).to(tl.int32), 1) == 0) & valid
    first_of_others = (td.sum_of((again & later).to(tl.int32), 0) == 0) & valid
    counted = to_same & first_of_others[None, :]
    slot = td.sum_of((counted & earlier).to(tl.int32), 1)
    is_last_to = td.sum_of((counted & later).to(tl.int32), 1) == 0

    columns = tl.arange(0, COLUMNS)
    count_ptr = tiles_at(tables, tile, num_tokens, K, EXPERTS, RANKS)
    tl.store(count_ptr + columns, tl.full((COLUMNS,), 0, tl.int32), mask=columns < EXPERTS + RANKS + 2)
    sent = tl.arange(0, SENT)
    sent_here = (sent < TOKENS * RANKS) & (sent < left * RANKS)
    sent_ptr = sent_at(tables, first_token, num_tokens, K, EXPERTS, RANKS)
    tl.store(sent_ptr + sent, tl.full((SENT,), -1, tl.int32), mask=sent_here)
    tl.debug_barrier()  # the stores below overwrite these
    experts_ptr = experts_at(tables, first_token, K, EXPERTS, RANKS)
    tl.store(experts_ptr + offs, tl.where(valid, expert, -1), mask=here)
    places_ptr = places_at(tables, first_token, num_tokens, K, EXPERTS, RANKS)
    tl.store(places_ptr + offs, tl.where(valid, place, -1), mask=here)
    tl.store(sent_ptr + token * RANKS + dest, slot, mask=is_first)
    tl.store(count_ptr + expert, place + 1, mask=valid & is_last)
    tl.store(count_ptr + EXPERTS + dest, slot + 1, mask=is_first & is_last_to)
    tl.store(count_ptr + EXPERTS + RANKS, td.sum_of(bad.to(tl.int32), 0))


@td.jit
def add_tiles(first_tile, columns, width, tiles, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    """Replace counts in [tiles, width] by the sums over all earlier tiles, in some columns. Return their totals."""
    total = tl.full((BLOCK,), 0, tl.int32)
    for first in range(0, tiles, AT_ONCE):
        rows = first + tl.arange(0, AT_ONCE)
        at = first_tile + rows[:, None].to(tl.int64) * width + columns[None, :]
        mask = (rows[:, None] < tiles) & (columns[None, :] < width)
        counts = tl.load(at, mask=mask, other=0)
        upto = td.running_sum(counts, 0)
        tl.debug_barrier()  # in a small block several threads have read the same element
        tl.store(at, upto - counts + total[None, :], mask=mask)
        total += td.sum_of(counts, 0)
    return total


@td.jit
def add_up(
    tables, me, start, tiles, num_tokens, bad_ptr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """Do ``add_tiles`` for a block of columns, and store the totals as this rank's ``counts``."""
    C: tl.constexpr = EXPERTS + RANKS + 2
    first_tile = tiles_at(tables, 0, num_tokens, K, EXPERTS, RANKS)
    columns = start + tl.arange(0, BLOCK)
    total = add_tiles(first_tile, columns, C, tiles, BLOCK, AT_ONCE)
    if bad_ptr is not None:
        total += tl.where(columns == C - 2, tl.load(bad_ptr), 0)
    total = tl.where(columns == C - 1, num_tokens, total)
    tl.store(counts_of(tables, me, EXPERTS, RANKS) + columns, total, mask=columns < C)


@td.jit
def _exchange(ctx, tables, plan, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    """Send this rank's totals to all peers, and copy their totals to the tables."""
    C: tl.constexpr = EXPERTS + RANKS + 2
    BLOCK: tl.constexpr = min(triton.next_power_of_2(C), 512)
    me = td.rank(ctx)
    epoch, half, signal = td.call(ctx, plan, COUNTS=False)  # only one program runs this
    signals = td.signal_at(ctx, half, 0)
    for start in range(0, C, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        totals = tl.load(counts_of(tables, me, EXPERTS, RANKS) + columns, mask=columns < C)
        for step in range(1, RANKS):
            dst = td.pointer_to(td.data_at(ctx, half, (me + step) % RANKS), tl.int32) + me * C
            # A void launch sends nothing, because a peer may still read data of an earlier launch.
            tl.store(dst + columns, totals, mask=(columns < C) & (td.is_void(signal) == 0))
    # waiter: every peer's last program of this launch
    td.notify_all(ctx, signals + me, signal)
    # producer: every peer's last program of this launch
    td.wait_plan_all(ctx, signals, 1, signal)
    for start in range(0, C, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        for step in range(1, RANKS):
            source = (me + step) % RANKS
            totals = tl.load(
                td.pointer_to(td.data_at(ctx, half, me), tl.int32) + source * C + columns, mask=columns < C
            )
            tl.store(counts_of(tables, source, EXPERTS, RANKS) + columns, totals, mask=columns < C)
    tl.debug_barrier()


@td.jit
def lay_out_rows(
    tables, splits_ptr, me, BY_SOURCE: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr
):
    """Compute the first row of this rank's rows for each expert. Return the number of rows that each rank receives.

    Rows are sorted by expert, then by source rank. With BY_SOURCE they are sorted by source rank, then by expert.
    """
    EACH: tl.constexpr = EXPERTS // RANKS
    R: tl.constexpr = triton.next_power_of_2(RANKS)
    LOCAL: tl.constexpr = triton.next_power_of_2(EACH)
    dest, local = tl.arange(0, R)[:, None], tl.arange(0, LOCAL)[None, :]
    mask = (dest < RANKS) & (local < EACH)
    total = tl.full((R, LOCAL), 0, tl.int32)
    before = tl.full((R, LOCAL), 0, tl.int32)
    own = tl.full((R, LOCAL), 0, tl.int32)
    for source in tl.static_range(RANKS):
        counts = tl.load(counts_of(tables, source, EXPERTS, RANKS) + dest * EACH + local, mask=mask, other=0)
        total += counts
        before += tl.where(source < me, counts, 0)
        own += tl.where(source == me, counts, 0)
        if BY_SOURCE:
            tl.store(splits_ptr + source * EACH + local + dest * 0, counts, mask=mask & (dest == me))
    if BY_SOURCE:
        first = td.sum_of(before, 1)[:, None] + td.running_sum(own, 1) - own
    else:
        first = td.running_sum(total, 1) - total + before
        tl.store(splits_ptr + local + dest * 0, total, mask=mask & (dest == me))
    tl.store(rows_at(tables, EXPERTS, RANKS) + dest * EACH + local, first, mask=mask)
    return td.sum_of(total, 1)


@td.jit
def _lay_out_tokens(tables, me, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    """Compute the slot offsets of dispatch and combine. Return the maximum number of tokens that a rank stages."""
    R: tl.constexpr = triton.next_power_of_2(RANKS)
    source, dest = tl.arange(0, R)[:, None], tl.arange(0, R)[None, :]
    crosses = (source < RANKS) & (dest < RANKS) & (source != dest)
    tokens = tl.load(tables + source * (EXPERTS + RANKS + 2) + EXPERTS + dest, mask=crosses, other=0)
    ranks = tl.arange(0, R)
    mask = ranks < RANKS
    going = td.running_sum(tokens, 0) - tokens  # dispatch: tokens of earlier ranks to the same rank
    coming = td.running_sum(tokens, 1) - tokens  # combine: the same rank's tokens on earlier ranks
    tl.store(send_offsets_at(tables, EXPERTS, RANKS) + ranks, td.sum_of(tl.where(source == me, going, 0), 0), mask=mask)
    tl.store(recv_offsets_at(tables, EXPERTS, RANKS) + ranks, td.sum_of(tl.where(dest == me, going, 0), 1), mask=mask)
    tl.store(parts_at(tables, EXPERTS, RANKS) + ranks, td.sum_of(tl.where(source == me, coming, 0), 0), mask=mask)
    tl.store(peer_offset_at(tables, EXPERTS, RANKS) + ranks, td.sum_of(tl.where(dest == me, coming, 0), 1), mask=mask)
    return tl.maximum(td.max_of(td.sum_of(tokens, 0), 0), td.max_of(td.sum_of(tokens, 1), 0))


@td.jit
def _most_tokens(tables, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    """Return the maximum number of tokens of a rank."""
    ranks = tl.arange(0, triton.next_power_of_2(RANKS))
    tokens = tl.load(tables + (ranks + 1) * (EXPERTS + RANKS + 2) - 1, mask=ranks < RANKS, other=0)
    return td.max_of(tokens, 0)


@td.jit
def store_summary(
    ctx, tables, splits_ptr, me, rows, staged, capacity, call,
    BY_SOURCE: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
):
    """Store the summary: decide from the totals, which are the same on all ranks, whether anything can be sent.

    If not, report the reason to the host.
    """
    R: tl.constexpr = triton.next_power_of_2(RANKS)
    LOCAL: tl.constexpr = triton.next_power_of_2(EXPERTS // RANKS)
    ranks = tl.arange(0, R)
    mask = ranks < RANKS
    totals = tables + ranks * (EXPERTS + RANKS + 2) + EXPERTS + RANKS
    bad = tl.load(totals, mask=mask, other=0)
    bad_rank = td.max_of(tl.where(bad != 0, RANKS - ranks, 0), 0)  # the first rank with invalid ids
    bad_rank = tl.where(bad_rank > 0, RANKS - bad_rank, -1)
    how_bad = td.sum_of(tl.where(ranks == bad_rank, bad, 0), 0)
    most_tokens = _most_tokens(tables, EXPERTS, RANKS)
    most_rows = td.max_of(rows, 0)
    needed = tl.maximum(most_rows, staged)
    # If a peer was missing, its totals are invalid. They must not be used as addresses and are not reported.
    is_broken = td.failed_for_all(ctx)
    valid = (bad_rank < 0) & (needed <= capacity) & (is_broken == 0)
    summary = summary_at(tables, EXPERTS, RANKS)
    tl.store(summary + VALID, tl.where(is_broken, -1, valid.to(tl.int32)))
    tl.store(summary + ROWS, tl.where(valid, td.sum_of(tl.where(ranks == me, rows, 0), 0), 0))
    tl.store(summary + MOST_ROWS, tl.where(is_broken, 0, most_rows))
    tl.store(summary + MOST_STAGED, tl.where(is_broken, 0, staged))
    tl.store(summary + BAD_RANK, bad_rank)
    tl.store(summary + MOST_TOKENS, tl.where(is_broken, 0, most_tokens))
    if valid == 0:
        local = tl.arange(0, LOCAL)
        for source in range(RANKS if BY_SOURCE else 1):
            nothing = tl.full((LOCAL,), 0, tl.int32)
            tl.store(splits_ptr + source * (EXPERTS // RANKS) + local, nothing, mask=local < EXPERTS // RANKS)
    td.report_if(ctx, (bad_rank >= 0) & (is_broken == 0), NOTE_BAD_IDS, bad_rank, how_bad, bad_rank, call)
    capacity = tl.full((), 0, tl.int64) + capacity
    overflows = (bad_rank < 0) & (needed > capacity) & (is_broken == 0)
    td.report_if(ctx, overflows, NOTE_OVERFLOW, most_rows, staged, capacity, call)


@td.jit
def _agree(
    ctx, tables, splits_ptr, capacity, plan, call,
    WHOLE: tl.constexpr, BY_SOURCE: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
):
    """Exchange the totals and compute all offsets. One program runs this, after all counts of this rank are stored.

    WHOLE: every assignment is sent separately.
    """
    me = td.rank(ctx)
    _exchange(ctx, tables, plan, EXPERTS, RANKS)
    rows = lay_out_rows(tables, splits_ptr, me, BY_SOURCE, EXPERTS, RANKS)
    staged = _lay_out_tokens(tables, me, EXPERTS, RANKS)
    if WHOLE:
        staged = tl.maximum(staged, _most_tokens(tables, EXPERTS, RANKS) * K)
    tl.debug_barrier()  # store_summary may overwrite splits
    store_summary(ctx, tables, splits_ptr, me, rows, staged, capacity, call, BY_SOURCE, EXPERTS, RANKS)


@td.jit(do_not_specialize=["num_tokens", "capacity", "plan", "call"])
def ep_route_kernel(
    ctx, ids_ptr, bad_ptr, tables, splits_ptr, num_tokens, capacity, plan, call,
    AGREE: tl.constexpr, WHOLE: tl.constexpr, BY_SOURCE: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr,
    RANKS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """Count ids [T, K], a tile of N ids per program. AGREE: also add up the tiles, exchange totals and compute offsets.

    Signal number ``source`` of a half says that the source's totals, row ``source`` of [ranks, E + W + 2], are in this
    rank's buffer.
    """
    num_tokens = tl.cast(num_tokens, tl.int32)
    count_tile(ids_ptr, tables, tl.program_id(0), num_tokens, K, EXPERTS, RANKS, N)
    if AGREE:
        if td.is_last_arriver(td.flag_at(ctx, 0), tl.num_programs(0)):
            me, tiles = td.rank(ctx), tl.num_programs(0)
            for start in range(0, EXPERTS + RANKS + 2, BLOCK):
                add_up(tables, me, start, tiles, num_tokens, bad_ptr, K, EXPERTS, RANKS, BLOCK, AT_ONCE)
            tl.debug_barrier()  # threads read totals that other threads have stored
            _agree(ctx, tables, splits_ptr, capacity, plan, call, WHOLE, BY_SOURCE, K, EXPERTS, RANKS)
        td.finish(ctx)


@td.jit(do_not_specialize=["num_tokens", "tiles", "capacity", "plan", "call"])
def ep_agree_kernel(
    ctx, bad_ptr, tables, splits_ptr, num_tokens, tiles, capacity, plan, call,
    WHOLE: tl.constexpr, BY_SOURCE: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """Add up the counts of many tiles, BLOCK columns per program. The rest is the same as in ``ep_route_kernel``."""
    num_tokens, tiles = tl.cast(num_tokens, tl.int32), tl.cast(tiles, tl.int32)
    start = tl.program_id(0) * BLOCK
    add_up(tables, td.rank(ctx), start, tiles, num_tokens, bad_ptr, K, EXPERTS, RANKS, BLOCK, AT_ONCE)
    if td.is_last_arriver(td.flag_at(ctx, 0), tl.num_programs(0)):
        _agree(ctx, tables, splits_ptr, capacity, plan, call, WHOLE, BY_SOURCE, K, EXPERTS, RANKS)
    td.finish(ctx)
