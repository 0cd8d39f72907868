"""Push this rank's shard to all peers, in a partition of one or two warps of each of several programs."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.context import data_at, flag_at, num_ranks, rank, signal_at
from tdkernels.lang.gluon_profile import mark_by_warps
from tdkernels.lang.gluon_signals import item_of_warps, notify_if_last_arriver, request_by_warps
from tdkernels.lang.memory import pointer_to
from tdkernels.ops.common.tile_config import PUSHED_BYTES

_ROWS, _WORDS = gl.constexpr(4), gl.constexpr(256)  # 64-bit words in flight: as many as fit in the registers
_SCALES = gl.constexpr(1024)  # in flight
_PART_BYTES = gl.constexpr(PUSHED_BYTES)


@gluon.jit
def _copy(dst, src, row_bytes, rows, num_bytes, WARPS: gl.constexpr):
    """Copy ``num_bytes`` of each of several rows from one address to another. All sizes are multiples of 16."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [WARPS, 1], [1, 0])
    rows_of_block = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, layout))
    words_of_row = gl.arange(0, _WORDS, layout=gl.SliceLayout(0, layout))
    num_words, stride = num_bytes // 16 * 2, row_bytes // 16 * 2
    for row in range(0, rows, _ROWS):
        for word in range(0, num_words, _WORDS):
            there = (row + rows_of_block < rows)[:, None] & (word + words_of_row < num_words)[None, :]
            offs = (row + rows_of_block).to(gl.int64)[:, None] * stride + (word + words_of_row)[None, :]
            words = gl.load(pointer_to(src, tl.int64) + offs, mask=there)
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
def _push_part(
    ctx, x, half, signal, shard, scales, chunk, slice_id, part, parts, step, HAS_SIGNAL: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Push one of ``parts`` parts of a slice of a chunk to rank + ``step``.

    The scales of the chunk go with the first part of its first slice. When a tile loads them, perhaps only that slice
    has arrived. The program that pushes the last part sets the signal.
    """
    rows, row_bytes, chunk_rows, slice_bytes, slices, num_chunks, slot_bytes = shard
    me, ranks = rank(ctx), num_ranks(ctx)
    peer = (me + step) % ranks
    part_rows = (chunk_rows + parts - 1) // parts
    row = chunk * chunk_rows + part * part_rows
    end = gl.minimum(gl.minimum(row + part_rows, (chunk + 1) * chunk_rows), rows)
    begin = row.to(tl.int64) * row_bytes + slice_id * slice_bytes
    dst = data_at(ctx, half, peer) + me.to(tl.int64) * slot_bytes + begin
    _copy(dst, x + begin, row_bytes, end - row, gl.minimum(slice_bytes, row_bytes - slice_id * slice_bytes), WARPS)
    if HAS_SIGNAL:
        if scales[0] is not None:
            if (part == 0) & (slice_id == 0):
                ptr, offset, per_row = scales
                first = chunk * chunk_rows
                skipped = first.to(tl.int64) * per_row * 4
                place = data_at(ctx, half, peer) + me.to(tl.int64) * slot_bytes + offset + skipped
                _copy_scales(place, ptr.to(tl.int64) + skipped, gl.minimum(chunk_rows, rows - first) * per_row, WARPS)
        flag = flag_at(ctx, (chunk * slices + slice_id) * (ranks - 1) + step - 1)
        word = signal_at(ctx, half, (me * num_chunks + chunk) * slices + slice_id)
        # waiter: the peer's load_partition (ag_gemm), or its gather_partition (moe_ag_gemm)
        notify_if_last_arriver(ctx, flag, parts, word, peer, signal, WARPS)


@gluon.jit
def push_partition(
    ctx, x, half, signal, shard, scales, program, num_workers, COPY_OWN: gl.constexpr, WARPS: gl.constexpr = 2,
    trace_ptr=None, first_piece=0,
):
    """Push this rank's shard, together with this partition of programs 0 to ``num_workers`` - 1.

    A slice of a chunk is pushed to all peers before the next one, so that all peers can multiply it. The parts come
    from queue 1, so that those of these programs that have started push all of them.

    x: address of the shard
    shard: (rows, bytes of a row, rows of a chunk, bytes of a slice of a row, slices of a row, number of chunks, bytes
        of a slot)
    scales: (pointer to the scales of the shard or None, their offset in a slot, scales of a row), without COPY_OWN
    COPY_OWN: copy the shard to this rank's slot, too
    first_piece: of these work items in a trace
    """
    _, _, chunk_rows, slice_bytes, slices, num_chunks, _ = shard
    others = num_ranks(ctx) - 1
    parts = (chunk_rows * slice_bytes.to(tl.int64) + _PART_BYTES - 1) // _PART_BYTES
    parts = gl.minimum(parts, chunk_rows).to(tl.int32)
    num_pushes = num_chunks * slices * others * parts
    num_items = num_pushes
    if COPY_OWN:
        num_items += num_chunks * slices * parts
    # In a void launch, a peer may still read the data of an earlier launch.
    pushes = (program < num_workers) & (signal != 0)
    if pushes:
        item = item_of_warps(request_by_warps(ctx, 1, WARPS))
        while item < num_items:
            answer = request_by_warps(ctx, 1, WARPS)
            rest, part = item // parts, item % parts
            trace = trace_ptr, first_piece + item
            mark_by_warps(trace, "starts", WARPS)
            if item < num_pushes:
                step, rest = 1 + rest % others, rest // others
                mark_by_warps(trace, "pushes", WARPS, (rank(ctx) + step) % num_ranks(ctx))
                _push_part(
                    ctx, x, half, signal, shard, scales, rest // slices, rest % slices, part, parts, step, True, WARPS
                )
            elif COPY_OWN:
                rest -= num_chunks * slices * others
                mark_by_warps(trace, "copies", WARPS)
                _push_part(
                    ctx, x, half, signal, shard, scales, rest // slices, rest % slices, part, parts, 0, False, WARPS
                )
            mark_by_warps(trace, "ends", WARPS)
            item = item_of_warps(answer)
