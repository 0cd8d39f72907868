"""Kernel of ag_gemm: some programs push this rank's shard to all peers, the others multiply the chunks that arrive.

Rank ``source`` sets signal number ``source * num_chunks + chunk`` of a half when it has stored that chunk of its shard
in this rank's memory. The waiters are the tiles with rows of the chunk. If ranks may run the warp-specialized kernel
(``specialized``), a chunk has SLICES consecutive signals, one for each slice of its columns.

The programs that multiply have a fixed share of the tiles, and one flattened loop over all of them: while a program
stores a tile, the loads of its next tile are in flight. A wait is part of this loop. So the loop has a single main loop
per tile, which reads this rank's rows from x and those of the peers from the buffer. With several weights, the tile
columns of all of them follow one another, and each tile selects its weight. In a round, each of these programs computes
one tile. ``num_late`` of them take part from round ``first_late`` on: they start on the SMs of the programs
that push, when these have finished.

Progress (invariant 1): only the programs that multiply wait, and only for programs that push, on any rank. These have
smaller ids. So a program that pushes does not multiply afterwards.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.signals import NEVER
from tdkernels.ops.collectives.kernel_async_all_gather import push_shard
from tdkernels.ops.common.gemm_tile import as_aligned, gemm_tile, scale_of_row, swizzle, with_bias
from tdkernels.ops.dense.ag_gemm.tile import store_tile


@td.jit
def tile_by_arrival(tile, me, ranks, tiles_m, tiles_n, group_m, chunk_tiles):
    """Return (shard, tile row, tile column): this rank's shard first, then chunks in the order in which they arrive.

    Groups of ``group_m`` tile rows are computed together, so that each part of the weight is read once per group. The
    rows of a group can belong to several chunks and shards.
    """
    own_tiles = tiles_m * tiles_n
    own_m, own_n = swizzle(tile % own_tiles, tiles_m, tiles_n, group_m)
    # place: number of the tile row in the order of arrival
    place, pid_n = swizzle(tl.maximum(tile - own_tiles, 0), tiles_m * (ranks - 1), tiles_n, group_m)
    chunks = (tiles_m + chunk_tiles - 1) // chunk_tiles
    per_chunk = chunk_tiles * (ranks - 1)
    chunk = tl.minimum(place // per_chunk, chunks - 1)
    # The last chunk of a shard may have fewer tile rows.
    height = tl.minimum(tiles_m - chunk * chunk_tiles, chunk_tiles)
    within = place - chunk * per_chunk
    step = within // height + 1
    is_own = tile < own_tiles
    return (
        tl.where(is_own, me, (me + ranks - step) % ranks),
        tl.where(is_own, own_m, chunk * chunk_tiles + within % height),
        tl.where(is_own, own_n, pid_n),
    )


@td.jit
def _rounds(place, tiles, on_time, num_late, first_late):
    """Return (first, last + 1) of the rounds in which a program computes a tile; ``place``: its number in a round."""
    tiles_late = tl.maximum(tiles - first_late * on_time, 0)
    programs = on_time + num_late
    early = tl.minimum(tl.maximum(tiles - place + on_time - 1, 0) // on_time, first_late)
    late = tl.maximum(tiles_late - place + programs - 1, 0) // programs
    return tl.where(place < on_time, 0, first_late), tl.where(place < on_time, early, first_late) + late


@td.jit
def selected(one, other, is_one):
    """Return ``one`` if ``is_one``, otherwise ``other``: pointers or descriptors.

    The compiler turns the branch into a selection.
    """
    found = other
    if is_one:
        found = one
    return found


@td.jit
def _scale_row_bytes(K, PRODUCT: tl.constexpr):
    """Return the bytes of the scales of a row of x."""
    if PRODUCT.scaling == "block":
        return (K + 127) // 128 * 4
    else:
        return 4


@td.jit
def _scale_of_tile(
    ctx, x_scale_ptr, half, offset, source, row, M_shard, K, seen, FIXED_HALF: tl.constexpr, PRODUCT: tl.constexpr,
):
    """Return the pointer to the scales of row ``row`` of the shard of rank ``source``.

    ``offset``: offset in the data of a half of the scales of this shard. ``seen`` is from the wait for its rows.
    """
    if FIXED_HALF:
        return scale_of_row(x_scale_ptr, source * M_shard + row, K, PRODUCT)
    else:
        me = td.rank(ctx)
        gathered = td.consume_token(td.data_at(ctx, half, me) + offset, seen)
        base = tl.where(source == me, x_scale_ptr.to(tl.int64), gathered)
        return scale_of_row(td.pointer_to(base, tl.float32), row, K, PRODUCT)


# Compiled once per tile and SLICES, for all shapes, plans and transports. This makes tuning cheap.
@td.jit(do_not_specialize=[
    "M_shard", "N", "K", "stride_w", "slot_rows", "plan", "num_comm", "chunk_tiles", "group_m", "num_late",
    "first_late", "segment_rows", "N_2", "stride_w_2", "N_3", "stride_w_3",
])
def ag_gemm_kernel(
    ctx, x_ptr, x_desc, gathered_desc, w_ptr, w_desc, bias_ptr, y_ptr, y_desc,
    w_ptr_2, w_desc_2, bias_ptr_2, y_ptr_2, y_desc_2, w_ptr_3, w_desc_3, bias_ptr_3, y_ptr_3, y_desc_3,
    x_scale_ptr, w_scale_ptr,
    M_shard, N, K, stride_w, slot_rows, plan, num_comm, chunk_tiles, group_m, num_late, first_late, segment_rows,
    N_2, stride_w_2, N_3, stride_w_3,
    COPY_WORDS: tl.constexpr, FIXED_HALF: tl.constexpr, STORES: tl.constexpr, PRODUCT: tl.constexpr,
    SLICES: tl.constexpr = 1, trace_ptr=None,
):
    """Compute y = all_gather(x) @ w.T, for x [M_shard, K] and y [M_shard / segment_rows, ranks, segment_rows, N].

    Programs 0 to num_comm - 1 push this rank's shard to the peers. The others compute tiles, in the order of arrival;
    the last num_late of them begin in round first_late.

    w_ptr_2 and w_ptr_3 are further weights, [N_2, K] and [N_3, K], or None. Scaled operands have one weight. The data
    of a half is [ranks, slot_rows, K], followed by the scales of these rows, 1 or ceil(K / 128) for each. With
    FIXED_HALF there are no scales in it, and x_scale_ptr points to those of the rows of all ranks instead of those of
    this rank.

    FIXED_HALF: a ``begin_kernel`` has begun the call. The gathered rows, including this rank's own, stay in half 0 for
    later launches. num_comm may be 0, if the copy engine sends the shards.
    STORES: number of column blocks in which a tile is stored.
    SLICES: number of signals of a chunk. The warp-specialized kernel of another rank may set one after the other.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    K = as_aligned(K, PRODUCT.aligned)
    me = td.rank(ctx)
    ranks = td.num_ranks(ctx)
    if FIXED_HALF:  # after the barrier of an AsyncAllGather, which has counted this call
        half = tl.full((), 0, tl.int32)
        signal = td.signal_of(ctx, td.epoch(ctx), plan)
    else:
        epoch, half, signal = td.call(ctx, plan)
    is_void = td.is_void_for_all(signal)  # a peer may still read the data of an earlier launch
    tiles_m = (M_shard + BLOCK_M - 1) // BLOCK_M
    # The other weights, and their first tile columns.
    w_ptrs, w_descs, bias_ptrs = (w_ptr_2, w_ptr_3), (w_desc_2, w_desc_3), (bias_ptr_2, bias_ptr_3)
    y_ptrs, y_descs = (y_ptr_2, y_ptr_3), (y_desc_2, y_desc_3)
    sizes, strides = (N_2, N_3), (stride_w_2, stride_w_3)
    starts_2 = (N + BLOCK_N - 1) // BLOCK_N
    tiles_n = starts_2
    if w_ptr_2 is not None:
        tiles_n += (N_2 + BLOCK_N - 1) // BLOCK_N
    starts = (starts_2, tiles_n)
    if w_ptr_3 is not None:
        tiles_n += (N_3 + BLOCK_N - 1) // BLOCK_N
    num_chunks = (tiles_m + chunk_tiles - 1) // chunk_tiles
    row_bytes = tl.cast(K, tl.int64) * PRODUCT.elem_bytes
    slot_bytes = slot_rows * row_bytes
    scales = None
    row_scales = _scale_row_bytes(K, PRODUCT)
    scales_offset = ranks * slot_bytes
    scales_bytes = tl.cast(slot_rows, tl.int64) * row_scales  # of a rank
    if PRODUCT.scaling != "" and not FIXED_HALF:
        own = scales_offset + me * scales_bytes
        scales = x_scale_ptr.to(tl.int64), own, chunk_tiles * BLOCK_M * row_scales, M_shard * row_scales

    program = tl.program_id(0)
    if program < num_comm:
        trace = (trace_ptr, program)
        td.mark(trace, "starts")
        push_shard(
            ctx, x_ptr.to(tl.int64), half, signal, M_shard * row_bytes, chunk_tiles * BLOCK_M * row_bytes,
            tl.where(is_void, 0, num_chunks), slot_bytes, program, num_comm, COPY_OWN=FIXED_HALF, COPY_WORDS=COPY_WORDS,
            trace=trace, scales=scales, SLICES=SLICES,
        )
        td.mark(trace, "finishes")
        td.mark(trace, "ends")
    on_time = tl.num_programs(0) - num_comm - num_late
    place = program - num_comm
    first, last = _rounds(place, ranks * tiles_m * tiles_n, on_time, num_late, first_late)
    last = tl.where(is_void | (place < 0), first, last)
    # Not flattened in a trace: events of the next tile would be recorded before the end of this one.
    for number in tl.range(first, last, flatten=trace_ptr is None):
        tile = number * on_time + tl.maximum(number - first_late, 0) * num_late + place
        trace = (trace_ptr, num_comm + tile)
        td.mark(trace, "starts")
        source, pid_m, pid_n = tile_by_arrival(tile, me, ranks, tiles_m, tiles_n, group_m, chunk_tiles)
        is_own = source == me
        row = pid_m * BLOCK_M
        col = pid_n * BLOCK_N
        # The weight of the tile. Variables of another name, because the arguments must not change from tile to tile.
        w, b_desc, bias, out, out_desc, n, stride = w_ptr, w_desc, bias_ptr, y_ptr, y_desc, N, stride_w
        for other in tl.static_range(2):
            if w_ptrs[other] is not None:
                is_other = pid_n >= starts[other]
                col = tl.where(is_other, (pid_n - starts[other]) * BLOCK_N, col)
                n = tl.where(is_other, sizes[other], n)
                stride = tl.where(is_other, strides[other], stride)
                w = selected(w_ptrs[other], w, is_other)
                out = selected(y_ptrs[other], out, is_other)
                if PRODUCT.use_tma:
                    b_desc = selected(w_descs[other], b_desc, is_other)
                if PRODUCT.has_bias:
                    bias = selected(bias_ptrs[other], bias, is_other)
                if y_desc is not None:
                    out_desc = selected(y_descs[other], out_desc, is_other)
        n = as_aligned(n, PRODUCT.aligned)
        stride = as_aligned(stride, PRODUCT.aligned)
        if source != me:
            td.mark(trace, "waits", source)
        # producer: push_shard of the source, or its copy engine. Of this rank's own rows no signal is expected.
        signal_ptr = td.signal_at(ctx, half, (source * num_chunks + pid_m // chunk_tiles) * SLICES)
        expected = tl.where(is_own, NEVER, signal)
        seen = td.wait_plan(ctx, signal_ptr, expected, source, FOR_TMA=PRODUCT.use_tma)
        for slice_id in tl.static_range(1, SLICES):  # a loop at run time would prevent flattening
            seen = td.wait_plan(ctx, signal_ptr + slice_id, expected, source, FOR_TMA=PRODUCT.use_tma)
        td.mark(trace, "multiplies", source)
        acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
        x_scale = None
        if PRODUCT.scaling != "":
            x_scale = _scale_of_tile(
                ctx, x_scale_ptr, half, scales_offset + source * scales_bytes, source, row, M_shard, K, seen,
                FIXED_HALF, PRODUCT,
            )
        if PRODUCT.use_tma:
            in_buffer = td.consume_token((row + source * slot_rows).to(tl.int64), seen).to(tl.int32)
            acc = gemm_tile(
                acc, x_ptr, selected(x_desc, gathered_desc, is_own), tl.where(is_own, 0, half),
                tl.where(is_own, row, in_buffer), M_shard, w, b_desc, col, stride, n, K, K, PRODUCT,
                x_scale, M_shard - row, w_scale_ptr,
            )
        else:
            # A multiple of 16: see slot_rows_of.
            slot = td.consume_token(td.data_at(ctx, half, me) + source.to(tl.int64) * slot_bytes, seen)
            rows_ptr = td.pointer_to(tl.where(is_own, x_ptr.to(tl.int64), slot), x_ptr.dtype.element_ty)
            acc = gemm_tile(
                acc, rows_ptr, None, 0, row, M_shard, w, None, col, stride, n, K, K, PRODUCT,
                x_scale, M_shard - row, w_scale_ptr,
            )
        y = td.from_float32(with_bias(acc, bias, col + tl.arange(0, BLOCK_N), n, PRODUCT.has_bias), DTYPE)
        td.mark(trace, "stores")
        store_tile(
            out, out_desc, y, source, row, col, M_shard, n, segment_rows, ranks, BLOCK_M, BLOCK_N, STORES
        )
        td.mark(trace, "finishes")
        td.mark(trace, "ends")
    td.finish(ctx, ADVANCE=FIXED_HALF == 0)
