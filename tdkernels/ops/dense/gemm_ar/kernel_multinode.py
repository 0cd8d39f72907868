"""Kernel of gemm_ar for groups on several nodes: each node sums its partials, then the nodes exchange their sums.

A tile group is ``item_tiles`` consecutive tiles, as in ``kernel``. Here group j is owned by local rank j mod LOCAL of
each node, and LOCAL consecutive groups form a round. A round has work items (``piece``) with these roles, in this
order:

    forward     copy out a tile group that was computed ``lag`` groups ago to its owner on this node
    multiply    compute a tile: the group of local rank + 1, then of local rank + 2, and so on, this rank's group last
    sum         a tile of this rank's group of ``sum_after`` rounds ago: add this node's partials in rank order, round
                the sum, and put it into the memory of the owners on other nodes that add
    total       a tile of this rank's group of ``total_after`` rounds ago: add the nodes' sums in the order of the
                nodes, add the bias, and store the total in z and at the node peers
    relay       a tile of this rank's group of ``relay_after`` rounds ago that another node has added: copy its total
                from the buffer to z and to the node peers
    receive     a tile of the node peers' groups of ``receive_after`` rounds ago: copy its total from the buffer to z

The nodes' sums of a group are added in one of two ways (``adds_once``):

    on every node    Each owner adds for its node. A sum crosses the network N - 1 times. There are no relays.
    once             The owner on node ``round mod NODES`` adds and returns the total. A sum crosses the network once, a
                     total N - 1 times. So a rank sends 2 (N - 1) / N of a group instead of N - 1, as in a
                     reduce-scatter and an all-gather, at the cost of one more trip. Used on three nodes or more if
                     there is much to send.

Partials and nodes' sums are rounded to the dtype of x, including this rank's own, and added in fp32. All ranks that add
a tile add the same numbers in the same order, so z is bitwise equal on all ranks. Data crosses the network only between
ranks with the same local rank. A put is one tile.

Progress (invariant 1). An item waits only for items with smaller numbers, on this rank and on every peer: sums come
after the copies of their partials, totals after the sums, relays after the totals of all nodes, and receives after
both. Programs fetch items from the work queue (``lang.work_queue``).

Memory of a half. ``slots`` is the number of tiles that a rank owns. Signals: number ``s * rounds + round`` is set when
the partials of rank s of this node for this rank's group of a round have arrived; [nodes, slots] signals for the nodes'
sums follow, then one signal per tile for its total. Data: the partials of this rank's groups, [LOCAL, slots] tiles in
fragment layout (``to_fragment_layout``); the nodes' sums of them, [nodes, slots], from which this node's sum is sent;
the totals of all tiles, row-major. This is about 2 + NODES / LOCAL times z.

Buffer reuse (invariant 3). A half is used again two calls later, without a barrier. A rank has received z when it has
the totals, of at least one tile. The rank that added it has waited for the other owners, and each of them for its whole
node. So no rank finishes call t + 1 before all ranks have begun it and thus finished call t. A rank that has finished
call t has read all partials, sums and totals that it received in it. So the sums and totals that were sent in call t
have arrived, and the network reads them no longer.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.common.gemm_tile import as_aligned, from_fragment_layout, store_rows, swizzle, with_bias
from tdkernels.ops.common.rank_reduce import reduce_in_rank_order
from tdkernels.ops.common.staging import copy_out_staged
from tdkernels.ops.dense.gemm_ar.tile import multiply_tile, receive_tile

# Roles of a work item.
_FORWARD, _MULTIPLY, _SUM, _TOTAL, _RELAY, _RECEIVE = (tl.constexpr(role) for role in range(6))


@td.jit
def _sum_slice(parts, part_bytes, first, own, PARTS: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Return SIZE elements of the sum of PARTS rounded tiles, beginning at ``first``. Tile ``own`` is this rank's."""
    offs = first + tl.arange(0, SIZE)
    ours = td.to_float32(tl.load(td.pointer_to(parts + own * part_bytes, DTYPE) + offs))
    return reduce_in_rank_order(parts, part_bytes, offs, offs >= 0, ours, own, PARTS, DTYPE)


@td.jit
def _sum_tile(
    parts, part_bytes, dst, local, LOCAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICE_N: tl.constexpr, DTYPE: tl.constexpr,
):
    """Store the sum of this node's partials of a tile, added in rank order, at the address ``dst`` as DTYPE."""
    SIZE: tl.constexpr = BLOCK_M * SLICE_N
    for first in range(0, BLOCK_M * BLOCK_N, SIZE):
        total = _sum_slice(parts, part_bytes, first, local, LOCAL, SIZE, DTYPE)
        tl.store(td.pointer_to(dst, DTYPE) + first + tl.arange(0, SIZE), td.from_float32(total, DTYPE))


@td.jit
def _store_on_node(
    ctx, half, offset, offs, values, node, local, FIRST: tl.constexpr, LOCAL: tl.constexpr, DTYPE: tl.constexpr
):
    """Store values at an offset in the buffer of every node peer, and in this rank's buffer if FIRST is 0."""
    for step in tl.static_range(FIRST, LOCAL):
        dst = td.data_at(ctx, half, node * LOCAL + (local + step) % LOCAL) + offset
        tl.store(td.pointer_to(dst, DTYPE) + offs, values)


@td.jit
def _total_tile(
    ctx, sums, part_bytes, totals_offset, half, bias_ptr, z_ptr, row, col, M, N, node, local,
    NODES: tl.constexpr, LOCAL: tl.constexpr, ADDS_ONCE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICE_N: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    """Add all nodes' sums of a tile; store the total in z and at every node peer.

    If ADDS_ONCE, it is also stored in this rank's buffer, from which it is sent to the other nodes.
    """
    FIRST: tl.constexpr = 0 if ADDS_ONCE else 1
    DTYPE: tl.constexpr = z_ptr.dtype.element_ty
    rows = tl.arange(0, BLOCK_M)
    for first in range(0, BLOCK_N, SLICE_N):
        total = _sum_slice(sums, part_bytes, first * BLOCK_M, node, NODES, BLOCK_M * SLICE_N, DTYPE)
        total = from_fragment_layout(total, BLOCK_M, SLICE_N)
        cols = first + tl.arange(0, SLICE_N)
        total = with_bias(total, bias_ptr, col + cols, N, HAS_BIAS)
        z = td.from_float32(total, DTYPE)
        offs = rows[:, None] * BLOCK_N + cols[None, :]
        _store_on_node(ctx, half, totals_offset, offs, z, node, local, FIRST, LOCAL, DTYPE)
        store_rows(z_ptr, z, row + rows, col + cols, M, N)


@td.jit
def _relay_tile(
    ctx, src, totals_offset, half, z_ptr, row, col, M, N, node, local,
    LOCAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Copy the total of a tile from this rank's buffer to z and to the buffer of every node peer."""
    DTYPE: tl.constexpr = z_ptr.dtype.element_ty
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    offs = rows[:, None] * BLOCK_N + cols[None, :]
    z = tl.load(td.pointer_to(src, DTYPE) + offs)
    _store_on_node(ctx, half, totals_offset, offs, z, node, local, 1, LOCAL, DTYPE)
    store_rows(z_ptr, z, row + rows, col + cols, M, N)


@td.jit
def _put_to_nodes(
    ctx, src, num_bytes, signal_ptr, signal, node, local, only,
    NODES: tl.constexpr, LOCAL: tl.constexpr, ONE: tl.constexpr,
):
    """Put the data at address ``src`` to the rail peers, or only to the one on node ``only`` if ONE; set a signal."""
    for step in tl.static_range(1, NODES):
        other = (node + step) % NODES
        goes = True
        if ONE:
            goes = other == only
        if goes:
            td.put_signal(ctx, src, src, num_bytes, signal_ptr, signal, other * LOCAL + local, CHECK_FAILED=True)


@td.jit
def _role(piece, item_tiles, delays, LOCAL: tl.constexpr, FORWARDS: tl.constexpr, RELAYS: tl.constexpr):
    """Return the role and tile of a work item: (role, round, sequence, tile in the group).

    ``sequence`` is the index of the tile group in the order in which this rank computes the groups. A negative round
    means that there is nothing to do yet.
    """
    lag, sum_after, total_after, relay_after, receive_after = delays
    per_item = FORWARDS + item_tiles
    per_round = LOCAL * per_item + (LOCAL + 1 + RELAYS) * item_tiles
    in_round = piece % per_round
    round_ = piece // per_round
    other = in_round - LOCAL * per_item  # index among the items that sum, add totals, relay or receive
    if other < 0:
        i = in_round % per_item - FORWARDS
        role = tl.where(i < 0, _FORWARD, _MULTIPLY)
        sequence = round_ * LOCAL + in_round // per_item - tl.where(i < 0, lag, 0)
        i = tl.maximum(i, 0)
    else:
        i = other % item_tiles
        role = _SUM + other // item_tiles
        peer = role - _TOTAL - RELAYS - 1  # the owner of the received group
        role = tl.where(peer >= 0, _RECEIVE, role)
        after = tl.where(role == _SUM, sum_after, tl.where(role == _TOTAL, total_after, receive_after))
        after = tl.where(role == _RELAY, relay_after, after)
        sequence = (round_ - after) * LOCAL + tl.where(peer >= 0, peer, LOCAL - 1)
    round_ = tl.where(sequence < 0, -1, sequence // LOCAL)
    return role, round_, sequence, i


# ---- roles of work items; each function returns the result of td.fetch_work_item ----
#
# call: (epoch, half, signal) of ``td.call``; rank: (rank, its node, its local rank); where: (row, col, M, N) of a tile.


@td.jit
def _sum_piece(
    ctx, call, rank, own_parts, own_sums, part_bytes, staged, made, round_, rounds, sum_signal, adder,
    NODES: tl.constexpr, LOCAL: tl.constexpr, ADDS_ONCE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICE_N: tl.constexpr, DTYPE: tl.constexpr, trace,
):
    """Sum this node's partials of a tile, and put the sum to the owners on other nodes that add.

    Flag number ``staged`` is set when this rank's partial is stored. This function sets flag number ``made``.
    """
    epoch, half, signal = call
    me, node, local = rank
    TILE_BYTES: tl.constexpr = BLOCK_M * BLOCK_N * (DTYPE.primitive_bitwidth // 8)
    td.mark(trace, "waits", me)
    td.wait(ctx, td.flag_at(ctx, staged), epoch, me, SCOPE="gpu")  # producer: multiply_tile of this rank
    if LOCAL > 1:
        td.mark(trace, "waits", ALL_PEERS, 0)
        # producer: copy_out_staged of every node peer
        td.wait_plan_node(ctx, td.signal_at(ctx, half, round_), rounds, signal)
    td.mark(trace, "sums", ALL_PEERS)
    src = own_sums + node * part_bytes
    _sum_tile(own_parts, part_bytes, src, local, LOCAL, BLOCK_M, BLOCK_N, SLICE_N, DTYPE)
    answer = td.fetch_work_item(ctx)
    # waiter: the program of this rank that adds the total of the tile
    td.store_release(td.flag_at(ctx, made), epoch, SCOPE="gpu")
    td.mark(trace, "pushes", ALL_PEERS)
    # waiter: the program of the owner on another node that adds the total of the tile
    _put_to_nodes(ctx, src, TILE_BYTES, sum_signal, signal, node, local, adder, NODES, LOCAL, ONE=ADDS_ONCE)
    return answer


@td.jit
def _total_piece(
    ctx, call, rank, own_sums, own_total, part_bytes, totals_offset, made, first_signal, slots, total_signal, adder,
    bias_ptr, z_ptr, where, NODES: tl.constexpr, LOCAL: tl.constexpr, ADDS_ONCE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICE_N: tl.constexpr, HAS_BIAS: tl.constexpr, trace,
):
    """Add the nodes' sums of a tile, and store the total in z and at the node peers. If ADDS_ONCE, put it to all nodes.

    Flag number ``made`` is set when this node's sum is stored, signal number ``first_signal + m * slots`` when the sum
    of node m has arrived.
    """
    epoch, half, signal = call
    me, node, local = rank
    row, col, M, N = where
    TILE_BYTES: tl.constexpr = BLOCK_M * BLOCK_N * (z_ptr.dtype.element_ty.primitive_bitwidth // 8)
    td.mark(trace, "waits", me)
    # producer: the program of this rank that sums the tile
    td.wait(ctx, td.flag_at(ctx, made), epoch, me, SCOPE="gpu")
    td.mark(trace, "waits", ALL_PEERS, 0)
    for step in tl.static_range(1, NODES):
        # producer: the program of the owner on another node that sums the tile
        other = (node + step) % NODES
        td.await_put(ctx, td.signal_at(ctx, half, first_signal + other * slots), signal, other * LOCAL + local)
    td.mark(trace, "sums", ALL_PEERS)
    _total_tile(
        ctx, own_sums, part_bytes, totals_offset, half, bias_ptr, z_ptr, row, col, M, N, node, local,
        NODES, LOCAL, ADDS_ONCE, BLOCK_M, BLOCK_N, SLICE_N, HAS_BIAS,
    )
    answer = td.fetch_work_item(ctx)
    if ADDS_ONCE:
        td.mark(trace, "pushes", ALL_PEERS)
        # waiter: the program of the owner on another node that relays the tile
        _put_to_nodes(
            ctx, own_total, TILE_BYTES, total_signal, signal, node, local, adder, NODES, LOCAL, ONE=False
        )
    if LOCAL > 1:
        # waiter: every node peer's program that receives the tile
        td.notify_node(ctx, total_signal, signal, CHECK_FAILED=True)
    return answer


@td.jit
def _relay_piece(
    ctx, call, rank, own_total, totals_offset, total_signal, adder, z_ptr, where,
    LOCAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, trace,
):
    """Copy the total of a tile that another node has added to z and to the node peers."""
    epoch, half, signal = call
    _, node, local = rank
    row, col, M, N = where
    td.mark(trace, "waits", adder * LOCAL + local)
    # producer: the program of the owner on another node that adds the total of the tile
    seen = td.await_put(ctx, total_signal, signal, adder * LOCAL + local)
    td.mark(trace, "pushes", ALL_PEERS)
    _relay_tile(
        ctx, td.consume_token(own_total, seen), totals_offset, half, z_ptr, row, col, M, N, node, local,
        LOCAL, BLOCK_M, BLOCK_N,
    )
    answer = td.fetch_work_item(ctx)
    if LOCAL > 1:
        # waiter: every node peer's program that receives the tile
        td.notify_node(ctx, total_signal, signal, CHECK_FAILED=True)
    return answer


# Compiled once per tile and ADDS_ONCE, for all shapes, plans and group sizes. This makes tuning cheap.
@td.jit(network=True, do_not_specialize=[
    "M", "N", "K", "stride_w", "lag", "sum_after", "total_after", "relay_after", "receive_after", "plan",
    "item_tiles", "group_m",
])
def gemm_ar_nodes_kernel(
    ctx, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, z_ptr, stage_ptr,
    M, N, K, stride_w, lag, sum_after, total_after, relay_after, receive_after, plan, item_tiles, group_m,
    COPY_WORDS: tl.constexpr, SLICE_N: tl.constexpr,
    NODES: tl.constexpr, LOCAL: tl.constexpr, ADDS_ONCE: tl.constexpr, PRODUCT: tl.constexpr, trace_ptr=None,
):
    """Compute z [M, N] = sum over ranks of x [M, K] @ w.T, on every rank.

    Flag number ``sequence * item_tiles + i`` is set when this rank's partial of a tile is stored. The flags after these
    are set when this node's sum of a tile that this rank owns is stored.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    N = as_aligned(N, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    TILE_BYTES: tl.constexpr = BLOCK_M * BLOCK_N * PRODUCT.elem_bytes
    DTYPE: tl.constexpr = z_ptr.dtype.element_ty
    FORWARDS: tl.constexpr = 1 if LOCAL > 1 else 0  # work items per tile group that copy it out
    RELAYS: tl.constexpr = 1 if ADDS_ONCE else 0  # work items per owned tile that relay it
    me = td.rank(ctx)
    own_node = me // LOCAL
    own_local = me % LOCAL
    rank = me, own_node, own_local
    call = td.call(ctx, plan)
    epoch, half, signal = call
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles = tiles_m * tiles_n
    items = (tiles + item_tiles - 1) // item_tiles
    rounds = (items + LOCAL - 1) // LOCAL
    slots = rounds * item_tiles
    part_bytes = tl.cast(slots, tl.int64) * TILE_BYTES  # bytes of the partials of one source
    sums_offset = LOCAL * part_bytes
    totals_offset = (LOCAL + NODES) * part_bytes
    first_sum = LOCAL * rounds  # indices of signals
    first_total = first_sum + NODES * slots
    delays = lag, sum_after, total_after, relay_after, receive_after
    pieces = (rounds + receive_after) * (LOCAL * FORWARDS + (2 * LOCAL + 1 + RELAYS) * item_tiles)

    piece = td.await_work_item(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        trace = (trace_ptr, piece)
        td.mark(trace, "starts")
        role, round_, sequence, i = _role(piece, item_tiles, delays, LOCAL, FORWARDS, RELAYS)
        adder = round_ % NODES  # the node whose owner adds the total, if ADDS_ONCE
        local = (own_local + 1 + sequence % LOCAL + LOCAL) % LOCAL  # the owner on this node
        owner = own_node * LOCAL + local
        tile = (round_ * LOCAL + local) * item_tiles + i
        staged = sequence.to(tl.int64) * item_tiles + i
        stage = stage_ptr.to(tl.int64) + staged * TILE_BYTES
        number = round_ * item_tiles + i  # index among the tiles that the owner owns
        slot = tl.cast(number, tl.int64) * TILE_BYTES
        goes = (round_ >= 0) & (tile < tiles)
        if ADDS_ONCE:
            goes = goes & ((role != _TOTAL) | (adder == own_node)) & ((role != _RELAY) | (adder != own_node))

        if goes:
            pid_m, pid_n = swizzle(tile, tiles_m, tiles_n, group_m)
            row = pid_m * BLOCK_M
            col = pid_n * BLOCK_N
            where = row, col, M, N
            own_parts = td.data_at(ctx, half, me) + slot
            own_sums = own_parts + sums_offset
            tile_offset = totals_offset + tl.cast(tile, tl.int64) * TILE_BYTES
            own_total = td.data_at(ctx, half, me) + tile_offset
            total_signal = td.signal_at(ctx, half, first_total + tile)
            if role == _FORWARD:
                if local != own_local:
                    answer = copy_out_staged(
                        ctx, stage, td.data_at(ctx, half, owner) + own_local * part_bytes + slot,
                        staged, tl.minimum(item_tiles, tiles - tile), owner,
                        td.signal_at(ctx, half, own_local * rounds + round_), signal, epoch, TILE_BYTES, COPY_WORDS,
                        trace,
                    )
                else:
                    answer = td.fetch_work_item(ctx)
            elif role == _MULTIPLY:
                dst = tl.where(local == own_local, own_parts + own_local * part_bytes, stage)
                answer = multiply_tile(
                    ctx, x_ptr, x_desc, w_ptr, w_desc, td.pointer_to(dst, x_ptr.dtype.element_ty), staged,
                    pid_m, pid_n, M, N, K, stride_w, epoch, PRODUCT, trace,
                )
            elif role == _SUM:
                answer = _sum_piece(
                    ctx, call, rank, own_parts, own_sums, part_bytes, staged, LOCAL * slots + number, round_, rounds,
                    td.signal_at(ctx, half, first_sum + own_node * slots + number), adder,
                    NODES, LOCAL, ADDS_ONCE, BLOCK_M, BLOCK_N, SLICE_N, DTYPE, trace,
                )
            elif role == _TOTAL:
                answer = _total_piece(
                    ctx, call, rank, own_sums, own_total, part_bytes, tile_offset, LOCAL * slots + number,
                    first_sum + number, slots, total_signal, adder, bias_ptr, z_ptr, where,
                    NODES, LOCAL, ADDS_ONCE, BLOCK_M, BLOCK_N, SLICE_N, PRODUCT.has_bias, trace,
                )
            elif role == _RELAY:
                answer = _relay_piece(
                    ctx, call, rank, own_total, tile_offset, total_signal, adder, z_ptr, where, LOCAL, BLOCK_M,
                    BLOCK_N, trace,
                )
            else:
                td.mark(trace, "waits", owner)
                # producer: the owner's program that adds the total of the tile, or relays it
                seen = td.wait_plan(ctx, total_signal, signal, owner)
                answer = td.fetch_work_item(ctx)
                td.mark(trace, "receives", owner)
                receive_tile(td.consume_token(own_total, seen), z_ptr, row, col, M, N, BLOCK_M, BLOCK_N)
        else:
            answer = td.fetch_work_item(ctx)
        td.mark(trace, "finishes")
        piece = td.await_work_item(answer)
        td.mark(trace, "ends")
    td.finish(ctx)
