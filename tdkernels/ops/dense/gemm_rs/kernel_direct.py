"""Kernel of gemm_rs with transport "direct": partial tiles are sent from registers to their owner, without staging.

The first half of the programs computes and sends the tiles of the other ranks, rank + 1 first. The second half computes
this rank's own tiles and adds the peers' partials. Progress (invariant 1): only the second half waits, and only for
programs of the first half on the peers, which have smaller ids.

With TMA, a tile is sent from shared memory by the TMA engine of the SM while the program computes the next tile. Then
the program waits until the tile has arrived and sets its signal. Without TMA, the program stores the tile at the peer.

Tiles are sent in fragment layout (``common.gemm_tile.to_fragment_layout``), with the shape [BLOCK_M, BLOCK_N].
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.common.gemm_tile import as_aligned, gemm_tile, store_rows, swizzle, to_fragment_layout
from tdkernels.ops.common.rank_reduce import sum_of_tile


@td.jit
def _send(step, half, row, tile, descs, RANKS: tl.constexpr):
    """Start the TMA store of a tile to rank + 1 + ``step``, at ``row`` of a half of its buffer."""
    for peer in tl.static_range(RANKS - 1):
        if step == peer:
            descs[peer].store([half, row, 0], tile)


@td.jit
def _announce(ctx, piece, tiles, half, signal, me, RANKS: tl.constexpr, BY_ENGINE: tl.constexpr):
    """Wait until the tile of work item ``piece`` has arrived at its owner, and set its signal there."""
    if BY_ENGINE:
        td.await_tma_stores()
    owner = (me + 1 + piece // tiles) % RANKS
    # waiter: the owner's program for the same tile
    td.notify(ctx, td.signal_at(ctx, half, me * tiles + piece % tiles), owner, signal)


# Compiled once per tile, for all shapes and plans. This makes tuning cheap.
@td.jit(do_not_specialize=["M_shard", "N", "K", "stride_w", "plan", "group_m"])
def gemm_rs_direct_kernel(
    ctx, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, z_ptr, z_desc,
    desc1, desc2, desc3, desc4, desc5, desc6, desc7,
    M_shard, N, K, stride_w, plan, group_m, RANKS: tl.constexpr, PRODUCT: tl.constexpr, trace_ptr=None,
):
    """Compute z [M_shard, N] = this rank's rows of the sum over ranks of x [W * M_shard, K] @ w.T.

    The data of a half is [ranks, tiles, BLOCK_M, BLOCK_N]. Signal number ``source * tiles + tile`` is set when the
    partial of ``source`` is stored there. ``desc1``, ``desc2``, ... are descriptors of the buffers of rank + 1,
    rank + 2, ..., [halves, rows, BLOCK_N].
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    N = as_aligned(N, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    TILE: tl.constexpr = BLOCK_M * BLOCK_N
    DTYPE: tl.constexpr = z_ptr.dtype.element_ty
    BY_ENGINE: tl.constexpr = desc1 is not None
    me = td.rank(ctx)
    epoch, half, signal = td.call(ctx, plan)
    tiles_m = (M_shard + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles = tiles_m * tiles_n
    sent = tiles * (RANKS - 1)
    programs = tl.num_programs(0) // 2
    sends = tl.program_id(0) < programs
    first = tl.where(sends, tl.program_id(0), sent + tl.program_id(0) - programs)
    last = tl.where(sends, sent, sent + tiles)
    # A void launch has no work items: a peer may still read the data of an earlier launch.
    last = tl.where(td.is_void_for_all(signal), first, last)

    for piece in tl.range(first, last, programs):
        trace = (trace_ptr, piece)
        td.mark(trace, "starts")
        step = piece // tiles
        owner = (me + 1 + step) % RANKS
        pid_m, pid_n = swizzle(piece % tiles, tiles_m, tiles_n, group_m)
        row = pid_m * BLOCK_M
        col = pid_n * BLOCK_N
        td.mark(trace, "multiplies", owner)
        acc = gemm_tile(
            tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32), x_ptr, x_desc, 0, owner * M_shard + row, RANKS * M_shard,
            w_ptr, w_desc, col, stride_w, N, K, K, PRODUCT,
        )
        if owner != me:
            td.mark(trace, "pushes", owner)
            slot = me * tiles + piece % tiles
            partial = to_fragment_layout(td.from_float32(acc, DTYPE), BLOCK_M, BLOCK_N)
            if BY_ENGINE:
                if piece != first:
                    _announce(ctx, piece - programs, tiles, half, signal, me, RANKS, True)
                _send(
                    step, half, slot * BLOCK_M, partial.reshape(1, BLOCK_M, BLOCK_N),
                    (desc1, desc2, desc3, desc4, desc5, desc6, desc7), RANKS,
                )
            else:
                dst = td.data_at(ctx, half, owner) + slot.to(tl.int64) * (TILE * PRODUCT.elem_bytes)
                tl.store(td.pointer_to(dst, DTYPE) + tl.arange(0, TILE), partial)
                _announce(ctx, piece, tiles, half, signal, me, RANKS, False)
        else:
            tile = piece % tiles
            td.mark(trace, "waits", ALL_PEERS)
            # producer: the program for the same tile on every peer
            td.wait_plan_all(ctx, td.signal_at(ctx, half, tile), tiles, signal)
            td.mark(trace, "sums")
            z = sum_of_tile(
                acc, td.data_at(ctx, half, me) + tile.to(tl.int64) * (TILE * PRODUCT.elem_bytes),
                tl.cast(tiles, tl.int64) * (TILE * PRODUCT.elem_bytes), bias_ptr, col, N, me,
                DTYPE, RANKS, BLOCK_M, BLOCK_N, PRODUCT.has_bias,
            )
            if z_desc is not None:
                z_desc.store([0, row, col], z.reshape(1, BLOCK_M, BLOCK_N))  # 3-D as in _send: one shared-memory buffer
            else:
                store_rows(z_ptr, z, row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N), M_shard, N)
        td.mark(trace, "finishes")
        td.mark(trace, "ends")
    if BY_ENGINE:
        if sends & (first < last):
            _announce(
                ctx, first + (last - 1 - first) // programs * programs, tiles, half, signal, me, RANKS, True
            )
    td.finish(ctx)
