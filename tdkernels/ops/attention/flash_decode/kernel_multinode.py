"""flash_decode across nodes: how what the ranks have for a tile is brought together there (``flash_decode_kernel``).

There are N nodes of L ranks; rank r is local rank r % L of node r // L. Of each node, local rank ``tile % L`` owns a
tile. All that a program finishes it first stores at its node's owners, and says so; then

    1. of a tile that it owns it waits for the L parts of the node, merges them in rank order, and puts the result to
       the owners on the other nodes;
    2. of these it waits for theirs, merges the N parts in the order of nodes, so that all owners have the same bits,
       and gives them to its node's peers;
    3. of the tiles that it does not own it waits for what their owners give.

So of a tile each node sends one part to each other node, by one rank. With L = 1 each rank owns all tiles, and there is
no 3, nor a wait in 1.

Nobody waits for ever, whatever part of the programs has been started (law 1). All say what they have of all their tiles
before they wait. Shares are in the order of programs, so on each rank those that have been started have said so of a
first part of the tiles; E tiles on the rank where these are fewest. A program takes the tiles that it owns in their
order, each through 1 and 2 before it waits for the next; it does 1 of a later one before that only where no wait is
left in it. So by induction each of the first E tiles comes through 1 and 2 on all owners: whoever is at it has been
started, and before it has waited for smaller ones only. 3 comes after all that a program does for others. So all waits
of that rank, for tiles below E, are served, its programs end, and it starts more.

A half is used again two calls later. A program ends only with tiles in which a part of every rank is, so no rank ends
call t + 1 before all have begun it, and with that have ended call t. What was put in call t its receiver has waited for
in call t: it has arrived, and its source may be overwritten from call t + 2 on.

A half holds slots, of o [RP, DVP] and lse [RP] of a tile in fp32: for the tiles that we own, those of each local rank,
then those of each node; then the results of all tiles. Behind them are lengths [W, BP] of all ranks. Signal number i
says that slot number i is there; behind these, ``source`` says the same of its lengths.
"""

import triton
import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.context import PLAN_BITS
from tdkernels.lang.signals import NEVER
from tdkernels.ops.attention.flash_decode.kernel_merge import PARTS_AT_A_TIME, merge_parts, store_output

# No program has more threads: so no two of them look at the same signal, and what they make of it is one answer.
_LANES = tl.constexpr(512)


# ---- where things are ----


@td.jit
def _num_slots(tiles, RANKS: tl.constexpr, NODES: tl.constexpr):
    """How many slots a half holds."""
    LOCAL: tl.constexpr = RANKS // NODES
    if LOCAL == 1:
        return NODES * tiles
    else:
        return _result_slot(tiles, tiles, RANKS, NODES)


@td.jit
def _part_slot(local, tile, tiles, LOCAL: tl.constexpr):
    """The slot at an owner for what the node's rank ``local`` has; of LOCAL > 1."""
    return local * ((tiles + LOCAL - 1) // LOCAL) + tile // LOCAL


@td.jit
def _node_slot(node, tile, tiles, LOCAL: tl.constexpr):
    """The slot at an owner for what a node has."""
    FIRST: tl.constexpr = LOCAL if LOCAL > 1 else 0
    return _part_slot(FIRST + node, tile, tiles, LOCAL)


@td.jit
def _result_slot(tile, tiles, RANKS: tl.constexpr, NODES: tl.constexpr):
    """The slot for what the owner of a tile gives; of LOCAL > 1."""
    LOCAL: tl.constexpr = RANKS // NODES
    return _part_slot(LOCAL + NODES, 0, tiles, LOCAL) + tile


@td.jit
def _slot_size(RP: tl.constexpr, DVP: tl.constexpr):
    return RP * DVP + (RP if RP > 4 else 4)


@td.jit
def _slot(ctx, half, peer, number, RP: tl.constexpr, DVP: tl.constexpr):
    """Pointer to a slot in the buffer of a rank of our node."""
    offset = tl.cast(number, tl.int64) * (4 * _slot_size(RP, DVP))
    return td.pointer_to(td.data_at(ctx, half, peer) + offset, tl.float32)


@td.jit
def _store_slot(slot, o, lse, rows, there, RP: tl.constexpr, DVP: tl.constexpr):
    """Store some rows of a tile in a slot, those that are ``there``."""
    tl.store(slot + rows[:, None] * DVP + tl.arange(0, DVP)[None, :], o, mask=there[:, None])
    tl.store(slot + RP * DVP + rows, lse, mask=there)


@td.jit
def _merge_slots(slot, stride, COUNT: tl.constexpr, rows, RP: tl.constexpr, DVP: tl.constexpr):
    """(o, lse) of some rows of COUNT slots, each ``stride`` slots behind the one before, in their order."""
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
    """Store rows of a tile that is complete on this rank at the owner of our node.

    A void launch stores nothing: a peer, or the network, may still read what an earlier launch has stored.
    """
    LOCAL: tl.constexpr = RANKS // NODES
    me = td.rank(ctx)
    if LOCAL == 1:
        slot = _slot(ctx, half, me, _node_slot(me, tile, tiles, LOCAL), RP, DVP)
    else:
        local = me % LOCAL
        slot = _slot(ctx, half, me - local + tile % LOCAL, _part_slot(local, tile, tiles, LOCAL), RP, DVP)
    _store_slot(slot, o, lse, rows, (rows < RP) & (td.is_void(signal) == 0), RP, DVP)


# ---- signals between the ranks of a node, each by a thread of its own ----


@td.jit
def _notify_each(ctx, signal_ptrs, peers, there, signal, CHECK_FAILED: tl.constexpr):
    """Set the signals that peers of our node keep where we keep ``signal_ptrs``, where they are ``there``."""
    remote = td.symm_at(ctx, signal_ptrs, tl.where(there, peers, td.rank(ctx)))
    if CHECK_FAILED:
        tl.debug_barrier()  # another thread may just have given up
        there &= td.failed(ctx) == 0
    td.store_release_each(remote, signal, there)


@td.jit
def _await_each(ctx, first_ptr, count, first, signal, LOCAL: tl.constexpr):
    """Wait for ``count`` signals that follow each other, of which local rank (first + i) % LOCAL raises number i.

    Those that would be ours are left out. Returns whether all came in time: one answer of all threads.
    """
    me = td.rank(ctx)
    node_first = me - me % LOCAL
    missed = tl.full((), 0, tl.int32)
    if td.target() == "cuda":
        lanes = tl.arange(0, _LANES)
        for start in range(0, count, _LANES):
            peers = node_first + (first + start + lanes) % LOCAL
            there = (start + lanes < count) & (peers != me)
            # A thread without a peer looks at any word, which is always late enough for it.
            expected = tl.where(there, signal, NEVER)
            seen = td.wait_plan(ctx, first_ptr + tl.where(there, start + lanes, 0), expected, peers)
            missed = tl.maximum(missed, td.max_of((there & (seen != signal)).to(tl.int32), 0))
        tl.debug_barrier()  # each thread has acquired from one peer; now all of them have from all
    else:
        for number in range(count):
            peer = node_first + (first + number) % LOCAL
            if peer != me:
                seen = td.wait_plan(ctx, first_ptr + number, signal, peer)
                missed = tl.maximum(missed, (seen != signal).to(tl.int32))
    return missed == 0


@td.jit
def _are_there(ctx, first_ptr, stride, signal, LOCAL: tl.constexpr):
    """Whether a signal has come from each local rank but us: one answer of all threads, for a branch.

    Of what they announce nothing may be read without a wait, which then returns at once.
    """
    lanes = tl.arange(0, _LANES)
    there = (lanes < LOCAL) & (lanes != td.rank(ctx) % LOCAL)
    seen = tl.load(first_ptr + tl.where(there, lanes, 0) * stride, mask=there, other=0, volatile=True)
    return td.max_of((there & (seen < ((signal >> PLAN_BITS) << PLAN_BITS))).to(tl.int32), 0) == 0


# ---- lengths ----


@td.jit
def lengths_of_nodes_at(tiles, RANKS: tl.constexpr, NODES: tl.constexpr, RP: tl.constexpr, DVP: tl.constexpr):
    """(the first signal of lengths, where in a half they begin, in bytes)."""
    slots = _num_slots(tiles, RANKS, NODES)
    return slots, tl.cast(slots, tl.int64) * (4 * _slot_size(RP, DVP))


@td.jit
def _store_lengths(ctx, half, lengths, entries, lens_at, source, FIRST: tl.constexpr, LOCAL: tl.constexpr):
    """Store a rank's lengths in the buffers of our node: of ourselves and all after us, from the FIRST of these on."""
    me = td.rank(ctx)
    BP: tl.constexpr = entries.shape[0]
    for step in tl.static_range(FIRST, LOCAL):
        data = td.data_at(ctx, half, me - me % LOCAL + (me + step) % LOCAL) + lens_at
        tl.store(data.to(tl.pointer_type(tl.int32)) + source * BP + entries, lengths)


@td.jit
def exchange_lengths_of_nodes(
    ctx, half, signal, is_void, lengths, entries, first_signal, lens_at, RANKS: tl.constexpr, NODES: tl.constexpr
):
    """How many keys the ranks after us have, of each entry; 0 in a void launch.

    Program 0 tells our node, and the rank of our number on each other node; what these tell us it passes on to ours.
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
                td.await_put(ctx, signals + source, signal, source)  # producer: its program 0, before it waits
                came = tl.load(ours.to(tl.pointer_type(tl.int32)) + source * BP + entries)
                _store_lengths(ctx, half, came, entries, lens_at, source, 1, LOCAL)
                td.notify_node(ctx, signals + source, signal, CHECK_FAILED=True)  # waiter: all programs of our node
    completed = True
    if LOCAL > 1:
        # producer: program 0 of each peer of our node, of its own lengths and of those that it passes on
        completed = _await_each(ctx, signals, RANKS, 0, signal, LOCAL)
    for step in range(1, NODES):
        source = (me + step * LOCAL) % RANKS
        seen = td.await_put(ctx, signals + source, signal, source)  # producer: program 0 of that rank
        completed &= td.completed(seen, signal)
    after = tl.full(entries.shape, 0, tl.int32)
    for source in tl.static_range(RANKS):
        mask = (entries >= 0) & (source > me)
        after += tl.load(ours.to(tl.pointer_type(tl.int32)) + source * BP + entries, mask=mask, other=0)
    # What has not come may look different to different threads, and hangs of no loop.
    return tl.where(completed, after, 0)


# ---- tiles ----


@td.jit
def _announce(ctx, half, signal, ours, count, tiles, LOCAL: tl.constexpr, CHECK_FAILED: tl.constexpr):
    """Say at our node's owners that our parts of ``count`` tiles from number ``ours`` on are there."""
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
    """Put what our node has of a tile that we own to the owners on the other nodes."""
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
    """Merge what the nodes have of a tile that we own, store it, and give it to our node."""
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
    """Store some rows of a tile for the caller."""
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
    """Store what the owners of our node give, of the tiles that are not ours."""
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
    """Bring ``count`` tiles from number ``ours`` on, of which this rank's part is there, together and store them.

    CHECK_FAILED: what our part is depends on other ranks.
    """
    LOCAL: tl.constexpr = RANKS // NODES
    WAITS: tl.constexpr = CHECK_FAILED or LOCAL > 1
    local = td.rank(ctx) % LOCAL
    if LOCAL > 1:
        _announce(ctx, half, signal, ours, count, tiles, LOCAL, CHECK_FAILED)
    first = ours + (local + LOCAL - ours % LOCAL) % LOCAL  # that we own
    owned = (tl.maximum(ours + count - first, 0) + LOCAL - 1) // LOCAL
    sent = 0
    for step in range(2 * owned):
        completed = step - sent
        sends = sent < owned
        if LOCAL > 1:
            if sends & (sent > completed):  # what comes next can be completed; so look, but do not wait
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
