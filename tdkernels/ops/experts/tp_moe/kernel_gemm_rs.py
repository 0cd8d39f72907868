"""The kernel behind moe_gemm_rs: experts' rows are multiplied, added up by token, and sent to the tokens' ranks.

The tiles of the grouped product come in the stages of ``kernel_route`` backwards, so that the tokens of the other
ranks are done with first and our own last. Strewn between the tiles of a stage are pieces for the tokens of the stage
before it in this order: they add up each token's rows, weighted, in fp32 and in the order of its choices, and store
the sums at the token's rank, with a signal of their own. For our own tokens they add the peers' sums to ours, in fp32
and in the order of ranks.

How many tiles a stage has is known on the device only, and so is the list of pieces: each program goes along with it. A
piece waits only for pieces of smaller numbers of this rank, or, for our own tokens, for pieces of the peers that come
before any piece of theirs which waits for a peer.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.common.gemm_tile import as_aligned, store_rows, swizzle
from tdkernels.ops.common.rank_reduce import reduce_in_rank_order
from tdkernels.ops.common.work_interleaving import split_piece
from tdkernels.ops.experts.grouped_gemm.tile import grouped_tile
from tdkernels.ops.experts.tp_moe.kernel_ag_gemm import piece_of_turn, pieces_of_turn, tiles_of
from tdkernels.ops.experts.tp_moe.kernel_route import TILE_WORDS, chunk_at_turn, first_turn_of

ALIGN = tl.constexpr(16)  # bytes, to a multiple of which a rank's sums are rounded up


@td.jit
def _sum_of_choices(out_ptr, rows_ptr, weights_ptr, tokens, there, columns, inside, N, PIECE: tl.constexpr):
    """Each token's rows of the product, weighted and added up in fp32; nothing for choices without a row."""
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
    RANKS: tl.constexpr, PIECE: tl.constexpr, trace,
):
    """Piece ``number`` of the ``of_shard`` of a rank's tokens, all of whose rows have been computed."""
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
        # waiter: the owner's piece that adds up the same tokens and columns
        td.notify(ctx, td.signal_at(ctx, half, me * of_shard + number), owner, signal, CHECK_FAILED=True)
    else:
        if RANKS > 1:
            td.mark(trace, "waits", ALL_PEERS)
            # producer: the same piece of every peer
            td.wait_plan_all(ctx, td.signal_at(ctx, half, number), of_shard, signal)
        td.mark(trace, "sums")
        total = reduce_in_rank_order(td.data_at(ctx, half, me), shard_bytes, offs, mask, total, me, RANKS, DTYPE)
        tl.store(z_ptr + offs, td.from_float32(total, DTYPE), mask=mask)


# Compiled once for a tile, a number of ranks and of choices, whatever the shape and plan.
@td.jit(do_not_specialize=[
    "M_shard", "R", "N", "K", "stride_plane", "stride_w", "plan", "chunk_rows", "stages", "group_m",
])
def moe_gemm_rs_kernel(
    ctx, h_ptr, h_desc, w_ptr, w_desc, rows_ptr, weights_ptr, table_ptr, begins_ptr, done_ptr, out_ptr, z_ptr,
    M_shard, R, N, K, stride_plane, stride_w, plan, chunk_rows, stages, group_m,
    RANKS: tl.constexpr, PIECE: tl.constexpr, PRODUCT: tl.constexpr, trace_ptr=None,
):
    """z [M_shard, N] = our tokens' sums, over ranks and choices, of weight * h[row of the choice] @ w[expert].T.

    ``done_ptr``: of each stage, how many of its tiles have been computed; zeros at first.
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
    # The part of the list that we are in: up to ``end`` pieces are tiles of a stage, and sums of the stage after it.
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
        # Not at once: the last tiles of the stage before are still being computed.
        lead = tl.num_programs(0)
        is_sum, number = split_piece(piece - end + tiles * tiles_n + sums, tiles * tiles_n, sums, lead)
        if is_sum:
            td.mark(trace, "waits", me, 0)
            for later in range(stage + 1, stages):
                expected = (tl.load(begins_ptr + later + 1) - tl.load(begins_ptr + later)) * tiles_n
                # producer: the programs of this rank that compute the stage's tiles
                td.wait(ctx, done_ptr + later, expected, me, SCOPE="gpu")
            # Backwards: the peers' tokens before ours, for which we wait until they have done the same.
            turn = first_turn_of(stage + 2, stages, RANKS, num_chunks) - 1 - number // of_turn
            owner, chunk = chunk_at_turn(turn, me, RANKS, num_chunks)
            within = number % of_turn
            tokens, columns = piece_of_turn(within, chunk, chunk_rows, N, PIECE)
            _add_up(
                ctx, out_ptr, rows_ptr, weights_ptr, z_ptr, half, signal, owner, tokens, columns,
                chunk * of_turn + within, num_chunks * of_turn, M_shard, N,
                RANKS, PIECE, trace,
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
            )
            answer = td.fetch_work_item(ctx)
            td.mark(trace, "stores")
            product = td.from_float32(acc, out_ptr.dtype.element_ty)
            store_rows(out_ptr, product, offs_m, col + tl.arange(0, BLOCK_N), past, N)
            # waiter: the pieces of this rank that add up the stage's tokens
            td.add_release(done_ptr + stage, tl.full((), 1, tl.int64), SCOPE="gpu")
        td.mark(trace, "finishes")
        piece = td.await_work_item(answer)
        td.mark(trace, "ends")
    td.finish(ctx)
