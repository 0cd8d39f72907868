"""The kernel behind GEMM-RS in a group on several nodes: sums are made inside a node before they take the network.

Rank l of node n owns the final rows of (n, l), and collects, inside its node, the rows of (n', l) for every node n': of
them one sum leaves the node, so each byte crosses the network once, and only between ranks of the same number.

The nodes come in turn, n + 1 first and our own last; of a node n' the rows of (n', l + 1) come first, then those of
(n', l + 2) …, those of (n', l) last. What becomes of a tile:

    of (n', l'), l' != l    the partial is staged in our own memory, and forwarded to rank l' of our node
    of (n', l), n' != n     the epilogue waits for the node peers' partials, adds them in fp32 in the order of their
                            ranks, rounds the node's sum and puts it into the memory of (n', l)
    of (n, l)               the same, not rounded; then the epilogue waits for the other nodes' sums, adds them in the
                            order of the nodes, and the bias, and stores z

Forwarding is by pieces of their own that are strewn between the products, as in ``gemm_rs_kernel``, which also says how
the pieces are numbered and taken. That is simpler here than to send from where a tile was computed, whose signal would
have to be raised one piece later, but before any wait; and it takes any number of ranks. A piece waits for pieces of
smaller numbers only, here and on every peer: ``lag`` is at most the periods of a rank's rows, so that node peers have
forwarded the item of a tile by the period in which we compute it; and other nodes put their sums of our rows before
they come to their own, which are the last. A put is one tile, contiguous: 32 to 64 KiB of the usual ones.

Of a half's signals, number ``(n' * LOCAL + s) * items + item`` says that the partials of rank s of our node of the rows
of (n', l) are here, number ``ranks * items + m * tiles + tile`` that node m's sum of a tile is. Of its data, partials
are [nodes, LOCAL] times the tiles of a shard and the sums of nodes are [nodes] times as many: W + NODES times M / W
rows, in whole tiles. Our own place among the partials of another node's rows is where our node's sum of them is sent
from; two of the places are not used.

Halves are used again two calls later, with nothing to wait for between: each tile of our own rows waits for all node
peers and for rank l of each other node, which has waited for all of its own node. So nobody finishes call t + 1 before
everybody has begun it, and so has finished call t: has read what came, partials and sums, hence the sums that we sent
it have arrived, and are not read for the network any more.
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
    """(node, number on it) of the rank whose rows come in a turn, 0 to W - 1; our own are the last."""
    return (me // LOCAL + 1 + turn // LOCAL) % NODES, (me % LOCAL + 1 + turn % LOCAL) % LOCAL


@td.jit
def _staged(period, items, item_tiles, LOCAL: tl.constexpr):
    """Number of the first tile of a period among those that are staged, which is nothing in the last part of a turn."""
    return (period - period // (LOCAL * items) * items).to(tl.int64) * item_tiles


@td.jit
def _put_node_sum(
    ctx, acc, parts, part_bytes, dst, signal_ptr, signal, owner, local,
    LOCAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILE_BYTES: tl.constexpr, DTYPE: tl.constexpr,
    trace,
):
    """Add our node's partials to ``acc``, and put the rounded sum to its owner on another node; the next ticket.

    Rank s of our node has its partial at ``parts + s * part_bytes``; the sum is sent from our own place there.
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
    # waiter: the owner's program for the same tile
    td.put_signal(ctx, dst, src, TILE_BYTES, signal_ptr, signal, owner, CHECK_FAILED=True)
    return answer


# Compiled once for a tile, whatever the shape, plan and size of an item: that is what makes tuning cheap.
@td.jit(network=True, do_not_specialize=["M_shard", "N", "K", "stride_w", "lag", "plan", "item_tiles", "group_m"])
def gemm_rs_nodes_kernel(
    ctx, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, z_ptr, stage_ptr,
    M_shard, N, K, stride_w, lag, plan, item_tiles, group_m,
    COPY_WORDS: tl.constexpr, NODES: tl.constexpr, LOCAL: tl.constexpr, PRODUCT: tl.constexpr, trace_ptr=None,
):
    """z = our rows of the sum over ranks of x @ w.T; x is [W * M_shard, K], z is [M_shard, N]."""
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    N = as_aligned(N, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    TILE: tl.constexpr = BLOCK_M * BLOCK_N
    TILE_BYTES: tl.constexpr = TILE * PRODUCT.elem_bytes
    DTYPE: tl.constexpr = z_ptr.dtype.element_ty
    RANKS: tl.constexpr = NODES * LOCAL
    FORWARDS: tl.constexpr = 1 if LOCAL > 1 else 0  # pieces of a period that forward
    me = td.rank(ctx)
    own_node = me // LOCAL
    own_local = me % LOCAL
    epoch, half, signal = td.call(ctx, plan)
    tiles_m = (M_shard + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles = tiles_m * tiles_n
    items = (tiles + item_tiles - 1) // item_tiles
    part_bytes = tl.cast(items, tl.int64) * item_tiles * TILE_BYTES  # of the rows of a rank
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
                first = item % items * item_tiles  # of its tiles
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
                            # producer: the program for the same tile of the rank of our number on the node
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
