"""Kernel of gemm_rs for groups on several nodes: partials are summed inside each node before they cross the network.

This rank is (n, l): local rank l of node n. It owns the final rows of (n, l). Inside its node it also sums the rows of
(n', l) for every other node n', and sends one sum to (n', l). So each byte crosses the network once, and only between
ranks with the same local rank.

Tiles are ordered by the node of their rows: node n + 1 first, this node last. Within a node n', the rows of
(n', l + 1) come first, then (n', l + 2), and so on, and (n', l) last. By the owner of its rows, a tile is processed so:

    (n', l'), l' != l    The partial is staged in this rank's memory and copied to rank l' of this node.
    (n', l), n' != n     The epilogue waits for the node peers' partials, adds them in fp32 in rank order, rounds the
                         node's sum, and puts it into the memory of (n', l).
    (n, l)               The node's sum is computed in the same way, but not rounded. Then the epilogue waits for the
                         sums of the other nodes, adds them in the order of the nodes, adds the bias, and stores z.

Copies of staged tiles are work items interleaved with the tiles. ``kernel`` describes the work list. This is simpler
than sending a tile from the program that computed it: such a program would have to set the signal one item later, but
before any wait. It also supports any number of ranks. A put is one contiguous tile, usually 32 to 64 KiB.

Progress (invariant 1). An item waits only for items with smaller numbers, on this rank and on every peer. ``lag`` is at
most the number of periods of a rank's rows, so node peers have copied out the group of a tile by the period in which
this rank computes the tile. Other nodes put their sums of this rank's rows before they process their own rows, which
are last.

Memory of a half. Signal number ``(n' * LOCAL + s) * items + item`` is set when the partials of rank s of this node for
rows of (n', l) have arrived; signal number ``ranks * items + m * tiles + tile`` when the sum of node m for a tile has
arrived. The partials are [nodes, LOCAL] times the tiles of a shard, followed by the sums of the nodes, [nodes] times
the tiles of a shard. In total this is W + NODES times M / W rows, in whole tiles. This rank's own slot among the
partials of another node's rows holds the sum that is sent to that node. Two slots are not used.

Buffer reuse (invariant 3). A half is used again two calls later, without a barrier. Each tile of this rank's rows waits
for all node peers and for rank l of each other node, which has waited for its whole node. So no rank finishes call
t + 1 before all ranks have begun it and thus finished call t. A rank that has finished call t has read all partials and
sums that it received in it. So the sums that were sent to it have arrived, and the network reads them no longer.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.common.gemm_tile import as_aligned, gemm_tile, store_rows, swizzle, to_fragment_layout
from tdkernels.ops.common.node_reduce import sum_of_tile_over_nodes
from tdkernels.ops.common.rank_reduce import sum_of_tile
from tdkernels.ops.common.staging import copy_out_staged, stage_tile


@td.jit
def _owner(turn, me, NODES: tl.constexpr, LOCAL: tl.constexpr):
    """Return (node, local rank) of the rank whose rows are processed in a turn, 0 to W - 1. This rank is the last."""
    return (me // LOCAL + 1 + turn // LOCAL) % NODES, (me % LOCAL + 1 + turn % LOCAL) % LOCAL


@td.jit
def _staged(period, items, item_tiles, LOCAL: tl.constexpr):
    """Return the index of the first tile of a period among the staged tiles.

    The last ``items`` of each ``LOCAL * items`` periods stage nothing: their rows are summed by this rank.
    """
    return (period - period // (LOCAL * items) * items).to(tl.int64) * item_tiles


@td.jit
def _put_node_sum(
    ctx, acc, parts, part_bytes, dst, signal_ptr, signal, owner, local,
    LOCAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILE_BYTES: tl.constexpr, DTYPE: tl.constexpr,
    trace,
):
    """Add this node's partials to ``acc``, and put the rounded sum to its owner on another node.

    The partial of rank s of this node is at ``parts + s * part_bytes``. The sum is sent from this rank's slot there.
    Returns the result of ``td.fetch_work_item``.
    """
    answer = td.fetch_work_item(ctx)
    td.mark(trace, "sums")
    if LOCAL > 1:
        total = sum_of_tile(acc, parts, part_bytes, None, 0, 0, local, DTYPE, LOCAL, BLOCK_M, BLOCK_N, False)
    else:
        total = td.from_float32(acc, DTYPE)
    src = parts + local * part_bytes
    tl.store(
        td.pointer_to(src, DTYPE) + tl.arange(0, BLOCK_M * BLOCK_N), to_fragment_layout(total, BLOCK_M, BLOCK_N)
    )
    td.mark(trace, "pushes", owner)
    # waiter: the program for the same tile on the owner
    td.put_signal(ctx, dst, src, TILE_BYTES, signal_ptr, signal, owner, CHECK_FAILED=True)
    return answer


# Compiled once per tile, for all shapes, plans and group sizes. This makes tuning cheap.
@td.jit(network=True, do_not_specialize=["M_shard", "N", "K", "stride_w", "lag", "plan", "item_tiles", "group_m"])
def gemm_rs_nodes_kernel(
    ctx, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, z_ptr, stage_ptr,
    M_shard, N, K, stride_w, lag, plan, item_tiles, group_m,
    COPY_WORDS: tl.constexpr, NODES: tl.constexpr, LOCAL: tl.constexpr, PRODUCT: tl.constexpr, trace_ptr=None,
):
    """Compute z [M_shard, N] = this rank's rows of the sum over ranks of x [W * M_shard, K] @ w.T."""
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    N = as_aligned(N, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    TILE: tl.constexpr = BLOCK_M * BLOCK_N
    TILE_BYTES: tl.constexpr = TILE * PRODUCT.elem_bytes
    DTYPE: tl.constexpr = z_ptr.dtype.element_ty
    RANKS: tl.constexpr = NODES * LOCAL
    FORWARDS: tl.constexpr = 1 if LOCAL > 1 else 0  # work items per period that copy out staged tiles
    me = td.rank(ctx)
    own_node = me // LOCAL
    own_local = me % LOCAL
    epoch, half, signal = td.call(ctx, plan)
    tiles_m = (M_shard + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles = tiles_m * tiles_n
    items = (tiles + item_tiles - 1) // item_tiles
    part_bytes = tl.cast(items, tl.int64) * item_tiles * TILE_BYTES  # bytes of the rows of one rank
    sums_offset = RANKS * part_bytes
    pieces = RANKS * items * (FORWARDS + item_tiles)

    piece = td.await_work_item(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        trace = (trace_ptr, piece)
        td.mark(trace, "starts")
        period = piece // (FORWARDS + item_tiles)
        place = piece % (FORWARDS + item_tiles) - FORWARDS
        if place < 0:
            item = tl.maximum(period - lag, 0)
            node, local = _owner(item // items, me, NODES, LOCAL)
            if (period >= lag) & (local != own_local):
                peer = own_node * LOCAL + local
                first = item % items * item_tiles  # first tile of the group
                staged = _staged(item, items, item_tiles, LOCAL)
                slot = (node * LOCAL + own_local) * part_bytes + first.to(tl.int64) * TILE_BYTES
                answer = copy_out_staged(
                    ctx, stage_ptr.to(tl.int64) + staged * TILE_BYTES, td.data_at(ctx, half, peer) + slot,
                    staged, tl.minimum(item_tiles, tiles - first), peer,
                    td.signal_at(ctx, half, (node * LOCAL + own_local) * items + item % items), signal, epoch,
                    TILE_BYTES, COPY_WORDS, trace,
                )
            else:
                answer = td.fetch_work_item(ctx)
        else:
            tile = period % items * item_tiles + place
            if tile < tiles:
                pid_m, pid_n = swizzle(tile, tiles_m, tiles_n, group_m)
                row = pid_m * BLOCK_M
                col = pid_n * BLOCK_N
                node, local = _owner(period // items, me, NODES, LOCAL)
                owner = node * LOCAL + local
                td.mark(trace, "multiplies", owner)
                acc = gemm_tile(
                    tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32), x_ptr, x_desc, 0, owner * M_shard + row,
                    RANKS * M_shard, w_ptr, w_desc, col, stride_w, N, K, K, PRODUCT,
                )
                if local != own_local:
                    answer = td.fetch_work_item(ctx)
                    td.mark(trace, "stores")
                    staged = _staged(period, items, item_tiles, LOCAL) + place
                    stage_tile(ctx, stage_ptr + staged * TILE, staged, acc, epoch, BLOCK_M, BLOCK_N)
                else:
                    data = td.data_at(ctx, half, me)
                    of_tile = tile.to(tl.int64) * TILE_BYTES
                    parts = data + node * LOCAL * part_bytes + of_tile
                    if LOCAL > 1:
                        td.mark(trace, "waits", ALL_PEERS)
                        # producer: copy_out_staged of every node peer
                        item = tile // item_tiles
                        td.wait_plan_node(
                            ctx, td.signal_at(ctx, half, node * LOCAL * items + item), items, signal
                        )
                    if owner != me:
                        answer = _put_node_sum(
                            ctx, acc, parts, part_bytes, data + sums_offset + own_node * part_bytes + of_tile,
                            td.signal_at(ctx, half, RANKS * items + own_node * tiles + tile), signal, owner, own_local,
                            LOCAL, BLOCK_M, BLOCK_N, TILE_BYTES, DTYPE, trace,
                        )
                    else:
                        td.mark(trace, "waits", ALL_PEERS)
                        for step in tl.static_range(1, NODES):
                            # producer: the program for the same tile on the rail peer on that node
                            other = (own_node + step) % NODES
                            td.await_put(
                                ctx, td.signal_at(ctx, half, RANKS * items + other * tiles + tile), signal,
                                other * LOCAL + own_local,
                            )
                        answer = td.fetch_work_item(ctx)
                        td.mark(trace, "sums")
                        z = sum_of_tile_over_nodes(
                            acc, parts, data + sums_offset + of_tile, part_bytes, bias_ptr, col, N,
                            own_node, own_local, DTYPE, NODES, LOCAL, BLOCK_M, BLOCK_N, PRODUCT.has_bias,
                        )
                        store_rows(z_ptr, z, row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N), M_shard, N)
            else:
                answer = td.fetch_work_item(ctx)
        td.mark(trace, "finishes")
        piece = td.await_work_item(answer)
        td.mark(trace, "ends")
    td.finish(ctx)
