"""Kernel of moe_gemm_rs: multiply the rows of experts, sum them by token, and send the sums to the tokens' ranks.

The tiles of the grouped GEMM are processed in reverse order of the stages of ``kernel_route``. So the tokens of the
other ranks are finished first and this rank's tokens last. The tiles of a stage are interleaved with work items for the
tokens of the stage that was processed before it. Such an item sums the weighted rows of each token in fp32, in the
order of its assignments. It stores the sums at the token's rank and sets a signal there. For this rank's tokens it adds
the sums of the peers instead, in fp32 and in rank order.

The number of tiles of a stage, and so the work list, is known only on the device. Each program derives the list as it
proceeds. An item waits only for items of this rank with smaller numbers or, for this rank's tokens, for items of peers
that come before any item of theirs that waits for a peer.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.common.gemm_tile import as_aligned, scale_of_row, store_rows, swizzle
from tdkernels.ops.common.rank_reduce import reduce_in_rank_order
from tdkernels.ops.common.work_interleaving import split_piece
from tdkernels.ops.experts.grouped_gemm.tile import grouped_tile, scales_of_expert
from tdkernels.ops.experts.tp_moe.kernel_ag_gemm import piece_of_turn, pieces_of_turn, tiles_of
from tdkernels.ops.experts.tp_moe.kernel_route import TILE_WORDS, chunk_at_turn, first_turn_of

ALIGN = tl.constexpr(16)  # the sums of a rank start at multiples of this many bytes


@td.jit
def _sum_of_choices(out_ptr, rows_ptr, weights_ptr, tokens, there, columns, inside, N, PIECE: tl.constexpr):
    """Return the weighted sum of each token's rows in fp32. Assignments without a row add nothing."""
    total = tl.full((PIECE.tokens, PIECE.columns), 0.0, tl.float32)
    for j in tl.static_range(PIECE.choices):
        choice = tokens.to(tl.int64) * PIECE.choices + j
        row = tl.load(rows_ptr + choice, mask=there, other=-1)
        at = row[:, None].to(tl.int64) * N + columns[None, :]
        part = td.to_float32(tl.load(out_ptr + at, mask=(row >= 0)[:, None] & inside[None, :], other=0.0))
        if weights_ptr is not None:
            part *= tl.load(weights_ptr + choice, mask=row >= 0, other=0.0)[:, None]
        total += part
    return total


@td.jit
def _add_up(
    ctx, out_ptr, rows_ptr, weights_ptr, z_ptr, half, signal, owner, tokens, columns, number, of_shard, M_shard, N,
    RANKS: tl.constexpr, PIECE: tl.constexpr, ROUND_OWN: tl.constexpr, trace,
):
    """Process work item ``number`` of the ``of_shard`` items of the tokens of rank ``owner``.

    All rows of these tokens have been computed. ROUND_OWN: this rank's sum is rounded as the peers' sums are, so that
    a result does not depend on the rank of its token.
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    ELEM_BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    me = td.rank(ctx)
    there, inside = tokens < M_shard, columns < N
    td.mark(trace, "joins", owner)
    total = _sum_of_choices(out_ptr, rows_ptr, weights_ptr, owner * M_shard + tokens, there, columns, inside, N, PIECE)
    offs = tokens[:, None].to(tl.int64) * N + columns[None, :]
    mask = there[:, None] & inside[None, :]
    shard_bytes = (tl.cast(M_shard, tl.int64) * N * ELEM_BYTES + ALIGN - 1) // ALIGN * ALIGN
    if owner != me:
        td.mark(trace, "pushes", owner)
        to = td.pointer_to(td.data_at(ctx, half, owner) + me * shard_bytes, DTYPE)
        tl.store(to + offs, td.from_float32(total, DTYPE), mask=mask)
        # waiter: the owner's work item for the same tokens and columns
        td.notify(ctx, td.signal_at(ctx, half, me * of_shard + number), owner, signal, CHECK_FAILED=True)
    else:
        if RANKS > 1:
            td.mark(trace, "waits", ALL_PEERS)
            # producer: the same work item of every peer
            td.wait_plan_all(ctx, td.signal_at(ctx, half, number), of_shard, signal)
        td.mark(trace, "sums")
        if ROUND_OWN:
            total = td.to_float32(td.from_float32(total, DTYPE))
        total = reduce_in_rank_order(td.data_at(ctx, half, me), shard_bytes, offs, mask, total, me, RANKS, DTYPE)
        tl.store(z_ptr + offs, td.from_float32(total, DTYPE), mask=mask)


# Compiled once per tile, number of ranks, top-k and width of a piece, for all shapes and plans.
@td.jit(do_not_specialize=[
    "M_shard", "R", "N", "K", "stride_plane", "stride_w", "plan", "chunk_rows", "stages", "group_m",
])
def moe_gemm_rs_kernel(
    ctx, h_ptr, h_desc, w_ptr, w_desc, h_scale_ptr, w_scale_ptr,
    rows_ptr, weights_ptr, table_ptr, begins_ptr, done_ptr, out_ptr, z_ptr,
    M_shard, R, N, K, stride_plane, stride_w, plan, chunk_rows, stages, group_m,
    RANKS: tl.constexpr, PIECE: tl.constexpr, PRODUCT: tl.constexpr, ROUND_OWN: tl.constexpr = False, trace_ptr=None,
):
    """Compute z [M_shard, N]: for each token of this rank, the sum over ranks and assignments of
    weight * h[row of the assignment] @ w[expert].T.

    ``h_scale_ptr`` and ``w_scale_ptr`` are the scales of fp8 operands, or None. ``done_ptr`` counts the finished tiles
    of each stage; it must be zero initially. ROUND_OWN: see ``_add_up``.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    N = as_aligned(N, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_plane = as_aligned(stride_plane, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    me = td.rank(ctx)
    epoch, half, signal = td.call(ctx, plan)
    num_chunks = (M_shard + chunk_rows - 1) // chunk_rows
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    of_turn = pieces_of_turn(chunk_rows, N, PIECE)
    pieces = tl.load(begins_ptr + stages) * tiles_n + RANKS * num_chunks * of_turn
    # The current section of the work list: items below ``end`` are tiles of ``stage`` and sums of ``stage + 1``.
    stage = tl.full((), 0, tl.int32) + stages
    end = tl.full((), 0, tl.int32)
    first_tile, tiles, sums = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)

    piece = td.await_work_item(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        trace = (trace_ptr, piece)
        td.mark(trace, "starts")
        for _step in range(0, stage + 1):
            if piece >= end:
                first_tile, tiles = tiles_of(begins_ptr, stage - 1)
                turns = first_turn_of(stage + 1, stages, RANKS, num_chunks)
                turns -= first_turn_of(stage, stages, RANKS, num_chunks)
                sums = tl.where(stage < stages, turns * of_turn, 0)
                end += tiles * tiles_n + sums
                stage -= 1
        # Start with tiles only, because other programs still compute the last tiles of the section before.
        lead = tl.num_programs(0)
        is_sum, number = split_piece(piece - end + tiles * tiles_n + sums, tiles * tiles_n, sums, lead)
        if is_sum:
            td.mark(trace, "waits", me, 0)
            for later in range(stage + 1, stages):
                expected = (tl.load(begins_ptr + later + 1) - tl.load(begins_ptr + later)) * tiles_n
                # producer: the programs of this rank that compute the stage's tiles
                td.wait(ctx, done_ptr + later, expected, me, SCOPE="gpu")
            # Reverse order: the tokens of the peers come first. This rank's tokens need the sums of the peers, which
            # are sent at the same point of the peers' lists.
            turn = first_turn_of(stage + 2, stages, RANKS, num_chunks) - 1 - number // of_turn
            owner, chunk = chunk_at_turn(turn, me, RANKS, num_chunks)
            within = number % of_turn
            tokens, columns = piece_of_turn(within, chunk, chunk_rows, N, PIECE)
            _add_up(
                ctx, out_ptr, rows_ptr, weights_ptr, z_ptr, half, signal, owner, tokens, columns,
                chunk * of_turn + within, num_chunks * of_turn, M_shard, N,
                RANKS, PIECE, ROUND_OWN, trace,
            )
            answer = td.fetch_work_item(ctx)
        else:
            pid_m, pid_n = swizzle(number, tiles, tiles_n, group_m)
            entry = table_ptr + (first_tile + pid_m) * TILE_WORDS
            expert, row, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
            col = pid_n * BLOCK_N
            offs_m = row + tl.arange(0, BLOCK_M)
            past = row + count
            h_at = h_ptr.to(tl.int64) + tl.minimum(offs_m, past - 1).to(tl.int64) * K * PRODUCT.elem_bytes
            td.mark(trace, "multiplies")
            acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
            acc, second = grouped_tile(
                acc, acc, h_at, h_desc, 0, row, offs_m < past,
                w_ptr, w_desc, expert, col, stride_plane, stride_w, N, K, h_ptr.dtype.element_ty, PRODUCT,
                scale_of_row(h_scale_ptr, row, K, PRODUCT), count,
                scales_of_expert(w_scale_ptr, expert, N, K, PRODUCT),
            )
            answer = td.fetch_work_item(ctx)
            td.mark(trace, "stores")
            product = td.from_float32(acc, out_ptr.dtype.element_ty)
            store_rows(out_ptr, product, offs_m, col + tl.arange(0, BLOCK_N), past, N)
            # waiter: the work items of this rank that sum the stage's tokens
            td.add_release(done_ptr + stage, tl.full((), 1, tl.int64), SCOPE="gpu")
        td.mark(trace, "finishes")
        piece = td.await_work_item(answer)
        td.mark(trace, "ends")
    td.finish(ctx)
