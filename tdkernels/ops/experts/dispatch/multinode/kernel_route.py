"""Kernels that count tokens and exchange the counts for groups on several nodes.

Each program counts its tile as in ``ep_route_kernel``, and also its tokens for each other node; a token counts once for
a node, even if it has several experts there. The last program sends this rank's count row, E + W + 2 + N words, to its
node peers and, through the network, to the ranks of its rail. It relays the count rows of its rail to its node peers,
so each count row crosses to a node once. After that all ranks have the same count rows, and each computes its offsets
(``layout``).

A separate launch (``ep_places_kernel``) completes the row numbers of this rank's tokens and lists the tokens for each
other node. The senders to other nodes read that list.

Buffer reuse (invariant 3). The count rows of a half are used again two calls later. No rank finishes call t + 1 before
it has all count rows of that call, so all ranks have begun call t + 1. A rank begins it after it has waited, in call t,
for everything that was put there.
"""

import triton
import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.experts.dispatch.kernel_dispatch import find_places
from tdkernels.ops.experts.dispatch.kernel_route import add_tiles, add_up, count_tile, lay_out_rows, store_summary
from tdkernels.ops.experts.dispatch.layout import (
    MOST_HERE,
    MOST_PASSED,
    VALID,
    counts_of,
    experts_at,
    parts_at,
    peer_offset_at,
    recv_offsets_at,
    send_offsets_at,
    summary_at,
)
from tdkernels.ops.experts.dispatch.multinode.layout import (
    crossing_of,
    going_at,
    home_at,
    landing_at,
    listed_at,
    number_at,
    passing_at,
    tile_at,
)


@td.jit
def line_words(EXPERTS: tl.constexpr, RANKS: tl.constexpr, NODES: tl.constexpr):
    """Return the int32 words of a count row; see ``routing.line_bytes``."""
    return (EXPERTS + RANKS + 2 + NODES + 3) // 4 * 4


# ---- counting ----


@td.jit
def _nodes_of(
    ids_ptr, first_token, num_tokens, K: tl.constexpr, EXPERTS: tl.constexpr, NODES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Return the node of each assignment of TOKENS tokens, [tokens, assignments]; -1 if dropped."""
    token = tl.arange(0, triton.next_power_of_2(TOKENS))[:, None]
    choice = tl.arange(0, triton.next_power_of_2(K))[None, :]
    there = (token < TOKENS) & (token < num_tokens - first_token) & (choice < K)
    ids = tl.load(ids_ptr + (first_token + token) * K + choice, mask=there, other=-1)
    return tl.where((ids >= 0) & (ids < EXPERTS), ids // (EXPERTS // NODES), -1).to(tl.int32)


@td.jit
def _is_for(nodes, node, own):
    """Return 1 for each token that has an assignment on ``node``, if that is not our own node, else 0."""
    return td.max_of(((nodes == node) & (nodes != own)).to(tl.int32), 1)


@td.jit
def _count_crossing(
    ctx, ids_ptr, node_tables, tile, num_tokens, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    LOCAL: tl.constexpr, TOKENS: tl.constexpr,
):
    """Store the number of the tile's tokens for each other node."""
    NODES: tl.constexpr = RANKS // LOCAL
    own = td.rank(ctx) // LOCAL
    nodes = _nodes_of(ids_ptr, tl.cast(tile, tl.int64) * TOKENS, num_tokens, K, EXPERTS, NODES, TOKENS)
    counts = tile_at(node_tables, tile, num_tokens, RANKS, NODES)
    for node in range(NODES):
        tl.store(counts + node, td.sum_of(_is_for(nodes, node, own), 0))


@td.jit
def _add_up_crossing(node_tables, me, tiles, num_tokens, RANKS: tl.constexpr, LOCAL: tl.constexpr):
    """Replace the tiles' counts by the sums over all earlier tiles, and store their totals."""
    NODES: tl.constexpr = RANKS // LOCAL
    columns = tl.arange(0, triton.next_power_of_2(NODES))
    first_tile = tile_at(node_tables, 0, num_tokens, RANKS, NODES)
    total = add_tiles(first_tile, columns, NODES, tiles, triton.next_power_of_2(NODES), 16)
    tl.store(crossing_of(node_tables, me, columns, RANKS, NODES), total, mask=columns < NODES)


# ---- exchange ----


@td.jit
def _store_line(
    ctx, half, tables, node_tables, source, to, EXPERTS: tl.constexpr, RANKS: tl.constexpr, NODES: tl.constexpr
):
    """Copy the totals of a rank from our tables to its count row in the buffer of ``to``."""
    C: tl.constexpr = EXPERTS + RANKS + 2
    BLOCK: tl.constexpr = min(triton.next_power_of_2(C), 512)
    line = td.pointer_to(td.data_at(ctx, half, to), tl.int32) + source * line_words(EXPERTS, RANKS, NODES)
    for start in range(0, C, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        totals = tl.load(counts_of(tables, source, EXPERTS, RANKS) + columns, mask=columns < C)
        tl.store(line + columns, totals, mask=columns < C)
    nodes = tl.arange(0, triton.next_power_of_2(NODES))
    crossing = tl.load(crossing_of(node_tables, source, nodes, RANKS, NODES), mask=nodes < NODES)
    tl.store(line + C + nodes, crossing, mask=nodes < NODES)


@td.jit
def _take_line(
    ctx, half, tables, node_tables, source, EXPERTS: tl.constexpr, RANKS: tl.constexpr, NODES: tl.constexpr
):
    """Copy the totals of a rank from its count row in our buffer to our tables."""
    C: tl.constexpr = EXPERTS + RANKS + 2
    BLOCK: tl.constexpr = min(triton.next_power_of_2(C), 512)
    line = td.pointer_to(td.data_at(ctx, half, td.rank(ctx)), tl.int32) + source * line_words(EXPERTS, RANKS, NODES)
    for start in range(0, C, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        totals = tl.load(line + columns, mask=columns < C)
        tl.store(counts_of(tables, source, EXPERTS, RANKS) + columns, totals, mask=columns < C)
    nodes = tl.arange(0, triton.next_power_of_2(NODES))
    crossing = tl.load(line + C + nodes, mask=nodes < NODES)
    tl.store(crossing_of(node_tables, source, nodes, RANKS, NODES), crossing, mask=nodes < NODES)


@td.jit
def _exchange(
    ctx, tables, node_tables, plan, EXPERTS: tl.constexpr, RANKS: tl.constexpr, LOCAL: tl.constexpr
):
    """Send our totals to all ranks, relay the totals of our rail to node peers, and copy all totals to the tables."""
    NODES: tl.constexpr = RANKS // LOCAL
    me = td.rank(ctx)
    node, local = me // LOCAL, me % LOCAL
    epoch, half, signal = td.call(ctx, plan, COUNTS=False)
    # A void launch sends nothing, because a peer or the network may still read data of an earlier launch.
    if td.is_void_for_all(signal) == 0:
        signals = td.signal_at(ctx, half, 0)
        line_bytes = 4 * line_words(EXPERTS, RANKS, NODES)
        for step in range(LOCAL):
            to = node * LOCAL + (local + step) % LOCAL
            _store_line(ctx, half, tables, node_tables, me, to, EXPERTS, RANKS, NODES)
        line = td.data_at(ctx, half, me) + me * line_bytes
        for step in range(1, NODES):
            # waiter: the last program of that rank of our rail, below
            td.put_signal(ctx, line, line, line_bytes, signals + me, signal, (me + step * LOCAL) % RANKS)
        # waiter: every node peer's last program of this launch
        td.notify_node(ctx, signals + me, signal)
        for step in range(1, NODES):
            source = (me + step * LOCAL) % RANKS
            # producer: the source's last program of this launch, through the network
            td.await_put(ctx, signals + source, signal, source)
            _take_line(ctx, half, tables, node_tables, source, EXPERTS, RANKS, NODES)
            tl.debug_barrier()  # threads read totals that other threads have stored
            for peer in range(1, LOCAL):
                to = node * LOCAL + (local + peer) % LOCAL
                _store_line(ctx, half, tables, node_tables, source, to, EXPERTS, RANKS, NODES)
            # waiter: every node peer's last program of this launch
            td.notify_node(ctx, signals + source, signal, CHECK_FAILED=True)
        for step in range(NODES):
            first = (node + step) % NODES * LOCAL
            # producer: every node peer's last program of this launch, which sends or relays the totals
            td.wait_plan_node(ctx, signals + first, 1, signal)
            for peer in range(1, LOCAL):
                _take_line(
                    ctx, half, tables, node_tables, first + (local + peer) % LOCAL, EXPERTS, RANKS, NODES
                )
    tl.debug_barrier()


# ---- offsets ----


@td.jit
def _lay_out_in_nodes(tables, me, EXPERTS: tl.constexpr, RANKS: tl.constexpr, LOCAL: tl.constexpr):
    """Compute the slot offsets in the staging memory of node peers. Return the maximum tokens that a rank stages."""
    R: tl.constexpr = triton.next_power_of_2(RANKS)
    node, local = me // LOCAL, me % LOCAL
    source, dest = tl.arange(0, R)[:, None], tl.arange(0, R)[None, :]
    there = (source < RANKS) & (dest < RANKS)
    same_rail = source % LOCAL == dest % LOCAL
    # Tokens from a rank's own rail arrive through the network or are local, so they are not counted.
    tokens = tl.load(
        tables + source * (EXPERTS + RANKS + 2) + EXPERTS + dest, mask=there & (same_rail == 0), other=0
    )
    going = td.running_sum(tokens, 0) - tokens  # dispatch: tokens of earlier ranks to the same rank
    # Combine: the rank of the source's rail on our node receives the results for a source's tokens, sorted by source,
    # then by the rank that sends them.
    here = tl.where(dest // LOCAL == node, tokens, 0)
    of_source = td.sum_of(here, 1)
    # in the next line ``dest`` is the index of another source
    before = td.sum_of(tl.where(same_rail & (dest < source), of_source[None, :], 0), 1)
    coming = before[:, None] + td.running_sum(here, 1) - here
    ranks = tl.arange(0, R)
    mask = ranks < RANKS
    index = source // LOCAL * LOCAL + dest % LOCAL
    ours = there & (source % LOCAL == local) & (dest // LOCAL == node)
    tl.store(send_offsets_at(tables, EXPERTS, RANKS) + index, going, mask=ours)
    tl.store(parts_at(tables, EXPERTS, RANKS) + index, coming, mask=ours)
    tl.store(recv_offsets_at(tables, EXPERTS, RANKS) + ranks, td.sum_of(tl.where(dest == me, going, 0), 1), mask=mask)
    tl.store(peer_offset_at(tables, EXPERTS, RANKS) + ranks, td.sum_of(tl.where(dest == me, coming, 0), 1), mask=mask)
    most = td.max_of(td.sum_of(tokens, 0), 0)
    for other in range(RANKS // LOCAL):
        of_source = td.sum_of(tl.where(dest // LOCAL == other, tokens, 0), 1)
        of_rail = td.sum_of(tl.where(same_rail, of_source[:, None], 0), 0)
        most = tl.maximum(most, td.max_of(of_rail, 0))
    return most


@td.jit
def _lay_out_crossing(node_tables, me, RANKS: tl.constexpr, LOCAL: tl.constexpr):
    """Compute the offsets of tokens that cross the network. Return the maximum that a rank sends or relays."""
    NODES: tl.constexpr = RANKS // LOCAL
    R: tl.constexpr = triton.next_power_of_2(RANKS)
    N: tl.constexpr = triton.next_power_of_2(NODES)
    own = me // LOCAL
    source, node = tl.arange(0, R)[:, None], tl.arange(0, N)[None, :]
    there = (source < RANKS) & (node < NODES)
    crossing = tl.load(crossing_of(node_tables, source, node, RANKS, NODES), mask=there, other=0)
    going = td.running_sum(crossing, 1) - crossing  # the same rank's tokens for earlier nodes
    our_rail = source % LOCAL == me % LOCAL
    of_rail = tl.where(our_rail, crossing, 0)
    landing = td.running_sum(of_rail, 0) - of_rail  # tokens of earlier ranks of our rail for the same node
    nodes = tl.arange(0, N)
    mask = nodes < NODES
    tl.store(going_at(node_tables, nodes, RANKS, NODES), td.sum_of(tl.where(source == me, going, 0), 0), mask=mask)
    tl.store(landing_at(node_tables, nodes, RANKS, NODES), td.sum_of(tl.where(source == me, landing, 0), 0), mask=mask)
    to_us = there & our_rail & (node == own)
    tl.store(passing_at(node_tables, source // LOCAL + 0 * node, RANKS, NODES), landing, mask=to_us)
    tl.store(home_at(node_tables, source // LOCAL + 0 * node, RANKS, NODES), going, mask=to_us)
    most = td.max_of(td.sum_of(crossing, 1), 0)
    for number in range(LOCAL):
        most = tl.maximum(most, td.max_of(td.sum_of(tl.where(source % LOCAL == number, crossing, 0), 0), 0))
    return most


@td.jit
def _agree(
    ctx, tables, node_tables, splits_ptr, capacity, plan, call, BY_SOURCE: tl.constexpr, EXPERTS: tl.constexpr,
    RANKS: tl.constexpr, LOCAL: tl.constexpr,
):
    """Exchange the totals and compute all offsets. One program runs this, after all counts of this rank are stored."""
    me = td.rank(ctx)
    _exchange(ctx, tables, node_tables, plan, EXPERTS, RANKS, LOCAL)
    rows = lay_out_rows(tables, splits_ptr, me, BY_SOURCE, EXPERTS, RANKS)
    staged = _lay_out_in_nodes(tables, me, EXPERTS, RANKS, LOCAL)
    crossing = _lay_out_crossing(node_tables, me, RANKS, LOCAL)
    summary = summary_at(tables, EXPERTS, RANKS)
    tl.store(summary + MOST_HERE, staged)
    tl.store(summary + MOST_PASSED, crossing)
    tl.debug_barrier()  # store_summary may overwrite splits
    most = tl.maximum(staged, crossing)
    store_summary(ctx, tables, splits_ptr, me, rows, most, capacity, call, BY_SOURCE, EXPERTS, RANKS)


# ---- kernels ----


@td.jit(network=True, do_not_specialize=["num_tokens", "capacity", "plan", "call"])
def ep_route_nodes_kernel(
    ctx, ids_ptr, bad_ptr, tables, node_tables, splits_ptr, num_tokens, capacity, plan, call,
    AGREE: tl.constexpr, BY_SOURCE: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    LOCAL: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """Do the same as ``ep_route_kernel`` for a group on several nodes of LOCAL ranks.

    Signal number ``source`` of a half says that the source's count row is in our buffer.
    """
    num_tokens = tl.cast(num_tokens, tl.int32)
    tile = tl.program_id(0)
    count_tile(ids_ptr, tables, tile, num_tokens, K, EXPERTS, RANKS, N)
    _count_crossing(ctx, ids_ptr, node_tables, tile, num_tokens, K, EXPERTS, RANKS, LOCAL, N // K)
    if AGREE:
        if td.is_last_arriver(td.flag_at(ctx, 0), tl.num_programs(0)):
            me, tiles = td.rank(ctx), tl.num_programs(0)
            for start in range(0, EXPERTS + RANKS + 2, BLOCK):
                add_up(tables, me, start, tiles, num_tokens, bad_ptr, K, EXPERTS, RANKS, BLOCK, AT_ONCE)
            _add_up_crossing(node_tables, me, tiles, num_tokens, RANKS, LOCAL)
            tl.debug_barrier()  # threads read totals that other threads have stored
            _agree(ctx, tables, node_tables, splits_ptr, capacity, plan, call, BY_SOURCE, EXPERTS, RANKS, LOCAL)
        td.finish(ctx)


@td.jit(network=True, do_not_specialize=["num_tokens", "tiles", "capacity", "plan", "call"])
def ep_agree_nodes_kernel(
    ctx, bad_ptr, tables, node_tables, splits_ptr, num_tokens, tiles, capacity, plan, call,
    BY_SOURCE: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, LOCAL: tl.constexpr,
    BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """Do the same as ``ep_agree_kernel`` for a group on several nodes of LOCAL ranks."""
    num_tokens, tiles = tl.cast(num_tokens, tl.int32), tl.cast(tiles, tl.int32)
    me, start = td.rank(ctx), tl.program_id(0) * BLOCK
    add_up(tables, me, start, tiles, num_tokens, bad_ptr, K, EXPERTS, RANKS, BLOCK, AT_ONCE)
    if start == 0:
        _add_up_crossing(node_tables, me, tiles, num_tokens, RANKS, LOCAL)
    if td.is_last_arriver(td.flag_at(ctx, 0), tl.num_programs(0)):
        _agree(ctx, tables, node_tables, splits_ptr, capacity, plan, call, BY_SOURCE, EXPERTS, RANKS, LOCAL)
    td.finish(ctx)


@td.jit(do_not_specialize=["num_tokens"])
def ep_places_kernel(
    ctx, tables, node_tables, num_tokens, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    LOCAL: tl.constexpr, TILE_TOKENS: tl.constexpr,
):
    """Complete the row numbers of a tile's tokens, and number and list its tokens for each other node."""
    NODES: tl.constexpr = RANKS // LOCAL
    num_tokens = tl.cast(num_tokens, tl.int32)
    tile = tl.program_id(0)
    own = td.rank(ctx) // LOCAL
    valid = tl.load(summary_at(tables, EXPERTS, RANKS) + VALID) > 0
    start = tile * TILE_TOKENS
    for token in range(start, tl.minimum(start + TILE_TOKENS, num_tokens)):
        find_places(tables, token, num_tokens, valid, True, K, EXPERTS, RANKS, TILE_TOKENS)
    ids_ptr = experts_at(tables, 0, K, EXPERTS, RANKS)
    nodes = _nodes_of(ids_ptr, tl.cast(start, tl.int64), num_tokens, K, EXPERTS, NODES, TILE_TOKENS)
    tokens = start + tl.arange(0, triton.next_power_of_2(TILE_TOKENS))
    mask = tokens < tl.minimum(start + TILE_TOKENS, num_tokens)
    for node in range(NODES):
        is_for = _is_for(nodes, node, own)
        before = tl.load(tile_at(node_tables, tile, num_tokens, RANKS, NODES) + node)
        number = before + td.running_sum(is_for, 0) - is_for
        at = number_at(node_tables, tokens, node, RANKS, NODES)
        tl.store(at, tl.where(valid, tl.where(is_for != 0, number, -1 - number), -1), mask=mask)
        listed = listed_at(node_tables, node, number, num_tokens, RANKS, NODES)
        tl.store(listed, tokens, mask=mask & (is_for != 0))
