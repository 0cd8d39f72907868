"""Kernel of ep_moe that dispatches tokens to their experts and multiplies them there, both concurrently.

Programs fetch work items from an atomic queue. The list is ordered by local expert index, the same on all ranks: the
sends to expert 0 of every rank (including this one), then the sends to expert 1 interleaved with the tiles of this
rank's expert 0, and so on. Sending is ``AHEAD`` and a half experts ahead of multiplying. A row is stored directly at
its place among the rows of its expert, in symmetric memory, and is multiplied from there. There is no separate receive,
sort or copy. In return a token is sent once for each of its experts, not once for each rank.

The last program of ``source`` that sends to an expert sets signal number ``source * E / W + expert`` of a half. The
waiters are the tiles of the expert, and one last work item that waits for all signals (invariant 3: no rank finishes a
call that another rank has not begun). A tile waits only for items that come earlier in the list of every rank
(invariant 1).

Each row is sent with its routing weight and its ``origin``, ``source << 32 | assignment``, which the combine needs.

With ``h_ptr`` the rows that are sent are gradients of y, and the outputs are the weighted gradients of rows h. With
``kept_ptr`` the received rows are copied there for the weight gradient; each tile copies a part of the columns.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.gemm_tile import as_aligned, store_rows, swizzle
from tdkernels.ops.common.work_interleaving import split_piece
from tdkernels.ops.experts.dispatch.layout import VALID, counts_of, rows_at, summary_at
from tdkernels.ops.experts.ep_moe.kernel_sort import first_of_expert
from tdkernels.ops.experts.grouped_gemm.kernel import store_product
from tdkernels.ops.experts.grouped_gemm.tile import grouped_tile

_KEPT_COLUMNS = tl.constexpr(64)
_GRADIENT_COLUMNS = tl.constexpr(64)  # of a tile that are stored at a time


class Sending(NamedTuple):
    """Parameters of the sends: the constexpr argument ``SENDING`` of the kernel.

    Args:
        ahead: Number of experts by which sending is ahead of multiplying.
        rows: Rows per work item, a power of two.
        columns: Columns that a program moves at a time, a power of two.
        choices: Rows per token (top-k).
    """

    ahead: int
    rows: int
    columns: int
    choices: int


# ---- sending ----


@td.jit
def _blocks(count, BLOCK_ROWS: tl.constexpr):
    """Return the number of work items that send ``count`` rows. It is at least one, to set the signal."""
    return tl.maximum((count + BLOCK_ROWS - 1) // BLOCK_ROWS, 1)


@td.jit
def _piece_to_send(counts, number, expert, me, EACH: tl.constexpr, RANKS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Return (destination rank, global expert, block index, rows for the expert) of a send item. Peers come first."""
    to, block, rows = me, number, tl.full((), 0, tl.int32)
    left = number
    for step in tl.static_range(RANKS):
        dest = (me + 1 + step) % RANKS
        count = tl.load(counts + dest * EACH + expert)
        blocks = _blocks(count, BLOCK_ROWS)
        is_here = (left >= 0) & (left < blocks)
        to, block, rows = tl.where(is_here, dest, to), tl.where(is_here, left, block), tl.where(is_here, count, rows)
        left -= blocks
    return to, to * EACH + expert, block, rows


@td.jit
def _send(
    ctx, half, signal, me, to, expert, local, block, count, x_ptr, weights_ptr, tables, order_ptr, slot_rows, K,
    GRADIENT: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr, SENDING: tl.constexpr, ALIGNED: tl.constexpr,
):
    """Store a block of this rank's ``count`` rows for an expert at its rank. The last block sets the signal.

    Return the requested work item, for ``await_work_item``. It is requested while the stores are in flight.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    counts = counts_of(tables, me, EXPERTS, RANKS)
    row = block * SENDING.rows + tl.arange(0, SENDING.rows)
    there = row < count
    choice = tl.load(order_ptr + first_of_expert(counts, expert, EXPERTS) + row, mask=there, other=0)
    place = tl.load(rows_at(tables, EXPERTS, RANKS) + expert) + row
    data = td.data_at(ctx, half, to)
    row_bytes = tl.cast(K, tl.int64) * (DTYPE.primitive_bitwidth // 8)
    source = td.pointer_to(x_ptr.to(tl.int64) + (choice // SENDING.choices).to(tl.int64) * row_bytes, DTYPE, ALIGNED)
    dest = td.pointer_to(data + place.to(tl.int64) * row_bytes, DTYPE, ALIGNED)
    for first in range(0, K, SENDING.columns):
        columns = first + tl.arange(0, SENDING.columns)
        mask = there[:, None] & (columns < K)[None, :]
        values = tl.load(source[:, None] + columns[None, :], mask=mask)
        tl.store(dest[:, None] + columns[None, :], values, mask=mask)
    if not GRADIENT:
        origins, weights = _beside_rows(data, slot_rows, row_bytes)
        tl.store(origins + place, (me.to(tl.int64) << 32) + choice, mask=there)
        tl.store(weights + place, tl.load(weights_ptr + choice, mask=there, other=0.0), mask=there)
    answer = td.fetch_work_item(ctx)
    if td.is_last_arriver(td.flag_at(ctx, expert), _blocks(count, SENDING.rows)):
        # waiter: the tiles of the expert
        td.notify(ctx, td.signal_at(ctx, half, me * (EXPERTS // RANKS) + local), to, signal)
    return answer


@td.jit
def _beside_rows(data, slot_rows, row_bytes):
    """Return pointers to the origins and the routing weights of the rows of a half."""
    origins = data + (tl.cast(slot_rows, tl.int64) * row_bytes + 15) // 16 * 16
    weights = origins + tl.cast(slot_rows, tl.int64) * 8
    return origins.to(tl.pointer_type(tl.int64)), weights.to(tl.pointer_type(tl.float32))


# ---- multiplying ----


@td.jit
def _keep_rows(
    x_at, kept_ptr, offs_m, past, pid_n, tiles_n, K, DTYPE: tl.constexpr, ALIGNED: tl.constexpr
):
    """Copy every ``tiles_n``-th block of columns of a tile's rows, starting with block ``pid_n``."""
    for first in range(pid_n * _KEPT_COLUMNS, K, tiles_n * _KEPT_COLUMNS):
        columns = first + tl.arange(0, _KEPT_COLUMNS)
        mask = (offs_m < past)[:, None] & (columns < K)[None, :]
        rows = tl.load(td.pointer_to(x_at, DTYPE, ALIGNED)[:, None] + columns[None, :], mask=mask)
        tl.store(kept_ptr + offs_m[:, None].to(tl.int64) * K + columns[None, :], rows, mask=mask)


@td.jit
def _store_gradient(
    acc, y_ptr, h_ptr, weighted_ptr, weight, offs_m, end, col, N, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr
):
    """Store WIDTH columns of the gradient of rows h, and of h itself, both scaled by the routing weight of the row.

    Return the contribution of these columns to the dot product of each row's unscaled gradient with its h, fp32
    [BLOCK_M]. It is the gradient of the routing weight.
    """
    if WIDTH > _GRADIENT_COLUMNS:
        # Split into parts: the rows h and the whole accumulator do not fit into the registers together.
        HALF: tl.constexpr = WIDTH // 2
        left, right = acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        dots = _store_gradient(left, y_ptr, h_ptr, weighted_ptr, weight, offs_m, end, col, N, BLOCK_M, HALF)
        dots += _store_gradient(right, y_ptr, h_ptr, weighted_ptr, weight, offs_m, end, col + HALF, N, BLOCK_M, HALF)
        return dots
    else:
        dtype: tl.constexpr = y_ptr.dtype.element_ty
        offs_n = col + tl.arange(0, WIDTH)
        mask = (offs_m < end)[:, None] & (offs_n < N)[None, :]
        h = td.to_float32(tl.load(h_ptr + offs_m[:, None].to(tl.int64) * N + offs_n[None, :], mask=mask, other=0.0))
        store_rows(weighted_ptr, td.from_float32(h * weight[:, None], dtype), offs_m, offs_n, end, N)
        store_rows(y_ptr, td.from_float32(acc * weight[:, None], dtype), offs_m, offs_n, end, N)
        return td.sum_of(tl.where(mask, acc, 0.0) * h, 1)


# Compiled once per tile, number of ranks, number of experts and top-k, for all shapes and plans.
@td.jit(do_not_specialize=["R", "slot_rows", "N", "K", "stride_plane", "stride_w", "plan", "group_m"])
def ep_dispatch_gemm_kernel(
    ctx, x_ptr, weights_ptr, tables, order_ptr, splits_ptr, buffer_desc, w_ptr, w_desc,
    y_ptr, pre_ptr, kept_ptr, origins_ptr, row_weights_ptr, h_ptr, weighted_ptr, dots_ptr,
    R, slot_rows, N, K, stride_plane, stride_w, plan, group_m,
    EXPERTS: tl.constexpr, RANKS: tl.constexpr, SENDING: tl.constexpr, PRODUCT: tl.constexpr,
):
    """Compute y [R, N] = act(rows @ w[expert of the row].T) for the received rows of all ranks' x [T, K].

    SENDING is a ``Sending`` and PRODUCT a ``GroupedProduct``. A half of the workspace holds the rows [slot_rows, K],
    their origins and their routing weights. ``origins_ptr`` and ``row_weights_ptr`` [R] are outputs. With ``h_ptr``
    [R, N], ``row_weights_ptr`` is an input instead, and the results of ``_store_gradient`` are stored.
    """
    GRADIENT: tl.constexpr = h_ptr is not None
    AHEAD: tl.constexpr = SENDING.ahead
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    N = as_aligned(N, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_plane = as_aligned(stride_plane, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    EACH: tl.constexpr = EXPERTS // RANKS
    STEPS: tl.constexpr = triton.next_power_of_2(EACH + AHEAD)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    me = td.rank(ctx)
    epoch, half, signal = td.call(ctx, plan)
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    valid = tl.load(summary_at(tables, EXPERTS, RANKS) + VALID)
    counts = counts_of(tables, me, EXPERTS, RANKS)
    # The work list: each step has the sends to its expert, and the tiles of the expert AHEAD steps before.
    step = tl.arange(0, STEPS)
    rows = tl.load(splits_ptr + step - AHEAD, mask=(step >= AHEAD) & (step < EACH + AHEAD), other=0).to(tl.int32)
    tiles = (rows + BLOCK_M - 1) // BLOCK_M * tiles_n
    sends = tl.full((STEPS,), 0, tl.int32)
    for dest in tl.static_range(RANKS):
        count = tl.load(counts + dest * EACH + step, mask=(step < EACH) & (valid > 0), other=0)
        sends += tl.where(step < EACH, _blocks(count, SENDING.rows), 0)
    ends = td.running_sum(tiles + sends, 0)
    last = td.max_of(ends, 0)
    # The list is empty if a peer was missing when the routing was exchanged, because the tables are undefined then. It
    # is also empty if the routing was rejected on all ranks; then the call does not advance the epoch.
    pieces = tl.where(valid > 0, last + 1, 0)

    piece = td.await_work_item(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        if piece == last:
            # producer: every peer's last work item that sends to an expert of this rank
            td.wait_plan_all(ctx, td.signal_at(ctx, half, 0), EACH, signal, count=EACH)
            answer = td.fetch_work_item(ctx)
        else:
            at = td.sum_of((ends <= piece).to(tl.int32), 0)
            of_tiles, of_sends = td.gather_lane(tiles, step, at), td.gather_lane(sends, step, at)
            within = piece - (td.gather_lane(ends, step, at) - of_tiles - of_sends)
            # Sends are interleaved with the first half of the tiles. The second half overlaps the last sends.
            among = (of_tiles + 1) // 2
            is_send, number = split_piece(within, among, of_sends, 0)
            if within >= among + of_sends:
                is_send, number = within < 0, within - of_sends
            if is_send:
                to, expert, block, rows_to_send = _piece_to_send(counts, number, at, me, EACH, RANKS, SENDING.rows)
                answer = _send(
                    ctx, half, signal, me, to, expert, at, block, rows_to_send, x_ptr, weights_ptr, tables, order_ptr,
                    slot_rows, K, GRADIENT, EXPERTS, RANKS, SENDING, PRODUCT.aligned,
                )
            else:
                expert = at - AHEAD
                begin = td.sum_of(tl.where(step < at, rows, 0), 0)
                past = begin + td.gather_lane(rows, step, at)
                pid_m, pid_n = swizzle(number, of_tiles // tiles_n, tiles_n, group_m)
                row, col = begin + pid_m * BLOCK_M, pid_n * BLOCK_N
                offs_m = row + tl.arange(0, BLOCK_M)
                data = td.data_at(ctx, half, me)
                # producer: the last work item of every rank, including this one, that sends to the expert
                td.wait_plan_all(ctx, td.signal_at(ctx, half, expert), EACH, signal, WITH_OWN=True)
                if PRODUCT.use_tma:
                    td.fence_before_tma_load()
                row_bytes = tl.cast(K, tl.int64) * PRODUCT.elem_bytes
                x_at = data + tl.minimum(offs_m, past - 1).to(tl.int64) * row_bytes
                acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
                acc, second = grouped_tile(
                    acc, acc, x_at, buffer_desc, half, row, offs_m < past,
                    w_ptr, w_desc, expert, col, stride_plane, stride_w, N, K, DTYPE, PRODUCT,
                )
                answer = td.fetch_work_item(ctx)
                if GRADIENT:
                    weight = tl.load(row_weights_ptr + offs_m, mask=offs_m < past, other=0.0)
                    dots = _store_gradient(
                        acc, y_ptr, h_ptr, weighted_ptr, weight, offs_m, past, col, N, BLOCK_M, BLOCK_N
                    )
                    # Partial sums of this tile column. ``ep_gemm_combine_kernel`` sums over the tile columns.
                    tl.store(dots_ptr + pid_n.to(tl.int64) * R + offs_m, dots, mask=offs_m < past)
                else:
                    store_product(acc, second, y_ptr, pre_ptr, offs_m, past, col, N, PRODUCT)
                    if pid_n == 0:
                        origins, weights = _beside_rows(data, slot_rows, row_bytes)
                        tl.store(origins_ptr + offs_m, tl.load(origins + offs_m, mask=offs_m < past), offs_m < past)
                        tl.store(row_weights_ptr + offs_m, tl.load(weights + offs_m, mask=offs_m < past), offs_m < past)
                if kept_ptr is not None:
                    _keep_rows(x_at, kept_ptr, offs_m, past, pid_n, tiles_n, K, DTYPE, PRODUCT.aligned)
        piece = td.await_work_item(answer)
    td.finish(ctx, True, (valid != 0).to(tl.int32))
