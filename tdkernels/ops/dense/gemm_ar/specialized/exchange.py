"""Work items of ``gemm_ar_specialized_kernel`` that add partials and send their sum, or that receive a sum of a peer.

They are in one queue, in this order for each bundle: the SPLIT parts of this rank's tile, which are added; then the
PARTS parts of each tile of a peer in the bundle ``delay`` bundles before, which are received. By then the sums have
usually arrived.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.context import data_at, flag_at, signal_at
from tdkernels.lang.gluon_profile import mark_by_warps
from tdkernels.lang.gluon_signals import (
    is_last_arriver_of_warps,
    item_of_warps,
    notify_all_by_warps,
    request_by_warps,
    wait_for_rank,
    wait_for_ranks,
)
from tdkernels.lang.memory import pointer_to
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.common.specialized.layout import BLOCK_M, BLOCK_N
from tdkernels.ops.dense.direct_specialized.add import add_part, rows_and_columns, store_rows
from tdkernels.ops.dense.gemm_ar.specialized.places import grid_of, place_of

_RECEIVED_ROWS = gl.constexpr(8)  # rows of a tile that two warps copy at a time: 128 bytes of each thread


@gluon.jit
def _add(
    call, bundles, bundle, part, place, trace, ROWS: gl.constexpr, SPLIT: gl.constexpr, RANKS: gl.constexpr,
    HAS_BIAS: gl.constexpr, WARPS: gl.constexpr,
):
    """Add one of SPLIT row blocks of this rank's tile of a bundle. The last of them sets the signal of the sum."""
    ctx, problem, z_ptr, bias_ptr, _, _, half, signal, me, _ = call
    tile_bytes: gl.constexpr = BLOCK_M * BLOCK_N * (z_ptr.dtype.element_ty.primitive_bitwidth // 8)
    per_source = 2 * bundles
    slot = me * per_source + bundles + bundle  # of the sum
    mark_by_warps(trace, "waits", WARPS, ALL_PEERS)
    # producer: the partition that sends the tile, on every rank
    wait_for_ranks(ctx, signal_at(ctx, half, bundle), per_source, signal, WARPS)
    mark_by_warps(trace, "sums", WARPS, ALL_PEERS)
    partials = data_at(ctx, half, me) + bundle.to(gl.int64) * tile_bytes
    sums, offset = (), slot.to(gl.int64) * tile_bytes
    for step in gl.static_range(1, RANKS):
        sums = sums + (data_at(ctx, half, (me + step) % RANKS) + offset,)  # type: ignore[assignment]
    add_part(
        partials, per_source.to(gl.int64) * tile_bytes, sums, z_ptr, bias_ptr, place, part, problem[0], problem[1],
        ROWS, SPLIT, RANKS, HAS_BIAS, WARPS,
    )
    if is_last_arriver_of_warps(flag_at(ctx, bundle), SPLIT, WARPS):
        # waiter: the items of every peer that receive the tile
        notify_all_by_warps(ctx, signal_at(ctx, half, slot), signal, WARPS)


@gluon.jit
def _receive(call, bundles, bundle, owner, part, place, trace, PARTS: gl.constexpr, WARPS: gl.constexpr):
    """Copy one of PARTS row blocks of the sum of a peer's tile from this rank's buffer to z."""
    ctx, problem, z_ptr, _, _, _, half, signal, me, _ = call
    dtype: gl.constexpr = z_ptr.dtype.element_ty
    tile_bytes: gl.constexpr = BLOCK_M * BLOCK_N * (dtype.primitive_bitwidth // 8)
    part_rows: gl.constexpr = BLOCK_M // PARTS
    ROWS: gl.constexpr = _RECEIVED_ROWS * WARPS // 2
    slot = owner * 2 * bundles + bundles + bundle
    mark_by_warps(trace, "waits", WARPS, owner)
    # producer: the owner's items that add the tile
    wait_for_rank(ctx, signal_at(ctx, half, slot), signal, owner, WARPS)
    mark_by_warps(trace, "receives", WARPS, owner)
    tile = pointer_to(data_at(ctx, half, me) + slot.to(gl.int64) * tile_bytes, dtype)
    row, col = place
    rows, columns = rows_and_columns(ROWS, WARPS)
    for first in range(part * part_rows, (part + 1) * part_rows, ROWS):
        values = gl.load(tile + (first + rows)[:, None] * BLOCK_N + columns[None, :], eviction_policy="evict_first")
        store_rows(z_ptr, values, row + first + rows, col + columns, problem[0], problem[1])


@gluon.jit
def _work_of(item, bundles, delay, me, SPLIT: gl.constexpr, PARTS: gl.constexpr, RANKS: gl.constexpr):
    """Return (whether the item adds, bundle, owner of the tile, part of the tile).

    delay: number of bundles by which tiles are received later than added; at most ``bundles``
    """
    received: gl.constexpr = (RANKS - 1) * PARTS
    rest = item - delay * SPLIT
    # Items before ``delay`` bundles only add. Then each bundle has both kinds. The last ones are only received.
    both = rest < (bundles - delay) * (SPLIT + received)
    period = gl.maximum(rest, 0) // (SPLIT + received)
    number = gl.maximum(rest, 0) % (SPLIT + received)
    last = gl.maximum(rest - (bundles - delay) * (SPLIT + received), 0)
    adds = (rest < 0) | (both & (number < SPLIT))
    added = gl.where(rest < 0, item // SPLIT, delay + period)
    part = gl.where(rest < 0, item % SPLIT, number)
    taken = gl.where(both, period, bundles - delay + last // received)
    number = gl.where(both, number - SPLIT, last % received)
    bundle = gl.where(adds, added, taken)
    owner = gl.where(adds, me, (me + 1 + number // PARTS) % RANKS)
    return adds, bundle, owner, gl.where(adds, part, number % PARTS)


@gluon.jit
def exchange_partition(
    call, ROWS: gl.constexpr, SPLIT: gl.constexpr, PARTS: gl.constexpr, RANKS: gl.constexpr, HAS_BIAS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Add and receive tiles.

    call: (ctx, problem as for ``place_of``, pointer to z, pointer to the bias, number of work items, delay as for
        ``_work_of``, half, signal, rank, trace buffer or None)
    ROWS: as for ``add_part``
    """
    ctx, problem, _, _, num_items, delay, _, _, me, trace_ptr = call
    tiles_m, tiles_n = grid_of(problem)
    tiles = tiles_m * tiles_n
    bundles = (tiles + RANKS - 1) // RANKS
    item = item_of_warps(request_by_warps(ctx, 1, WARPS))
    while item < num_items:
        answer = request_by_warps(ctx, 1, WARPS)
        trace = trace_ptr, bundles * RANKS + item
        mark_by_warps(trace, "starts", WARPS)
        adds, bundle, owner, part = _work_of(item, bundles, delay, me, SPLIT, PARTS, RANKS)
        tile = bundle * RANKS + owner
        if tile < tiles:
            place = place_of(tile, problem)
            if adds:
                _add(call, bundles, bundle, part, place, trace, ROWS, SPLIT, RANKS, HAS_BIAS, WARPS)
            else:
                _receive(call, bundles, bundle, owner, part, place, trace, PARTS, WARPS)
        mark_by_warps(trace, "ends", WARPS)
        item = item_of_warps(answer)
