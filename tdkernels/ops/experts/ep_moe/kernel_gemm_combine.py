"""Kernel of ep_moe that multiplies rows by the second weights of their experts, and combines the products by token.

The epilogue of a tile stores each row at the rank of its token, in the slot of its assignment, which is given by the
``origin`` that was sent with the row. So products are sent while the next tiles are computed, and are not copied again.
When all tiles of a rank are stored, it sets one signal at every rank, including itself. Then come work items that sum
the weighted assignments of a block of this rank's tokens, in fp32 and in the order of the assignments.

Programs fetch work items from an atomic queue, tiles first. Sums wait for the tiles of all ranks. Tiles do not wait,
and each program accounts for its tiles before it waits (invariant 1). There is at least one sum, so that no rank
finishes a call that another rank has not begun (invariant 3). A row with an invalid origin, because a peer was missing,
is not stored. A void launch stores nothing.

A half of the workspace holds the slots [slots, N] and one fp32 number for each slot (``numbers``: the gradient of the
assignment's routing weight).
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.context import CTX_BASES
from tdkernels.ops.common.gemm_tile import as_aligned
from tdkernels.ops.experts.dispatch.layout import VALID, experts_at, summary_at
from tdkernels.ops.experts.grouped_gemm.tile import grouped_tile, rows_of_groups, tile_of_groups, tiles_of_groups


@td.jit
def _numbers_begin(slots, slot_bytes):
    """Return the byte offset of the numbers in a half."""
    return (tl.cast(slots, tl.int64) * slot_bytes + 15) // 16 * 16


@td.jit
def _slots_of_rows(ctx, half, signal, me, origins_ptr, offs_m, past, slots, slot_bytes, RANKS: tl.constexpr):
    """Return (addresses of the slots of rows, addresses of their numbers).

    The addresses are 0 for rows without a slot, and for all rows of a void launch.
    """
    origin = tl.load(origins_ptr + offs_m, mask=offs_m < past, other=-1)
    source, choice = origin >> 32, origin & 0xFFFFFFFF
    there = (origin >= 0) & (source < RANKS) & (choice < slots) & (signal > 0)
    area = tl.load(ctx + CTX_BASES + source, mask=there, other=0) + td.data_at(ctx, half, me) - td.symm_base(ctx, me)
    slot = tl.where(there, area + choice * slot_bytes, 0)
    return slot, tl.where(there, area + _numbers_begin(slots, slot_bytes) + choice * 4, 0)


@td.jit
def _notify_if_last(ctx, half, me, signal, pieces, done):
    """Account for ``done`` finished tiles of this program. The program that completes the last one signals all ranks.

    This is not done tile by tile: each time it would wait until the stores have reached the peers.
    """
    if td.is_last_arriver(td.flag_at(ctx, 0), pieces, done):
        # waiter: the sums of every rank
        td.notify_all(ctx, td.signal_at(ctx, half, me), signal, CHECK_FAILED=True, WITH_OWN=True)


@td.jit
def _add_up(
    area, tables, weights_ptr, y_ptr, numbers_ptr, piece, num_tokens, valid, slots, slot_bytes, N,
    CHOICES: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):
    """Compute y for a block of this rank's tokens and columns. The first block of columns also copies the numbers."""
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    column_blocks = (N + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    first = piece % column_blocks * BLOCK_COLUMNS
    tokens = piece // column_blocks * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    columns = first + tl.arange(0, BLOCK_COLUMNS)
    there, inside = tokens < num_tokens, columns < N
    experts = experts_at(tables, 0, CHOICES, EXPERTS, RANKS)
    numbers = (area + _numbers_begin(slots, slot_bytes)).to(tl.pointer_type(tl.float32))
    total = tl.full((BLOCK_TOKENS, BLOCK_COLUMNS), 0.0, tl.float32)
    for j in tl.static_range(CHOICES):
        choice = tokens.to(tl.int64) * CHOICES + j
        chosen = there & valid & (tl.load(experts + choice, mask=there, other=-1) >= 0)
        row = td.pointer_to(area + choice * slot_bytes, DTYPE, ALIGNED)
        mask = chosen[:, None] & inside[None, :]
        part = td.to_float32(tl.load(row[:, None] + columns[None, :], mask=mask, other=0.0))
        if weights_ptr is not None:
            part *= tl.load(weights_ptr + choice, mask=chosen, other=0.0)[:, None]
        total += part
        if numbers_ptr is not None:
            if first == 0:
                tl.store(numbers_ptr + choice, tl.load(numbers + choice, mask=chosen, other=0.0), mask=there)
    at = y_ptr + tokens[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(at, td.from_float32(total, DTYPE), mask=there[:, None] & inside[None, :])


# Compiled once per tile, number of ranks, number of experts and top-k, for all shapes and plans.
@td.jit(do_not_specialize=["num_tokens", "R", "slots", "N", "K", "stride_plane", "stride_w", "plan", "group_m"])
def ep_gemm_combine_kernel(
    ctx, h_ptr, h_desc, w_ptr, w_desc, tables, splits_ptr, origins_ptr, dots_ptr, weights_ptr, y_ptr, numbers_ptr,
    num_tokens, R, slots, N, K, stride_plane, stride_w, plan, group_m,
    CHOICES: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, LOCAL: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Compute y [T, N]: for each token of this rank, the sum over its assignments of weight * h[row] @ w[expert].T.

    LOCAL is the number of experts per rank, rounded up to a power of two. ``dots_ptr`` [TILE_COLUMNS, R] is summed over
    the first axis and sent back with the rows, to ``numbers_ptr`` [T * k].
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    N = as_aligned(N, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_plane = as_aligned(stride_plane, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    DTYPE: tl.constexpr = h_ptr.dtype.element_ty
    me = td.rank(ctx)
    epoch, half, signal = td.call(ctx, plan)
    num_tokens = tl.cast(num_tokens, tl.int32)
    valid = tl.load(summary_at(tables, EXPERTS, RANKS) + VALID)
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    slot_bytes = tl.cast(N, tl.int64) * PRODUCT.elem_bytes
    rows = rows_of_groups(splits_ptr, EXPERTS // RANKS, R, LOCAL)
    tiles = tiles_of_groups(rows, tiles_n, BLOCK_M)
    # The work list: tiles, one empty item (so that there is one without tiles too), and sums. It is empty if a peer was
    # missing when the routing was exchanged. If the routing was rejected on all ranks, the sums are zero, and the call
    # does not advance the epoch (see ``ep_combine_kernel``).
    num_tiles = td.sum_of(tiles, 0)
    sums = (num_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS * ((N + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS)
    pieces = tl.where(valid >= 0, num_tiles + 1 + tl.maximum(sums, 1), 0)

    done = tl.full((), 0, tl.int32)  # finished items that are not accounted for yet
    piece = td.await_work_item(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        if piece > num_tiles:
            if done > 0:
                _notify_if_last(ctx, half, me, signal, num_tiles + 1, done)
                done -= done  # 0, of the same type
            if valid > 0:
                # producer: the program of every rank, including this one, that completes its last tile
                td.wait_plan_all(ctx, td.signal_at(ctx, half, 0), 1, signal, WITH_OWN=True)
            _add_up(
                td.data_at(ctx, half, me), tables, weights_ptr, y_ptr, numbers_ptr, piece - num_tiles - 1, num_tokens,
                valid > 0, slots, slot_bytes, N, CHOICES, EXPERTS, RANKS, BLOCK_TOKENS, BLOCK_COLUMNS, PRODUCT.aligned,
            )
            answer = td.fetch_work_item(ctx)
        else:
            if piece < num_tiles:
                expert, begin, past, row, pid_n = tile_of_groups(piece, rows, tiles, tiles_n, group_m, LOCAL, BLOCK_M)
                col = pid_n * BLOCK_N
                offs_m = row + tl.arange(0, BLOCK_M)
                offs_n = col + tl.arange(0, BLOCK_N)
                h_at = h_ptr.to(tl.int64) + tl.minimum(offs_m, past - 1).to(tl.int64) * K * PRODUCT.elem_bytes
                acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
                acc, second = grouped_tile(
                    acc, acc, h_at, h_desc, 0, row, offs_m < past,
                    w_ptr, w_desc, expert, col, stride_plane, stride_w, N, K, DTYPE, PRODUCT,
                )
                slot, number = _slots_of_rows(
                    ctx, half, signal, me, origins_ptr, offs_m, past, slots, slot_bytes, RANKS
                )
                to = td.pointer_to(slot, DTYPE, PRODUCT.aligned)
                mask = (slot != 0)[:, None] & (offs_n < N)[None, :]
                tl.store(to[:, None] + offs_n[None, :], td.from_float32(acc, DTYPE), mask=mask)
                if dots_ptr is not None:
                    if pid_n == 0:
                        total = tl.full((BLOCK_M,), 0.0, tl.float32)
                        for column in range(TILE_COLUMNS):
                            at = dots_ptr + tl.cast(column, tl.int64) * R + offs_m
                            total += tl.load(at, mask=offs_m < past, other=0.0)
                        tl.store(number.to(tl.pointer_type(tl.float32)), total, mask=number != 0)
            done += (valid > 0).to(tl.int32)
            answer = td.fetch_work_item(ctx)
        piece = td.await_work_item(answer)
    if done > 0:
        _notify_if_last(ctx, half, me, signal, num_tiles + 1, done)
    td.finish(ctx, True, (valid != 0).to(tl.int32))


# For tdkernels.sanitizer: a program counts its tiles in ``done`` and releases the stores of all of them at once.
ep_gemm_combine_kernel.program_keeps = "stores"
