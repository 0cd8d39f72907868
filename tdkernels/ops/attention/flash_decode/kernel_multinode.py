"""Multi-node merge of ``flash_decode_kernel``: a hierarchical exchange, first in the node, then between nodes.

There are N nodes of L ranks; rank r is local rank r % L of node r // L. On each node, local rank ``tile % L`` is the
owner of a tile. A program first stores all tiles that it has finished at the owners on its node, and signals them. Then

    1. for a tile that this rank owns, the program waits for the L parts of the node, merges them in rank order, and
       puts the result to the owners on the other nodes;
    2. it waits for the parts of the other owners, merges the N parts in node order, so that all owners get the same
       bits, and stores the result at the peers on its node;
    3. for the tiles that this rank does not own, it waits for the results from their owners.

So for each tile, one rank of each node sends one part to each other node. With L = 1 each rank owns all tiles; step 3
and the wait in step 1 do not exist.

Progress (invariant 1), for any subset of started programs. A program signals all its tiles before it waits. Shares are
in program order, so the started programs of each rank have signaled a prefix of the tiles. Let E be the length of the
shortest prefix. A program processes the tiles that it owns in order, and completes steps 1 and 2 of a tile before it
waits for the next one; it runs step 1 of a later tile earlier only if that needs no wait. By induction, each of the
first E tiles completes steps 1 and 2 on all owners: the program that processes it has started, and has waited only for
smaller tiles before. Step 3 comes after everything that a program does for others. So all waits of the rank with the
shortest prefix, which are for tiles below E, are satisfied; its programs end, and more of its programs start.

Buffer reuse (invariant 3). A half is used again two calls later. A program ends only with tiles that include a part of
every rank, so no rank ends call t + 1 before all ranks have begun it, and hence have ended call t. The receiver of a
put in call t waits for it in call t. So the put has arrived, and its source may be overwritten from call t + 2 on.

A half holds slots, each with o [RP, DVP] and lse [RP] of a tile in fp32: the parts of each local rank and then of each
node for the tiles that this rank owns, then the results of all tiles. After the slots it holds lengths [W, BP] of all
ranks. Signal i is set when slot i is stored. After these signals there is one per rank, set when its lengths are
stored.
"""

import triton
import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.context import PLAN_BITS
from tdkernels.lang.signals import NEVER
from tdkernels.ops.attention.flash_decode.kernel_merge import PARTS_AT_A_TIME, merge_parts, store_output

# Upper bound of the threads of a program. So no two threads read the same signal, and all threads get one result.
_LANES = tl.constexpr(512)


# ---- layout of a half ----


@td.jit
def _num_slots(tiles, RANKS: tl.constexpr, NODES: tl.constexpr):
    """Return the number of slots in a half."""
    LOCAL: tl.constexpr = RANKS // NODES
    if LOCAL == 1:
        return NODES * tiles
    else:
        return _result_slot(tiles, tiles, RANKS, NODES)


@td.jit
def _part_slot(local, tile, tiles, LOCAL: tl.constexpr):
    """Return the slot at the owner for the part of local rank ``local``. Only for LOCAL > 1."""
    return local * ((tiles + LOCAL - 1) // LOCAL) + tile // LOCAL


@td.jit
def _node_slot(node, tile, tiles, LOCAL: tl.constexpr):
    """Return the slot at the owner for the part of a node."""
    FIRST: tl.constexpr = LOCAL if LOCAL > 1 else 0
    return _part_slot(FIRST + node, tile, tiles, LOCAL)


@td.jit
def _result_slot(tile, tiles, RANKS: tl.constexpr, NODES: tl.constexpr):
    """Return the slot for the result from the owner of a tile. Only for LOCAL > 1."""
    LOCAL: tl.constexpr = RANKS // NODES
    return _part_slot(LOCAL + NODES, 0, tiles, LOCAL) + tile


@td.jit
def _slot_size(RP: tl.constexpr, DVP: tl.constexpr):
    """Return the size of a slot in fp32 elements, a multiple of 16 bytes."""
    return RP * DVP + (RP if RP > 4 else 4)


@td.jit
def _slot(ctx, half, peer, number, RP: tl.constexpr, DVP: tl.constexpr):
    """Return a pointer to a slot in the buffer of a rank on this node."""
    offset = tl.cast(number, tl.int64) * (4 * _slot_size(RP, DVP))
    return td.pointer_to(td.data_at(ctx, half, peer) + offset, tl.float32)


@td.jit
def _store_slot(slot, o, lse, rows, there, RP: tl.constexpr, DVP: tl.constexpr):
    """Store the rows of a tile for which ``there`` is set in a slot."""
    tl.store(slot + rows[:, None] * DVP + tl.arange(0, DVP)[None, :], o, mask=there[:, None])
    tl.store(slot + RP * DVP + rows, lse, mask=there)


@td.jit
def _merge_slots(slot, stride, COUNT: tl.constexpr, rows, RP: tl.constexpr, DVP: tl.constexpr):
    """Merge rows of COUNT slots, which are ``stride`` slots apart, in order, and return (o, lse)."""
    COUNT_P: tl.constexpr = triton.next_power_of_2(COUNT)
    step = tl.cast(stride, tl.int64) * _slot_size(RP, DVP)
    return merge_parts(
        slot, slot + RP * DVP, step, step, COUNT, rows, DVP, COUNT_P if COUNT_P < PARTS_AT_A_TIME else PARTS_AT_A_TIME
    )


@td.jit
def give_to_owner(
    ctx, half, signal, o, lse, rows, tile, tiles,
    RANKS: tl.constexpr, NODES: tl.constexpr, RP: tl.constexpr, DVP: tl.constexpr,
):
    """Store rows of a tile that is complete on this rank at its owner on this node.

    A void launch stores nothing, because a peer or the network may still read the data of an earlier launch.
    """
    LOCAL: tl.constexpr = RANKS // NODES
    me = td.rank(ctx)
    if LOCAL == 1:
        slot = _slot(ctx, half, me, _node_slot(me, tile, tiles, LOCAL), RP, DVP)
    else:
        local = me % LOCAL
        slot = _slot(ctx, half, me - local + tile % LOCAL, _part_slot(local, tile, tiles, LOCAL), RP, DVP)
    _store_slot(slot, o, lse, rows, (rows < RP) & (td.is_void(signal) == 0), RP, DVP)


# ---- signals between the ranks of a node, one thread per signal ----


@td.jit
def _notify_each(ctx, signal_ptrs, peers, there, signal, CHECK_FAILED: tl.constexpr):
    """Set the signals ``signal_ptrs`` on peers of this node, one per lane for which ``there`` is set."""
    remote = td.symm_at(ctx, signal_ptrs, tl.where(there, peers, td.rank(ctx)))
    if CHECK_FAILED:
        tl.debug_barrier()  # another thread may just have timed out
        there &= td.failed(ctx) == 0
    td.store_release_each(remote, signal, there)


@td.jit
def _await_each(ctx, first_ptr, count, first, signal, LOCAL: tl.constexpr):
    """Wait for ``count`` consecutive signals, where local rank (first + i) % LOCAL sets signal i.

    Signals of this rank are skipped. Returns whether all arrived before the timeout, the same value in all threads.
    """
    me = td.rank(ctx)
    node_first = me - me % LOCAL
    missed = tl.full((), 0, tl.int32)
    if td.target() == "cuda":
        lanes = tl.arange(0, _LANES)
        for start in range(0, count, _LANES):
            peers = node_first + (first + start + lanes) % LOCAL
            there = (start + lanes < count) & (peers != me)
            # A thread without a peer reads any signal and expects a value that is always reached.
            expected = tl.where(there, signal, NEVER)
            seen = td.wait_plan(ctx, first_ptr + tl.where(there, start + lanes, 0), expected, peers)
            missed = tl.maximum(missed, td.max_of((there & (seen != signal)).to(tl.int32), 0))
        tl.debug_barrier()  # each thread has acquired from one peer; the barrier extends this to all threads
    else:
        for number in range(count):
            peer = node_first + (first + number) % LOCAL
            if peer != me:
                seen = td.wait_plan(ctx, first_ptr + number, signal, peer)
                missed = tl.maximum(missed, (seen != signal).to(tl.int32))
    return missed == 0


@td.jit
def _are_there(ctx, first_ptr, stride, signal, LOCAL: tl.constexpr):
    """Return whether every other local rank has set its signal, with the same value in all threads, for a branch.

    This is no acquire: a wait, which then returns at once, must precede reads of the signaled data.
    """
    lanes = tl.arange(0, _LANES)
    there = (lanes < LOCAL) & (lanes != td.rank(ctx) % LOCAL)
    seen = tl.load(first_ptr + tl.where(there, lanes, 0) * stride, mask=there, other=0, volatile=True)
    return td.max_of((there & (seen < ((signal >> PLAN_BITS) << PLAN_BITS))).to(tl.int32), 0) == 0


# ---- lengths ----


@td.jit
def lengths_of_nodes_at(tiles, RANKS: tl.constexpr, NODES: tl.constexpr, RP: tl.constexpr, DVP: tl.constexpr):
    """Return (index of the first signal of lengths, offset of the lengths in a half, in bytes)."""
    slots = _num_slots(tiles, RANKS, NODES)
    return slots, tl.cast(slots, tl.int64) * (4 * _slot_size(RP, DVP))


@td.jit
def _store_lengths(ctx, half, lengths, entries, lens_at, source, FIRST: tl.constexpr, LOCAL: tl.constexpr):
    """Store the lengths of rank ``source`` at the ranks of this node, except the first FIRST, starting at this rank."""
    me = td.rank(ctx)
    BP: tl.constexpr = entries.shape[0]
    for step in tl.static_range(FIRST, LOCAL):
        data = td.data_at(ctx, half, me - me % LOCAL + (me + step) % LOCAL) + lens_at
        tl.store(data.to(tl.pointer_type(tl.int32)) + source * BP + entries, lengths)


@td.jit
def exchange_lengths_of_nodes(
    ctx, half, signal, is_void, lengths, entries, first_signal, lens_at, RANKS: tl.constexpr, NODES: tl.constexpr
):
    """Exchange lengths, and return the number of keys of each entry on later ranks, 0 in a void launch.

    Program 0 sends the lengths of this rank to its node, and to the rank with the same local rank on each other node.
    It relays the lengths received from other nodes to its own node.
    """
    LOCAL: tl.constexpr = RANKS // NODES
    BP: tl.constexpr = entries.shape[0]
    me = td.rank(ctx)
    signals = td.signal_at(ctx, half, first_signal)
    ours = td.data_at(ctx, half, me) + lens_at
    if (tl.program_id(0) == 0) & (is_void == 0):
        _store_lengths(ctx, half, lengths, entries, lens_at, me, 0, LOCAL)
        if LOCAL > 1:
            td.notify_node(ctx, signals + me, signal)  # waiter: all programs of our node
        for step in range(1, NODES):
            row = ours + tl.cast(me, tl.int64) * (4 * BP)
            # waiter: all programs of that rank
            td.put_signal(ctx, row, row, 4 * BP, signals + me, signal, (me + step * LOCAL) % RANKS)
        if LOCAL > 1:
            for step in range(1, NODES):
                source = (me + step * LOCAL) % RANKS
                td.await_put(ctx, signals + source, signal, source)  # producer: the source's program 0, before it waits
                received = tl.load(ours.to(tl.pointer_type(tl.int32)) + source * BP + entries)
                _store_lengths(ctx, half, received, entries, lens_at, source, 1, LOCAL)
                td.notify_node(ctx, signals + source, signal, CHECK_FAILED=True)  # waiter: all programs of our node
    completed = True
    if LOCAL > 1:
        # producer: program 0 of each peer of our node, for its own lengths and for those that it relays
        completed = _await_each(ctx, signals, RANKS, 0, signal, LOCAL)
    for step in range(1, NODES):
        source = (me + step * LOCAL) % RANKS
        seen = td.await_put(ctx, signals + source, signal, source)  # producer: program 0 of that rank
        completed &= td.completed(seen, signal)
    after = tl.full(entries.shape, 0, tl.int32)
    for source in tl.static_range(RANKS):
        mask = (entries >= 0) & (source > me)
        after += tl.load(ours.to(tl.pointer_type(tl.int32)) + source * BP + entries, mask=mask, other=0)
    # After a timeout, threads may have read different lengths, but loops with barriers depend on them.
    return tl.where(completed, after, 0)


# ---- tiles ----


@td.jit
def _announce(ctx, half, signal, ours, count, tiles, LOCAL: tl.constexpr, CHECK_FAILED: tl.constexpr):
    """Signal our parts of ``count`` tiles from number ``ours`` on at their owners on this node."""
    me = td.rank(ctx)
    local = me % LOCAL
    lanes = tl.arange(0, _LANES)
    for start in range(0, count, _LANES):
        some = ours + start + lanes
        owners = me - local + some % LOCAL
        there = (start + lanes < count) & (owners != me)
        some = tl.where(there, some, ours)
        # waiter: the program of the owner that finishes the tile there
        signals = td.signal_at(ctx, half, _part_slot(local, some, tiles, LOCAL))
        _notify_each(ctx, signals, owners, there, signal, CHECK_FAILED)


@td.jit
def _send(
    ctx, half, signal, tile, tiles, RANKS: tl.constexpr, NODES: tl.constexpr, RP: tl.constexpr, DVP: tl.constexpr,
    ROWS: tl.constexpr, CHECK_FAILED: tl.constexpr,
):
    """Merge this node's parts of a tile that this rank owns, and put the result to the owners on other nodes."""
    LOCAL: tl.constexpr = RANKS // NODES
    me = td.rank(ctx)
    number = _node_slot(me // LOCAL, tile, tiles, LOCAL)
    slot = _slot(ctx, half, me, number, RP, DVP)
    if LOCAL > 1:
        first = _part_slot(0, tile, tiles, LOCAL)
        stride = _part_slot(1, 0, tiles, LOCAL)
        # producer: the programs of the node's ranks that finish this tile there
        td.wait_plan_node(ctx, td.signal_at(ctx, half, first), stride, signal)
        for from_row in range(0, RP, ROWS):
            rows = from_row + tl.arange(0, ROWS)
            o, lse = _merge_slots(_slot(ctx, half, me, first, RP, DVP), stride, LOCAL, rows, RP, DVP)
            _store_slot(slot, o, lse, rows, rows < RP, RP, DVP)
    for step in range(1, NODES):
        # waiter: the program of that rank that finishes this tile there
        td.put_signal(
            ctx, slot.to(tl.int64), slot.to(tl.int64), 4 * _slot_size(RP, DVP), td.signal_at(ctx, half, number),
            signal, (me + step * LOCAL) % RANKS, CHECK_FAILED=CHECK_FAILED,
        )


@td.jit
def _complete(
    ctx, half, signal, tile, tiles, tiles_of_entry, heads, o_ptr, lse_ptr, lse2_ptr,
    RANKS: tl.constexpr, NODES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):
    """Merge all nodes' parts of a tile that this rank owns, and store the result here and at the node's peers."""
    RP: tl.constexpr = TILE.rows
    DVP: tl.constexpr = TILE.padded_dv
    LOCAL: tl.constexpr = RANKS // NODES
    me = td.rank(ctx)
    stride = _part_slot(1, 0, tiles, LOCAL)
    for step in range(1, NODES):
        source = (me + step * LOCAL) % RANKS
        signal_ptr = td.signal_at(ctx, half, _node_slot(source // LOCAL, tile, tiles, LOCAL))
        td.await_put(ctx, signal_ptr, signal, source)  # producer: the program of that rank that finishes this tile
    for from_row in range(0, RP, ROWS):
        rows = from_row + tl.arange(0, ROWS)
        slot = _slot(ctx, half, me, _node_slot(0, tile, tiles, LOCAL), RP, DVP)
        o, lse = _merge_slots(slot, stride, NODES, rows, RP, DVP)
        for number in tl.static_range(1, LOCAL):
            peer = me - me % LOCAL + (me + number) % LOCAL
            result = _slot(ctx, half, peer, _result_slot(tile, tiles, RANKS, NODES), RP, DVP)
            _store_slot(result, o, lse, rows, rows < RP, RP, DVP)
        _store_rows(o_ptr, lse_ptr, lse2_ptr, o, lse, tile, rows, tiles_of_entry, heads, TILE)
    if LOCAL > 1:
        # waiter: the programs of our node's peers that finish this tile there
        td.notify_node(ctx, td.signal_at(ctx, half, _result_slot(tile, tiles, RANKS, NODES)), signal, CHECK_FAILED=True)


@td.jit
def _store_rows(o_ptr, lse_ptr, lse2_ptr, o, lse, tile, rows, tiles_of_entry, heads, TILE: tl.constexpr):
    """Store rows of a tile in the outputs."""
    BLOCKS_R: tl.constexpr = (TILE.queries * TILE.group + TILE.rows - 1) // TILE.rows
    which = tile % tiles_of_entry
    store_output(
        o_ptr, lse_ptr, lse2_ptr, o, lse, tile // tiles_of_entry, which // BLOCKS_R,
        which % BLOCKS_R * TILE.rows + rows, heads, TILE,
    )


@td.jit
def _take_results(
    ctx, half, signal, ours, count, tiles, tiles_of_entry, heads, o_ptr, lse_ptr, lse2_ptr,
    RANKS: tl.constexpr, NODES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):
    """Wait for the tiles that other ranks of this node own, and store them in the outputs."""
    RP: tl.constexpr = TILE.rows
    DVP: tl.constexpr = TILE.padded_dv
    LOCAL: tl.constexpr = RANKS // NODES
    me = td.rank(ctx)
    # producer: the programs of the owners that finish these tiles there
    results = td.signal_at(ctx, half, _result_slot(ours, tiles, RANKS, NODES))
    _await_each(ctx, results, count, ours, signal, LOCAL)
    for tile in range(ours, ours + count):
        if tile % LOCAL != me % LOCAL:
            slot = _slot(ctx, half, me, _result_slot(tile, tiles, RANKS, NODES), RP, DVP)
            for from_row in range(0, RP, ROWS):
                rows = from_row + tl.arange(0, ROWS)
                o = tl.load(slot + rows[:, None] * DVP + tl.arange(0, DVP)[None, :], mask=(rows < RP)[:, None])
                lse = tl.load(slot + RP * DVP + rows, mask=rows < RP)
                _store_rows(o_ptr, lse_ptr, lse2_ptr, o, lse, tile, rows, tiles_of_entry, heads, TILE)


@td.jit
def merge_nodes(
    ctx, half, signal, ours, count, tiles, tiles_of_entry, heads, o_ptr, lse_ptr, lse2_ptr,
    RANKS: tl.constexpr, NODES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, CHECK_FAILED: tl.constexpr,
):
    """Merge ``count`` tiles from number ``ours`` on, whose parts of this rank are stored, and store the outputs.

    CHECK_FAILED: this rank's parts depend on a wait for other ranks.
    """
    LOCAL: tl.constexpr = RANKS // NODES
    WAITS: tl.constexpr = CHECK_FAILED or LOCAL > 1
    local = td.rank(ctx) % LOCAL
    if LOCAL > 1:
        _announce(ctx, half, signal, ours, count, tiles, LOCAL, CHECK_FAILED)
    first = ours + (local + LOCAL - ours % LOCAL) % LOCAL  # first tile that this rank owns
    owned = (tl.maximum(ours + count - first, 0) + LOCAL - 1) // LOCAL
    sent = 0
    for step in range(2 * owned):
        completed = step - sent
        sends = sent < owned
        if LOCAL > 1:
            if sends & (sent > completed):  # a sent tile can be completed, so poll instead of waiting
                number = _part_slot(0, first + sent * LOCAL, tiles, LOCAL)
                sends = _are_there(
                    ctx, td.signal_at(ctx, half, number), _part_slot(1, 0, tiles, LOCAL), signal, LOCAL
                )
        if sends:
            _send(ctx, half, signal, first + sent * LOCAL, tiles, RANKS, NODES, TILE.rows, TILE.padded_dv, ROWS, WAITS)
            sent += 1
        else:
            _complete(
                ctx, half, signal, first + completed * LOCAL, tiles, tiles_of_entry, heads, o_ptr, lse_ptr, lse2_ptr,
                RANKS, NODES, TILE, ROWS,
            )
    if LOCAL > 1:
        _take_results(
            ctx, half, signal, ours, count, tiles, tiles_of_entry, heads, o_ptr, lse_ptr, lse2_ptr,
            RANKS, NODES, TILE, ROWS,
        )
