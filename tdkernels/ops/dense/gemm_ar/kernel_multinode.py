"""The kernel behind GEMM-AR in a group on several nodes: each node sums for itself, then the nodes' sums cross.

As in ``gemm_ar_kernel`` tiles are numbered along a path through z, and ``item_tiles`` consecutive ones make an item.
Here item j is owned by rank j mod LOCAL of each node, and LOCAL consecutive items are a round. A round has, in this
order, pieces that

    forward     an item that was computed ``lag`` items ago to its owner on our node
    multiply    a tile each: the item of rank + 1 of our node, that of rank + 2 and so on, our own item last
    sum         a tile of our own item of ``sum_after`` rounds ago: add our node's partials in the order of the ranks,
                round the sum, put it into the memory of the owners on other nodes that add
    total       a tile of our own item of ``total_after`` rounds ago: add the nodes' sums in the order of the nodes, and
                the bias, store the total in z and at the node peers
    relay       a tile of our own item of ``relay_after`` rounds ago that another node has added: bring its total from
                our buffer to z and to the node peers
    receive     a tile of the node peers' items of ``receive_after`` rounds ago: bring its total from our buffer to z

The nodes' sums of an item are added in one of two ways (``adds_once``). By all its owners, each for its node: a sum
crosses the network N - 1 times, and nothing relays. Or, with three nodes or more and much to send, by the owner on node
``round mod NODES`` only, which puts the total back: a sum crosses once and a total N - 1 times, so 2 (N - 1) / N of an
item leave a rank instead of N - 1, as with a reduce-scatter and an all-gather, for one more trip.

Sums are in fp32, of partials and of nodes' sums that were rounded to the dtype of x, our own included: so whoever adds,
adds the same numbers in the same order, and z has the same bits on all ranks. The network is crossed between ranks of
the same number only; a put is one tile.

Each piece waits for pieces of smaller numbers only, here and on every peer: sums come later than what forwards their
partials, totals later than the sums, what relays later than the totals, on whatever node, and what receives later than
both. Programs take pieces by tickets (``lang.work_queue``).

Of a half's signals, number ``s * rounds + round`` says that the partials of rank s of our node of our item of a round
are here; then come [nodes, slots] of nodes' sums, and one of the total of each tile. Of its data, partials of our own
items come first, [LOCAL, slots] tiles in register order (``to_fragment_layout``), then the nodes' sums of them,
[nodes, slots], where our own is sent from, then the totals of all tiles in rows; slots are the tiles of a rank's items.
That is about 2 + NODES / LOCAL times z.

Halves are used again two calls later, with nothing to wait for between: a rank has z when it has the totals, of at
least one tile; who added it has waited for the other owners, and all of these for all of their node. So nobody finishes
call t + 1 before everybody has begun it, and has finished call t: has read what came, partials, sums and totals, hence
the sums and totals that we sent in call t have arrived, and are not read for the network any more.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.common.gemm_tile import as_aligned, from_fragment_layout, store_rows, swizzle, with_bias
from tdkernels.ops.common.rank_reduce import reduce_in_rank_order
from tdkernels.ops.common.staging import copy_out_staged
from tdkernels.ops.dense.gemm_ar.tile import multiply_tile, receive_tile

# What a piece of work does.
_FORWARD, _MULTIPLY, _SUM, _TOTAL, _RELAY, _RECEIVE = (tl.constexpr(role) for role in range(6))


@td.jit
def _sum_slice(parts, part_bytes, first, own, PARTS: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """SIZE elements from ``first`` on of the sum of PARTS rounded tiles, of which number ``own`` is ours; a vector."""
    offs = first + tl.arange(0, SIZE)
    ours = td.to_float32(tl.load(td.pointer_to(parts + own * part_bytes, DTYPE) + offs))
    return reduce_in_rank_order(parts, part_bytes, offs, offs >= 0, ours, own, PARTS, DTYPE)


@td.jit
def _sum_tile(
    parts, part_bytes, dst, local, LOCAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICE_N: tl.constexpr, DTYPE: tl.constexpr,
):
    """Leave the sum of our node's partials of a tile at the address ``dst``, in their order, as a DTYPE."""
    SIZE: tl.constexpr = BLOCK_M * SLICE_N
    for first in range(0, BLOCK_M * BLOCK_N, SIZE):
        total = _sum_slice(parts, part_bytes, first, local, LOCAL, SIZE, DTYPE)
        tl.store(td.pointer_to(dst, DTYPE) + first + tl.arange(0, SIZE), td.from_float32(total, DTYPE))


@td.jit
def _store_on_node(
    ctx, half, offset, offs, values, node, local, FIRST: tl.constexpr, LOCAL: tl.constexpr, DTYPE: tl.constexpr
):
    """Store values at an offset in the buffer of every node peer, and if FIRST is 0 in ours."""
    for step in tl.static_range(FIRST, LOCAL):
        dst = td.data_at(ctx, half, node * LOCAL + (local + step) % LOCAL) + offset
        tl.store(td.pointer_to(dst, DTYPE) + offs, values)


@td.jit
def _total_tile(
    ctx, sums, part_bytes, totals_offset, half, bias_ptr, z_ptr, row, col, M, N, node, local,
    NODES: tl.constexpr, LOCAL: tl.constexpr, ADDS_ONCE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICE_N: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    """Add all nodes' sums of a tile; store the total in z and at every node peer, to be sent from in ours, too."""
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
    """Bring the total of a tile from our buffer to z and into the buffer of every node peer."""
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
    """Put what is at the address ``src`` to our rail peers, or if ONE to that on node ``only``, and raise a signal."""
    for step in tl.static_range(1, NODES):
        other = (node + step) % NODES
        goes = True
        if ONE:
            goes = other == only
        if goes:
            td.put_signal(ctx, src, src, num_bytes, signal_ptr, signal, other * LOCAL + local, CHECK_FAILED=True)


@td.jit
def _role(piece, item_tiles, delays, LOCAL: tl.constexpr, FORWARDS: tl.constexpr, RELAYS: tl.constexpr):
    """What is to be done, and to which tile: (role, round, sequence, tile of the item).

    ``sequence`` numbers the items in the order in which this rank computes them; there is nothing to do yet where the
    round is negative.
    """
    lag, sum_after, total_after, relay_after, receive_after = delays
    per_item = FORWARDS + item_tiles
    per_round = LOCAL * per_item + (LOCAL + 1 + RELAYS) * item_tiles
    in_round = piece % per_round
    round_ = piece // per_round
    other = in_round - LOCAL * per_item  # which of those that sum, make totals, relay or receive
    if other < 0:
        i = in_round % per_item - FORWARDS
        role = tl.where(i < 0, _FORWARD, _MULTIPLY)
        sequence = round_ * LOCAL + in_round // per_item - tl.where(i < 0, lag, 0)
        i = tl.maximum(i, 0)
    else:
        i = other % item_tiles
        role = _SUM + other // item_tiles
        peer = role - _TOTAL - RELAYS - 1  # whose item is received
        role = tl.where(peer >= 0, _RECEIVE, role)
        after = tl.where(role == _SUM, sum_after, tl.where(role == _TOTAL, total_after, receive_after))
        after = tl.where(role == _RELAY, relay_after, after)
        sequence = (round_ - after) * LOCAL + tl.where(peer >= 0, peer, LOCAL - 1)
    round_ = tl.where(sequence < 0, -1, sequence // LOCAL)
    return role, round_, sequence, i


# ---- what a piece does, by its role; each takes the next ticket and returns the answer ----
#
# call: (epoch, half, signal) of ``td.call``; rank: (our rank, its node, its number there); where: (row, col, M, N) of a
# tile of z.


@td.jit
def _sum_piece(
    ctx, call, rank, own_parts, own_sums, part_bytes, staged, made, round_, rounds, sum_signal, adder,
    NODES: tl.constexpr, LOCAL: tl.constexpr, ADDS_ONCE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICE_N: tl.constexpr, DTYPE: tl.constexpr, trace,
):
    """Sum our node's partials of a tile, and put the sum to the owners on other nodes that add.

    Flag number ``staged`` says that our own partial is there; flag number ``made`` is raised for our node's sum.
    """
    epoch, half, signal = call
    me, node, local = rank
    TILE_BYTES: tl.constexpr = BLOCK_M * BLOCK_N * (DTYPE.primitive_bitwidth // 8)
    td.mark(trace, "waits", me)
    td.wait(ctx, td.flag_at(ctx, staged), epoch, me, SCOPE="gpu")  # producer: our own multiply_tile
    if LOCAL > 1:
        td.mark(trace, "waits", ALL_PEERS, 0)
        # producer: copy_out_staged of every node peer
        td.wait_plan_node(ctx, td.signal_at(ctx, half, round_), rounds, signal)
    td.mark(trace, "sums", ALL_PEERS)
    src = own_sums + node * part_bytes
    _sum_tile(own_parts, part_bytes, src, local, LOCAL, BLOCK_M, BLOCK_N, SLICE_N, DTYPE)
    answer = td.fetch_work_item(ctx)
    # waiter: the program of this rank that makes the total of the tile
    td.store_release(td.flag_at(ctx, made), epoch, SCOPE="gpu")
    td.mark(trace, "pushes", ALL_PEERS)
    # waiter: the program of the owner on another node that makes the total of the tile
    _put_to_nodes(ctx, src, TILE_BYTES, sum_signal, signal, node, local, adder, NODES, LOCAL, ONE=ADDS_ONCE)
    return answer


@td.jit
def _total_piece(
    ctx, call, rank, own_sums, own_total, part_bytes, totals_offset, made, first_signal, slots, total_signal, adder,
    bias_ptr, z_ptr, where, NODES: tl.constexpr, LOCAL: tl.constexpr, ADDS_ONCE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICE_N: tl.constexpr, HAS_BIAS: tl.constexpr, trace,
):
    """Add the nodes' sums of a tile; store the total in z and at the node peers, or put it to the other nodes, too.

    Flag number ``made`` says that our node's sum is there, signal number ``first_signal + m * slots`` that node m's is.
    """
    epoch, half, signal = call
    me, node, local = rank
    row, col, M, N = where
    TILE_BYTES: tl.constexpr = BLOCK_M * BLOCK_N * (z_ptr.dtype.element_ty.primitive_bitwidth // 8)
    td.mark(trace, "waits", me)
    # producer: our own program that sums the tile
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
    """Bring the total of a tile that another node has added to z and to the node peers."""
    epoch, half, signal = call
    _, node, local = rank
    row, col, M, N = where
    td.mark(trace, "waits", adder * LOCAL + local)
    # producer: the program of the owner on another node that makes the total of the tile
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


# Compiled once for a tile and for who adds, whatever the shape, plan and size of an item: that makes tuning cheap.
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
    """z = the sum over ranks of x @ w.T, on every rank; x is [M, K], z is [M, N].

    Flag number ``sequence * item_tiles + i`` says that our partial of a tile is there, and those after all of them
    that our node's sum of a tile of our items is.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    N = as_aligned(N, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    TILE_BYTES: tl.constexpr = BLOCK_M * BLOCK_N * PRODUCT.elem_bytes
    DTYPE: tl.constexpr = z_ptr.dtype.element_ty
    FORWARDS: tl.constexpr = 1 if LOCAL > 1 else 0  # pieces for each item that forward
    RELAYS: tl.constexpr = 1 if ADDS_ONCE else 0  # pieces for each of our tiles that relay
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
    part_bytes = tl.cast(slots, tl.int64) * TILE_BYTES  # of one source
    sums_offset = LOCAL * part_bytes
    totals_offset = (LOCAL + NODES) * part_bytes
    first_sum = LOCAL * rounds  # signals
    first_total = first_sum + NODES * slots
    delays = lag, sum_after, total_after, relay_after, receive_after
    pieces = (rounds + receive_after) * (LOCAL * FORWARDS + (2 * LOCAL + 1 + RELAYS) * item_tiles)

    piece = td.await_work_item(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        trace = (trace_ptr, piece)
        td.mark(trace, "starts")
        role, round_, sequence, i = _role(piece, item_tiles, delays, LOCAL, FORWARDS, RELAYS)
        adder = round_ % NODES  # the node whose owner makes the total, if only one does
        local = (own_local + 1 + sequence % LOCAL + LOCAL) % LOCAL  # the owner on our node
        owner = own_node * LOCAL + local
        tile = (round_ * LOCAL + local) * item_tiles + i
        staged = sequence.to(tl.int64) * item_tiles + i
        stage = stage_ptr.to(tl.int64) + staged * TILE_BYTES
        number = round_ * item_tiles + i  # among the tiles of the owner's items
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
                    ctx, x_ptr, x_desc, w_ptr, w_desc, dst, staged, pid_m, pid_n, M, N, K, stride_w, epoch,
                    PRODUCT, trace,
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
                # producer: the owner's program that makes the total of the tile, or relays it
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
