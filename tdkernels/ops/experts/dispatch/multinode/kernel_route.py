"""Where each token goes in a group on several nodes: counted as on one, exchanged in two steps, laid out for both.

A program counts its tile as in ``ep_route_kernel``, and its tokens for each other node as well (a token counts once,
whatever the number of its experts there). The last program sends this rank's line of totals, E + W + 2 + N words, to
its node peers and, over the network, to the ranks of its rail; what comes from those it passes on to its node peers. So
each line crosses to a node once. Then all ranks have the same lines, and each lays out what it sends and gets
(``layout``).

A launch of its own (``ep_places_kernel``) completes the places of our tokens, and lists those for each node: whoever
sends to another node takes tokens from that list.

The lines of a half are used again two calls later. No rank ends call t + 1 before it has all lines of it, so none
before all ranks have begun it, and a rank begins it when it has, in call t, waited for all that was put there.
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
    """Number of int32 words that a rank sends to each other rank; see ``routing.line_bytes``."""
    return (EXPERTS + RANKS + 2 + NODES + 3) // 4 * 4


# ---- counting ----


@td.jit
def _nodes_of(
    ids_ptr, first_token, num_tokens, K: tl.constexpr, EXPERTS: tl.constexpr, NODES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The node of each choice of TOKENS tokens, [tokens, choices]; -1 for none."""
    token = tl.arange(0, triton.next_power_of_2(TOKENS))[:, None]
    choice = tl.arange(0, triton.next_power_of_2(K))[None, :]
    there = (token < TOKENS) & (token < num_tokens - first_token) & (choice < K)
    ids = tl.load(ids_ptr + (first_token + token) * K + choice, mask=there, other=-1)
    return tl.where((ids >= 0) & (ids < EXPERTS), ids // (EXPERTS // NODES), -1).to(tl.int32)


@td.jit
def _is_for(nodes, node, own):
    """1 for each token with a choice on a node that is not our own, else 0."""
    return td.max_of(((nodes == node) & (nodes != own)).to(tl.int32), 1)


@td.jit
def _count_crossing(
    ctx, ids_ptr, node_tables, tile, num_tokens, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    LOCAL: tl.constexpr, TOKENS: tl.constexpr,
):
    """Leave how many of the tile's tokens are for each other node."""
    NODES: tl.constexpr = RANKS // LOCAL
    own = td.rank(ctx) // LOCAL
    nodes = _nodes_of(ids_ptr, tl.cast(tile, tl.int64) * TOKENS, num_tokens, K, EXPERTS, NODES, TOKENS)
    counts = tile_at(node_tables, tile, num_tokens, RANKS, NODES)
    for node in range(NODES):
        tl.store(counts + node, td.sum_of(_is_for(nodes, node, own), 0))


@td.jit
def _add_up_crossing(node_tables, me, tiles, num_tokens, RANKS: tl.constexpr, LOCAL: tl.constexpr):
    """Turn the tiles' counts into those of all tiles before, and leave their totals."""
    NODES: tl.constexpr = RANKS // LOCAL
    columns = tl.arange(0, triton.next_power_of_2(NODES))
    first_tile = tile_at(node_tables, 0, num_tokens, RANKS, NODES)
    total = add_tiles(first_tile, columns, NODES, tiles, triton.next_power_of_2(NODES), 16)
    tl.store(crossing_of(node_tables, me, columns, RANKS, NODES), total, mask=columns < NODES)


# ---- the exchange ----


@td.jit
def _store_line(
    ctx, half, tables, node_tables, source, to, EXPERTS: tl.constexpr, RANKS: tl.constexpr, NODES: tl.constexpr
):
    """Copy the totals of a rank from our tables to its line in the buffer of ``to``."""
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
    """Copy the totals of a rank from its line in our buffer to our tables."""
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
    """Send our totals to all ranks, pass on those of our rail, and bring all to the tables."""
    NODES: tl.constexpr = RANKS // LOCAL
    me = td.rank(ctx)
    node, local = me // LOCAL, me % LOCAL
    epoch, half, signal = td.call(ctx, plan, COUNTS=False)
    # A void launch sends nothing: a peer, or the network, may still read what an earlier launch has sent.
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
            # producer: the source's last program of this launch, by the network
            td.await_put(ctx, signals + source, signal, source)
            _take_line(ctx, half, tables, node_tables, source, EXPERTS, RANKS, NODES)
            tl.debug_barrier()  # what a thread has stored is read by others
            for peer in range(1, LOCAL):
                to = node * LOCAL + (local + peer) % LOCAL
                _store_line(ctx, half, tables, node_tables, source, to, EXPERTS, RANKS, NODES)
            # waiter: every node peer's last program of this launch
            td.notify_node(ctx, signals + source, signal, CHECK_FAILED=True)
        for step in range(NODES):
            first = (node + step) % NODES * LOCAL
            # producer: every node peer's last program of this launch, with its own totals or those of its rail
            td.wait_plan_node(ctx, signals + first, 1, signal)
            for peer in range(1, LOCAL):
                _take_line(
                    ctx, half, tables, node_tables, first + (local + peer) % LOCAL, EXPERTS, RANKS, NODES
                )
    tl.debug_barrier()


# ---- what follows from all ranks' totals ----


@td.jit
def _lay_out_in_nodes(tables, me, EXPERTS: tl.constexpr, RANKS: tl.constexpr, LOCAL: tl.constexpr):
    """Where tokens and parts begin in the staging memory of node peers; returns how many any rank stages at most."""
    R: tl.constexpr = triton.next_power_of_2(RANKS)
    node, local = me // LOCAL, me % LOCAL
    source, dest = tl.arange(0, R)[:, None], tl.arange(0, R)[None, :]
    there = (source < RANKS) & (dest < RANKS)
    same_rail = source % LOCAL == dest % LOCAL
    # What a rank gets from its own rail comes by the network, or stays where it is.
    tokens = tl.load(
        tables + source * (EXPERTS + RANKS + 2) + EXPERTS + dest, mask=there & (same_rail == 0), other=0
    )
    going = td.running_sum(tokens, 0) - tokens  # from the ranks before, to the same
    # Parts for a source's tokens meet at the rank of its rail on our node, with those for the sources before of the
    # same rail, in the order of the ranks that send them.
    here = tl.where(dest // LOCAL == node, tokens, 0)
    of_source = td.sum_of(here, 1)
    # dest stands for another source here
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
    """Where tokens begin among those that cross; returns how many any rank sends or passes on at most."""
    NODES: tl.constexpr = RANKS // LOCAL
    R: tl.constexpr = triton.next_power_of_2(RANKS)
    N: tl.constexpr = triton.next_power_of_2(NODES)
    own = me // LOCAL
    source, node = tl.arange(0, R)[:, None], tl.arange(0, N)[None, :]
    there = (source < RANKS) & (node < NODES)
    crossing = tl.load(crossing_of(node_tables, source, node, RANKS, NODES), mask=there, other=0)
    going = td.running_sum(crossing, 1) - crossing  # of the same rank's, for the nodes before
    our_rail = source % LOCAL == me % LOCAL
    of_rail = tl.where(our_rail, crossing, 0)
    landing = td.running_sum(of_rail, 0) - of_rail  # for the same node, of the ranks of our rail before
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
    """Of our totals make the tables: by one program, when all else is done."""
    me = td.rank(ctx)
    _exchange(ctx, tables, node_tables, plan, EXPERTS, RANKS, LOCAL)
    rows = lay_out_rows(tables, splits_ptr, me, BY_SOURCE, EXPERTS, RANKS)
    staged = _lay_out_in_nodes(tables, me, EXPERTS, RANKS, LOCAL)
    crossing = _lay_out_crossing(node_tables, me, RANKS, LOCAL)
    summary = summary_at(tables, EXPERTS, RANKS)
    tl.store(summary + MOST_HERE, staged)
    tl.store(summary + MOST_PASSED, crossing)
    tl.debug_barrier()  # splits may be stored again
    most = tl.maximum(staged, crossing)
    store_summary(ctx, tables, splits_ptr, me, rows, most, capacity, call, BY_SOURCE, EXPERTS, RANKS)


# ---- the kernels ----


@td.jit(network=True, do_not_specialize=["num_tokens", "capacity", "plan", "call"])
def ep_route_nodes_kernel(
    ctx, ids_ptr, bad_ptr, tables, node_tables, splits_ptr, num_tokens, capacity, plan, call,
    AGREE: tl.constexpr, BY_SOURCE: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
    LOCAL: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """``ep_route_kernel`` for a group on several nodes of LOCAL ranks.

    Signal number ``source`` of a half says that the source's line of totals is in our buffer.
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
            tl.debug_barrier()  # others read what each thread has written
            _agree(ctx, tables, node_tables, splits_ptr, capacity, plan, call, BY_SOURCE, EXPERTS, RANKS, LOCAL)
        td.finish(ctx)


@td.jit(network=True, do_not_specialize=["num_tokens", "tiles", "capacity", "plan", "call"])
def ep_agree_nodes_kernel(
    ctx, bad_ptr, tables, node_tables, splits_ptr, num_tokens, tiles, capacity, plan, call,
    BY_SOURCE: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, LOCAL: tl.constexpr,
    BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """``ep_agree_kernel`` for a group on several nodes of LOCAL ranks."""
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
    """Complete the places of a tile's tokens, number those for each other node, and list them."""
    NODES: tl.constexpr = RANKS // LOCAL
    num_tokens = tl.cast(num_tokens, tl.int32)
    tile = tl.program_id(0)
    own = td.rank(ctx) // LOCAL
    goes = tl.load(summary_at(tables, EXPERTS, RANKS) + VALID) > 0
    start = tile * TILE_TOKENS
    for token in range(start, tl.minimum(start + TILE_TOKENS, num_tokens)):
        find_places(tables, token, num_tokens, goes, True, K, EXPERTS, RANKS, TILE_TOKENS)
    ids_ptr = experts_at(tables, 0, K, EXPERTS, RANKS)
    nodes = _nodes_of(ids_ptr, tl.cast(start, tl.int64), num_tokens, K, EXPERTS, NODES, TILE_TOKENS)
    tokens = start + tl.arange(0, triton.next_power_of_2(TILE_TOKENS))
    mask = tokens < tl.minimum(start + TILE_TOKENS, num_tokens)
    for node in range(NODES):
        is_for = _is_for(nodes, node, own)
        before = tl.load(tile_at(node_tables, tile, num_tokens, RANKS, NODES) + node)
        number = before + td.running_sum(is_for, 0) - is_for
        at = number_at(node_tables, tokens, node, RANKS, NODES)
        tl.store(at, tl.where(goes, tl.where(is_for != 0, number, -1 - number), -1), mask=mask)
        listed = listed_at(node_tables, node, number, num_tokens, RANKS, NODES)
        tl.store(listed, tokens, mask=mask & (is_for != 0))
