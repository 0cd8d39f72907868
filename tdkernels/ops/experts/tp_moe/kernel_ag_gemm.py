"""Kernel of moe_ag_gemm: push tokens to all peers, sort them by expert and multiply them, all concurrently.

Programs fetch work items from an atomic queue. The first items push this rank's tokens to the peers. Then, for each
overlap stage (``kernel_route``), come the tiles of the previous stage, interleaved with items that copy the tokens of
this stage to their rows, one row per top-k assignment. TMA needs the rows of an expert to be contiguous. The copy costs
less time than a GEMM loses that gathers its rows.

``source`` sets signal number ``source * num_chunks + chunk`` of a half when that chunk of its tokens has been stored in
this rank's memory. The waiters are the items that copy these tokens. A counter per stage counts the finished copies;
its waiters are the tiles of the stage.
"""

from typing import NamedTuple

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.collectives.kernel_async_all_gather import push_shard
from tdkernels.ops.common.gemm_tile import as_aligned, scale_of_row, swizzle
from tdkernels.ops.common.work_interleaving import split_piece
from tdkernels.ops.experts.grouped_gemm.kernel import store_product
from tdkernels.ops.experts.grouped_gemm.tile import grouped_tile, scales_of_expert
from tdkernels.ops.experts.tp_moe.kernel_route import TILE_WORDS, chunk_at_turn, first_turn_of

BLOCK_TOKENS, BLOCK_COLUMNS = 16, 512  # maximum size of a work item that copies or sums rows


class Piece(NamedTuple):
    """Size of a work item that copies or sums rows: the constexpr argument ``PIECE`` of kernels.

    Args:
        tokens: Tokens per item, a power of two.
        columns: Columns per item, a power of two.
        choices: Rows per token (top-k).
    """

    tokens: int
    columns: int
    choices: int


@td.jit
def pieces_of_turn(chunk_rows, width, PIECE: tl.constexpr):
    """Return the number of work items per chunk of tokens. A chunk with fewer tokens has as many."""
    return chunk_rows // PIECE.tokens * ((width + PIECE.columns - 1) // PIECE.columns)


@td.jit
def piece_of_turn(piece, chunk, chunk_rows, width, PIECE: tl.constexpr):
    """Return (token indices within the rank, column indices) of a work item of a chunk."""
    blocks = (width + PIECE.columns - 1) // PIECE.columns
    tokens = chunk * chunk_rows + piece // blocks * PIECE.tokens + tl.arange(0, PIECE.tokens)
    return tokens, piece % blocks * PIECE.columns + tl.arange(0, PIECE.columns)


@td.jit
def _copy_to_rows(tokens_ptr, rows_ptr, sorted_ptr, tokens, first_token, M_shard, columns, K, CHOICES: tl.constexpr):
    """Copy columns of a rank's tokens to the rows of their assignments.

    ``first_token`` is the index of the rank's first token among the tokens of all ranks.
    """
    there, inside = tokens < M_shard, columns < K
    at = tokens[:, None].to(tl.int64) * K + columns[None, :]
    block = tl.load(tokens_ptr + at, mask=there[:, None] & inside[None, :], other=0.0)
    for j in tl.static_range(CHOICES):
        choice = (first_token + tokens).to(tl.int64) * CHOICES + j
        row = tl.load(rows_ptr + choice, mask=there, other=-1)
        mask = (row >= 0)[:, None] & inside[None, :]
        tl.store(sorted_ptr + row[:, None].to(tl.int64) * K + columns[None, :], block, mask=mask)


@td.jit
def _copy_piece(
    ctx, half, signal, me, ranks, x_ptr, rows_ptr, sorted_ptr, turn, piece, num_chunks, chunk_rows, slot_rows,
    row_bytes, M_shard, K, PIECE: tl.constexpr, trace,
):
    """Wait for the chunk of a turn, and copy one work item of its tokens to their rows."""
    source, chunk = chunk_at_turn(turn, me, ranks, num_chunks)
    tokens, columns = piece_of_turn(piece, chunk, chunk_rows, K, PIECE)
    at = x_ptr.to(tl.int64)
    if source != me:
        td.mark(trace, "waits", source)
        # producer: push_shard of the source
        seen = td.wait_plan(ctx, td.signal_at(ctx, half, source * num_chunks + chunk), signal, source)
        at = td.consume_token(td.data_at(ctx, half, me) + source.to(tl.int64) * slot_rows * row_bytes, seen)
    td.mark(trace, "copies", source)
    _copy_to_rows(
        td.pointer_to(at, x_ptr.dtype.element_ty), rows_ptr, sorted_ptr, tokens, source * M_shard, M_shard, columns, K,
        PIECE.choices,
    )


# Compiled once per tile and top-k, for all shapes and plans. This keeps tuning cheap.
@td.jit(do_not_specialize=[
    "M_shard", "R", "N", "K", "stride_plane", "stride_w", "slot_rows", "plan", "num_comm", "chunk_rows", "stages",
    "group_m",
])
def moe_ag_gemm_kernel(
    ctx, x_ptr, sorted_ptr, sorted_desc, w_ptr, w_desc, x_scale_ptr, w_scale_ptr,
    rows_ptr, table_ptr, begins_ptr, done_ptr, y_ptr, pre_ptr,
    M_shard, R, N, K, stride_plane, stride_w, slot_rows, plan, num_comm, chunk_rows, stages, group_m,
    COPY_WORDS: tl.constexpr, PIECE: tl.constexpr, PRODUCT: tl.constexpr, trace_ptr=None,
):
    """Compute y [R, N]: the tokens of all ranks, one row per assignment, times the weight of the row's expert.

    ``sorted_ptr`` gets these rows, [R, K]. ``x_scale_ptr`` and ``w_scale_ptr`` are the scales of the rows [R, ·] and of
    the weights of fp8 operands, or None. ``done_ptr`` counts the finished copies of each stage; it must be zero
    initially.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    N = as_aligned(N, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_plane = as_aligned(stride_plane, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    epoch, half, signal = td.call(ctx, plan)
    num_chunks = (M_shard + chunk_rows - 1) // chunk_rows
    row_bytes = tl.cast(K, tl.int64) * PRODUCT.elem_bytes
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    of_turn = pieces_of_turn(chunk_rows, K, PIECE)
    pieces = num_comm + tl.load(begins_ptr + stages) * tiles_n + ranks * num_chunks * of_turn
    # The current section of the work list: items below ``end`` are tiles of ``stage - 1`` and copies for ``stage``. The
    # begin of the section is recomputed, not carried: Triton 3.6 and 3.7 drop one of two loop-carried values that have
    # the same initial value.
    stage = tl.full((), -1, tl.int32)
    end = num_comm
    first_tile, tiles, copies = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)

    piece = td.await_work_item(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        trace = (trace_ptr, piece)
        td.mark(trace, "starts")
        if piece < num_comm:
            push_shard(
                ctx, x_ptr.to(tl.int64), half, signal, M_shard * row_bytes, chunk_rows * row_bytes, num_chunks,
                slot_rows * row_bytes, piece, num_comm, COPY_OWN=False, COPY_WORDS=COPY_WORDS, trace=trace,
            )
            answer = td.fetch_work_item(ctx)
        else:
            for _step in range(stage, stages):
                if piece >= end:
                    first_tile, tiles = tiles_of(begins_ptr, stage)
                    turns = first_turn_of(stage + 2, stages, ranks, num_chunks)
                    turns -= first_turn_of(stage + 1, stages, ranks, num_chunks)
                    copies = tl.where(stage + 1 < stages, turns * of_turn, 0)
                    end += tiles * tiles_n + copies
                    stage += 1
            is_copy, number = split_piece(piece - end + tiles * tiles_n + copies, tiles * tiles_n, copies, 0)
            if is_copy:
                _copy_piece(
                    ctx, half, signal, me, ranks, x_ptr, rows_ptr, sorted_ptr,
                    first_turn_of(stage, stages, ranks, num_chunks) + number // of_turn, number % of_turn,
                    num_chunks, chunk_rows, slot_rows, row_bytes, M_shard, K, PIECE, trace,
                )
                answer = td.fetch_work_item(ctx)
                # waiter: the tiles of the stage
                td.add_release(done_ptr + stage, tl.full((), 1, tl.int64), SCOPE="gpu")
            else:
                pid_m, pid_n = swizzle(number, tiles, tiles_n, group_m)
                entry = table_ptr + (first_tile + pid_m) * TILE_WORDS
                expert, row, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
                col = pid_n * BLOCK_N
                offs_m = row + tl.arange(0, BLOCK_M)
                past = row + count
                inside = tl.minimum(offs_m, past - 1).to(tl.int64)
                x_at = sorted_ptr.to(tl.int64) + inside * row_bytes
                td.mark(trace, "waits", me)
                for earlier in range(0, stage):
                    turns = first_turn_of(earlier + 1, stages, ranks, num_chunks)
                    turns -= first_turn_of(earlier, stages, ranks, num_chunks)
                    # producer: the work items of this rank that copy the tokens of the stage
                    seen = td.wait(ctx, done_ptr + earlier, turns * of_turn, me, SCOPE="gpu", FOR_TMA=PRODUCT.use_tma)
                    x_at = td.consume_token(x_at, seen)
                td.mark(trace, "multiplies")
                acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
                acc, second = grouped_tile(
                    acc, acc, x_at, sorted_desc, 0, row, offs_m < past,
                    w_ptr, w_desc, expert, col, stride_plane, stride_w, N, K, DTYPE, PRODUCT,
                    scale_of_row(x_scale_ptr, row, K, PRODUCT), count,
                    scales_of_expert(w_scale_ptr, expert, N, K, PRODUCT),
                )
                answer = td.fetch_work_item(ctx)
                td.mark(trace, "stores")
                store_product(acc, second, y_ptr, pre_ptr, offs_m, past, col, N, PRODUCT)
        td.mark(trace, "finishes")
        piece = td.await_work_item(answer)
        td.mark(trace, "ends")
    td.finish(ctx)


@td.jit
def tiles_of(begins_ptr, stage):
    """Return (first tile of a stage, number of its tiles). Stage -1 has none."""
    first = tl.load(begins_ptr + tl.maximum(stage, 0))
    last = tl.load(begins_ptr + stage + 1)
    return first, last - first
