"""Push this rank's shard to all peers, in a partition of one or two warps of each of several programs."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.context import data_at, flag_at, num_ranks, rank, signal_at
from tdkernels.lang.gluon_profile import mark_by_warps
from tdkernels.lang.gluon_signals import (
    is_last_arriver_of_warps,
    item_of_warps,
    notify_all_by_warps,
    notify_by_warps,
    request_by_warps,
)
from tdkernels.lang.memory import pointer_to
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.common.tile_config import PUSHED_BYTES, PUSHED_ROW_BYTES, PUSHED_ROWS

# 64-bit words in flight: as many as fit in the registers
_ROWS, _WORDS = gl.constexpr(PUSHED_ROWS), gl.constexpr(PUSHED_ROW_BYTES // 8)
_SCALES = gl.constexpr(1024)  # in flight
_PART_BYTES, _ROW_BYTES = gl.constexpr(PUSHED_BYTES), gl.constexpr(PUSHED_ROW_BYTES)


@gluon.jit
def _copy(ctx, half, offset, src, first, row_bytes, rows, num_bytes, WARPS: gl.constexpr):
    """Copy ``num_bytes`` of each of several rows from an address to ``offset`` in the data of each rank.

    They are read once. All sizes are multiples of 16.

    first: 0 for all ranks, from this one on, 1 without this one
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [WARPS, 1], [1, 0])
    rows_of_block = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, layout))
    words_of_row = gl.arange(0, _WORDS, layout=gl.SliceLayout(0, layout))
    num_words, stride = num_bytes // 16 * 2, row_bytes // 16 * 2
    me, ranks = rank(ctx), num_ranks(ctx)
    for row in range(0, rows, _ROWS):
        for word in range(0, num_words, _WORDS):
            there = (row + rows_of_block < rows)[:, None] & (word + words_of_row < num_words)[None, :]
            offs = (row + rows_of_block).to(gl.int64)[:, None] * stride + (word + words_of_row)[None, :]
            words = gl.load(pointer_to(src, tl.int64) + offs, mask=there)
            for step in range(first, ranks):
                peer = me + step
                # A remainder takes more registers, which the loop of moe_ag_gemm that gathers rows then lacks.
                peer = gl.where(peer < ranks, peer, peer - ranks)
                dst = data_at(ctx, half, peer) + offset
                gl.store(pointer_to(dst, tl.int64) + offs, words, mask=there)


@gluon.jit
def _copy_scales(dst, src, count, WARPS: gl.constexpr):
    """Copy ``count`` scales from one address to another."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    for first in range(0, count, _SCALES):
        offs = first + gl.arange(0, _SCALES, layout=layout)
        scales = gl.load(pointer_to(src, tl.float32) + offs, mask=offs < count)
        gl.store(pointer_to(dst, tl.float32) + offs, scales, mask=offs < count)


@gluon.jit
def _push_scales(ctx, half, shard, scales, chunk, first, WARPS: gl.constexpr):
    """Push the scales of a chunk. first: as for ``_copy``"""
    rows, _, chunk_rows, _, _, _, _ = shard
    me, ranks = rank(ctx), num_ranks(ctx)
    ptr, offset, per_row = scales
    begin = chunk * chunk_rows
    skipped = begin.to(tl.int64) * per_row * 4
    for step in range(first, ranks):
        place = data_at(ctx, half, (me + step) % ranks) + offset + skipped
        _copy_scales(place, ptr.to(tl.int64) + skipped, gl.minimum(chunk_rows, rows - begin) * per_row, WARPS)


@gluon.jit
def _push_part(
    ctx, x, half, signal, shard, scales, chunk, slice_id, part, sizes, COPY_OWN: gl.constexpr, WARPS: gl.constexpr,
    DIVIDE_ROWS: gl.constexpr, NOTIFY_OWN: gl.constexpr,
):
    """Push a part of a slice of a chunk to all peers.

    The scales of the chunk go with the first part of its first slice. When a tile loads them, perhaps only that slice
    has arrived. The program that pushes the last part sets the signals.

    sizes: those of ``parts_of_slice``
    """
    rows, row_bytes, chunk_rows, slice_bytes, slices, num_chunks, slot_bytes = shard
    part_rows, part_bytes, across, parts = sizes
    me = rank(ctx)
    row = chunk * chunk_rows + part // across * part_rows
    end = gl.minimum(gl.minimum(row + part_rows, (chunk + 1) * chunk_rows), rows)
    begin = row.to(tl.int64) * row_bytes + slice_id * slice_bytes
    num_bytes = gl.minimum(slice_bytes, row_bytes - slice_id * slice_bytes)
    if DIVIDE_ROWS:
        byte = part % across * part_bytes
        begin += byte
        num_bytes = gl.minimum(part_bytes, num_bytes - byte)
    first: gl.constexpr = 0 if COPY_OWN else 1
    _copy(ctx, half, me.to(tl.int64) * slot_bytes + begin, x + begin, first, row_bytes, end - row, num_bytes, WARPS)
    if scales[0] is not None:
        if (part == 0) & (slice_id == 0):
            _push_scales(ctx, half, shard, scales, chunk, first, WARPS)
    flag = flag_at(ctx, chunk * slices + slice_id)
    word = signal_at(ctx, half, (me * num_chunks + chunk) * slices + slice_id)
    if is_last_arriver_of_warps(flag, parts, WARPS):
        # waiter: the peer's load_partition (ag_gemm), or its gather_partition (moe_ag_gemm)
        for first_peer in range(0, num_ranks(ctx), 32 * WARPS):
            notify_all_by_warps(ctx, word, signal, WARPS, first_peer)
        if NOTIFY_OWN:  # waiter: this rank's load_partition
            notify_by_warps(ctx, word, 1, 1, me, signal, WARPS)


@gluon.jit
def parts_of_slice(chunk_rows, slice_bytes, ranks, slices, num_workers, DIVIDE_ROWS: gl.constexpr):
    """Return (rows of a part, bytes of each row in a part, parts of a row, parts of a slice of a chunk).

    ``num_parts`` of the launchers computes the same.

    slices: number of slices of all chunks
    """
    rows = _PART_BYTES // (slice_bytes * gl.maximum(ranks - 1, 1)) // _ROWS * _ROWS
    rows = gl.maximum(rows, _ROWS)
    parts = (chunk_rows + rows - 1) // rows
    if DIVIDE_ROWS:
        across = gl.maximum(num_workers // gl.maximum(slices * parts, 1), 1)
        part_bytes = ((slice_bytes + across - 1) // across + _ROW_BYTES - 1) // _ROW_BYTES * _ROW_BYTES
        across = (slice_bytes + part_bytes - 1) // part_bytes
        return rows, part_bytes, across, parts * across
    else:
        return rows, slice_bytes, 1, parts


@gluon.jit
def push_partition(
    ctx, x, half, signal, shard, scales, program, num_workers, COPY_OWN: gl.constexpr, WARPS: gl.constexpr = 2,
    trace_ptr=None, first_piece=0, DIVIDE_ROWS: gl.constexpr = False, NOTIFY_OWN: gl.constexpr = False,
):
    """Push this rank's shard, together with this partition of programs 0 to ``num_workers`` - 1.

    A slice of a chunk is pushed to all peers before the next one, so that all peers can multiply it. The parts come
    from queue 1, so that those of these programs that have started push all of them.

    x: address of the shard
    shard: (rows, bytes of a row, rows of a chunk, bytes of a slice of a row, slices of a row, number of chunks, bytes
        of a slot)
    scales: (pointer to the scales of the shard or None, their offset in a half, scales of a row)
    COPY_OWN: copy the shard to this rank's slot, too, and the scales to their place in this rank's half
    NOTIFY_OWN: set the signals of the copy, too
    DIVIDE_ROWS: whether rows are divided if there are fewer parts than these programs; the loop needs more registers
    first_piece: of these work items in a trace
    """
    _, _, chunk_rows, slice_bytes, slices, num_chunks, _ = shard
    ranks = num_ranks(ctx)
    sizes = parts_of_slice(chunk_rows, slice_bytes, ranks, num_chunks * slices, num_workers, DIVIDE_ROWS)
    parts = sizes[3]
    num_items = num_chunks * slices * parts
    if not COPY_OWN:
        num_items = gl.where(ranks > 1, num_items, 0)
    # In a void launch, a peer may still read the data of an earlier launch.
    pushes = (program < num_workers) & (signal != 0)
    if pushes:
        item = item_of_warps(request_by_warps(ctx, 1, WARPS))
        while item < num_items:
            answer = request_by_warps(ctx, 1, WARPS)
            trace = trace_ptr, first_piece + item
            mark_by_warps(trace, "starts", WARPS)
            mark_by_warps(trace, "pushes", WARPS, ALL_PEERS)
            chunk, slice_id = item // parts // slices, item // parts % slices
            _push_part(
                ctx, x, half, signal, shard, scales, chunk, slice_id, item % parts, sizes, COPY_OWN, WARPS,
                DIVIDE_ROWS, NOTIFY_OWN,
            )
            mark_by_warps(trace, "ends", WARPS)
            item = item_of_warps(answer)
