"""The kernel behind moe_gemm_rs: experts' rows are multiplied, added up by token, and sent to the tokens' ranks.

The tiles of the grouped product come in the order of ``moe_route_kernel`` backwards, so that the tokens of the other
ranks are done with chunk by chunk, and our own last. Strewn between them are pieces that take a block of tokens of a
chunk for which all tiles have been computed, ``lag`` pieces after the last of them was begun: they add up each token's
rows, weighted, in fp32 and in the order of its choices, and store the sums at the token's rank, with a signal of their
own. For our own tokens they add the peers' sums to ours, in fp32 and in the order of ranks.

How many tiles a chunk needs is known on the device only, and so is the list of pieces: each program finds for the
number that it has drawn which kind of piece it is. A piece waits only for pieces of smaller numbers, here and there.
"""

import torch
import triton
import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops import _device, _operands
from tdkernels.ops._gemm import as_aligned, store_rows, swizzle
from tdkernels.ops._grouped import grouped_tile
from tdkernels.ops._rank_sum import sum_in_rank_order
from tdkernels.ops.group_gemm_kernel import planes_of, weight_layout
from tdkernels.ops.moe_ag_gemm_kernel import plan_fields, product_constants
from tdkernels.ops.moe_route_kernel import TILE_WORDS, TILES, chunk_at_turn
from tdkernels.symm import get_workspace

_BLOCK_TOKENS, _BLOCK_COLUMNS = 16, 512  # of a piece that adds up
_ALIGN = tl.constexpr(16)  # bytes, to a multiple of which a rank's sums are rounded up


@td.jit
def _sums_before(group, ranks, full, last):
    """How many pieces that add up the groups before this one have: ``last`` for each last chunk, ``full`` for others.

    Group 0 is the last turn of moe_route_kernel, group 1 the one before it, and so on.
    """
    others = ranks - 1
    return tl.minimum(group, others) * last + tl.maximum(group - others, 0) * full


@td.jit
def _sum_of_choices(
    out_ptr, rows_ptr, weights_ptr, tokens, there, columns, inside, N,
    CHOICES: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each token's rows of the product, weighted and added up in fp32; nothing for choices without a row."""
    total = tl.full((BLOCK_TOKENS, BLOCK_COLUMNS), 0.0, tl.float32)
    for j in tl.static_range(CHOICES):
        choice = tokens.to(tl.int64) * CHOICES + j
        row = tl.load(rows_ptr + choice, mask=there, other=-1)
        at = row[:, None].to(tl.int64) * N + columns[None, :]
        part = td.to_float32(tl.load(out_ptr + at, mask=(row >= 0)[:, None] & inside[None, :], other=0.0))
        if weights_ptr is not None:
            part *= tl.load(weights_ptr + choice, mask=there, other=0.0)[:, None]
        total += part
    return total


@td.jit
def _add_up(
    ctx, out_ptr, rows_ptr, weights_ptr, z_ptr, half, signal, turn, piece, chunk_rows, M_shard, N,
    CHOICES: tl.constexpr, RANKS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Piece number ``piece`` of those that add up the tokens of a turn; all of their tiles have been computed."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    ELEM_BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    me = td.rank(ctx)
    owner, chunk = chunk_at_turn(turn, me, RANKS)
    owner = tl.where(turn == 0, me, owner)
    first = tl.where(turn == 0, 0, chunk * chunk_rows)
    blocks = (N + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    of_shard = (M_shard + BLOCK_TOKENS - 1) // BLOCK_TOKENS * blocks
    number = first // BLOCK_TOKENS * blocks + piece  # among the pieces of the owner's tokens
    local = first + piece // blocks * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    columns = piece % blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    there, inside = local < M_shard, columns < N
    total = _sum_of_choices(
        out_ptr, rows_ptr, weights_ptr, owner * M_shard + local, there, columns, inside, N,
        CHOICES, BLOCK_TOKENS, BLOCK_COLUMNS,
    )  # fmt: skip
    offs = local[:, None].to(tl.int64) * N + columns[None, :]
    mask = there[:, None] & inside[None, :]
    shard_bytes = (tl.cast(M_shard, tl.int64) * N * ELEM_BYTES + _ALIGN - 1) // _ALIGN * _ALIGN
    if owner != me:
        to = td.pointer_to(td.data_at(ctx, half, owner) + me * shard_bytes, DTYPE)
        tl.store(to + offs, td.from_float32(total, DTYPE), mask=mask)
        # waiter: the owner's piece that adds up the same tokens and columns
        td.notify(ctx, td.signal_at(ctx, half, me * of_shard + number), owner, signal, PASSES_ON=True)
    else:
        if RANKS > 1:
            # producer: the same piece of every peer
            td.wait_plan_all(ctx, td.signal_at(ctx, half, number), of_shard, signal)
        total = sum_in_rank_order(td.data_at(ctx, half, me), shard_bytes, offs, mask, total, me, RANKS, DTYPE)
        tl.store(z_ptr + offs, td.from_float32(total, DTYPE), mask=mask)


# Compiled once for a tile, a number of ranks and of choices, whatever the shape and plan.
@td.jit(do_not_specialize=[
    "M_shard", "R", "N", "K", "stride_plane", "stride_w", "plan", "chunk_rows", "lag", "group_m", "num_turns",
])  # fmt: skip
def moe_gemm_rs_kernel(
    ctx, h_ptr, h_desc, w_ptr, w_desc, rows_ptr, weights_ptr, table_ptr, facts_ptr, done_ptr, out_ptr, z_ptr,
    M_shard, R, N, K, stride_plane, stride_w, plan, chunk_rows, lag, group_m, num_turns,
    TURNS: tl.constexpr, CHOICES: tl.constexpr, RANKS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ELEM_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN_K: tl.constexpr, TMA_W: tl.constexpr, W_IS_KN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """z [M_shard, N] = our tokens' sums, over ranks and choices, of weight * h[row of the choice] @ w[expert].T.

    ``done_ptr``: for each turn how many of its tiles have been computed; zeros at first.
    """
    N = as_aligned(N, ALIGNED)
    K = as_aligned(K, ALIGNED)
    stride_plane = as_aligned(stride_plane, ALIGNED)
    stride_w = as_aligned(stride_w, ALIGNED)
    me = td.rank(ctx)
    epoch = td.epoch(ctx) + 1
    half = (epoch % 2).to(tl.int32)
    signal = (epoch << 8) | plan
    tiles = tl.load(facts_ptr + TILES)
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N

    # Where in the list of pieces each group, that is the turns backwards, begins to be added up.
    groups = tl.arange(0, TURNS)
    of_group = groups < num_turns
    needed = tl.load(facts_ptr + 1 + num_turns - 1 - groups, mask=of_group, other=0)
    blocks = (N + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    num_chunks = (M_shard + chunk_rows - 1) // chunk_rows
    full = chunk_rows // BLOCK_TOKENS * blocks
    last = (M_shard - (num_chunks - 1) * chunk_rows + BLOCK_TOKENS - 1) // BLOCK_TOKENS * blocks
    begins = needed * tiles_n + lag + _sums_before(groups, RANKS, full, last)
    begins = tl.where(of_group, begins, 0x7FFFFFFF)
    own = (M_shard + BLOCK_TOKENS - 1) // BLOCK_TOKENS * blocks
    pieces = tiles * tiles_n + lag + _sums_before(num_turns - 1, RANKS, full, last) + own
    undone = tl.full((), 0, tl.int32) + num_turns  # from this turn on all tiles are known to be computed

    piece = td.ticket_of(td.take_ticket(ctx))
    while piece < pieces:
        group = td.sum_of((begins <= piece).to(tl.int32), 0) - 1
        within = piece - td.sum_of(tl.where(groups == group, begins, 0), 0)
        size = tl.where(group == num_turns - 1, own, tl.where(group < RANKS - 1, last, full))
        if (group >= 0) & (within < size):
            turn = num_turns - 1 - group
            for earlier in range(turn, undone):
                # producer: the programs of this rank that compute the turn's tiles
                expected = tl.load(facts_ptr + 1 + num_turns + earlier) * tiles_n
                td.wait(ctx, done_ptr + earlier, expected, me, SCOPE="gpu")
            undone = tl.minimum(undone, turn)
            _add_up(
                ctx, out_ptr, rows_ptr, weights_ptr, z_ptr, half, signal, turn, within, chunk_rows, M_shard, N,
                CHOICES, RANKS, BLOCK_TOKENS, BLOCK_COLUMNS,
            )  # fmt: skip
            answer = td.take_ticket(ctx)
        else:
            tile = piece - _sums_before(group + 1, RANKS, full, last)
            if tile < tiles * tiles_n:
                number, pid_n = swizzle(tile, tiles, tiles_n, group_m)
                entry = table_ptr + (tiles - 1 - number) * TILE_WORDS
                expert, row, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
                turn = tl.load(entry + 3)
                col = pid_n * BLOCK_N
                offs_m = row + tl.arange(0, BLOCK_M)
                end = row + count
                h_at = h_ptr.to(tl.int64) + tl.minimum(offs_m, end - 1).to(tl.int64) * K * ELEM_BYTES
                acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
                acc, _ = grouped_tile(
                    acc, acc, h_at, h_desc, row, offs_m < end,
                    w_ptr, w_desc, expert, col, stride_plane, stride_w, N, K, h_ptr.dtype.element_ty,
                    BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, TMA_W, TMA_W, W_IS_KN, False, PRECISION,
                )  # fmt: skip
                answer = td.take_ticket(ctx)
                product = td.from_float32(acc, out_ptr.dtype.element_ty)
                store_rows(out_ptr, product, offs_m, col + tl.arange(0, BLOCK_N), end, N)
                # waiter: the pieces of this rank that add up the turn's tokens
                td.add_release(done_ptr + turn, tl.full((), 1, tl.int64), SCOPE="gpu")
            else:
                answer = td.take_ticket(ctx)
        piece = td.ticket_of(answer)
    td.finish(ctx)


def launch(h, w, routing, weights, config):
    """z [M / W, N]: our tokens' sums, over ranks and choices, of weight * h[row] @ w[expert].T.

    weights: [M, k] fp32 of all ranks' choices, or None for 1
    """
    h = _operands.rows_contiguous(h)
    total, k = h.shape
    rows, tiles = routing.tokens, config.tiles
    w, *strides, is_kn = weight_layout(w)
    planes, n = planes_of(w, None)
    tiling = routing.tiling(tiles.block_m)
    desc, constants = product_constants(h, w, planes, n, strides, is_kn, None, tiles)
    h_desc = None
    if constants["TMA_W"]:
        h_desc = _operands.rows_descriptor(h, 1, total, total * k, tiles.block_m, tiles.block_k)
    z, out = h.new_empty(rows, n), h.new_empty(total, n)
    done = torch.zeros(routing.num_turns, dtype=torch.int64, device=h.device)
    block_tokens, block_columns = _BLOCK_TOKENS, min(triton.next_power_of_2(n), _BLOCK_COLUMNS)
    of_shard = -(-rows // block_tokens) * -(-n // block_columns)
    fields = {**plan_fields(h, w, routing, None, config), "M/W": rows, "weighted": weights is not None}
    workspace = get_workspace(routing.group, h.device, "moe_gemm_rs")
    plan = workspace.prepare(
        "moe_gemm_rs", fields, routing.world_size * (rows * n * h.element_size() + _ALIGN.value),
        routing.world_size * of_shard,
    )  # fmt: skip
    workspace.before_launch()
    tiles_n = -(-n // tiles.block_n)
    programs = min(
        tiling.most * tiles_n + routing.world_size * of_shard, _device.resident_programs(h.device, tiles, h.dtype)
    )
    lag = min(2 * programs, tiling.most * tiles_n)  # so that tiles are done when they are added up
    moe_gemm_rs_kernel[(programs,)](
        workspace.ctx, h, h_desc, w, desc, routing.rows, weights, tiling.table, tiling.facts, done, out, z,
        rows, total, n, k, *strides, plan, routing.chunk_rows, lag, tiles.group_m, routing.num_turns,
        TURNS=triton.next_power_of_2(routing.num_turns), CHOICES=routing.num_choices, RANKS=routing.world_size,
        BLOCK_TOKENS=block_tokens, BLOCK_COLUMNS=block_columns, ELEM_BYTES=h.element_size(), **constants,
    )  # fmt: skip
    workspace.after_launch()
    return z
