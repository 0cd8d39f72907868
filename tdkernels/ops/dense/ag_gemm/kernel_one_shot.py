"""One-shot kernel of ag_gemm, for small M: gather everything, then compute.

The first programs push this rank's shard to all ranks, including this rank. Each of the other programs waits for all
shards, then computes one tile that covers the rows of all ranks, or ``split_k`` programs share its K. So the weight is
read once, not once per shard. Reading the weight takes most of the time. While a program waits for the rows, it
prefetches the first part of its weight to the L2 cache.

Progress (invariant 1). Programs that push wait for nothing. The others wait only for programs that push.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.common.gemm_tile import as_aligned, scale_of_row, with_bias
from tdkernels.ops.common.small_m_gemm import place_of, reduce_splits, small_m_tile


@td.jit
def _push(
    ctx, x_ptr, half, signal, slot, size, share, pusher, me, ranks,
    DTYPE: tl.constexpr, ELEM_BYTES: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr = True,
):
    """Store the share of program ``pusher`` of this rank's shard in the buffers of all ranks.

    The shard has ``size`` elements and begins ``slot`` bytes after the start of a half; the share begins at element
    ``share * pusher``. ALIGNED: both are at multiples of 16 bytes. A void launch stores nothing: a peer may still read
    the data of an earlier launch.
    """
    offs = tl.arange(0, BLOCK)
    begin = tl.cast(pusher, tl.int64) * share
    left = tl.minimum(size - begin, share)
    for start in range(0, left, BLOCK):
        at = (begin + start) * ELEM_BYTES
        mask = (offs < left - start) & (td.is_void(signal) == 0)
        block = tl.load(td.pointer_to(x_ptr.to(tl.int64) + at, DTYPE, ALIGNED) + offs, mask=mask)
        for step in range(1, ranks + 1):
            dst = td.data_at(ctx, half, (me + step) % ranks) + slot + at
            tl.store(td.pointer_to(dst, DTYPE, ALIGNED) + offs, block, mask=mask)


@td.jit
def _prefetch_to_l2(
    w_ptr, stride_w, col, N, first_k, last_k,
    BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, W_IS_KN: tl.constexpr, ELEM_BYTES: tl.constexpr,
):
    """Prefetch the part of the weight that a program reads first to the L2 cache."""
    if W_IS_KN:
        rows = first_k + tl.arange(0, COLUMNS)
        there = rows < last_k
        first, last = col, tl.minimum(col + BLOCK_N, N)
    else:
        rows = col + tl.arange(0, BLOCK_N)
        there = rows < N
        first, last = first_k, tl.minimum(first_k + COLUMNS, last_k)
    addresses = w_ptr.to(tl.int64) + (rows.to(tl.int64) * stride_w + first) * ELEM_BYTES
    td.prefetch(addresses, (last - first) * ELEM_BYTES, there)


@td.jit(do_not_specialize=[
    "M_shard", "N", "K", "stride_w", "slot_rows", "k_of_part", "share", "plan", "num_comm", "split_k",
])
def ag_gemm_one_shot_kernel(
    ctx, x_ptr, gathered_desc, w_ptr, w_desc, bias_ptr, x_scale_ptr, w_scale_ptr, y_ptr, scratch_ptr,
    M_shard, N, K, stride_w, slot_rows, k_of_part, share, plan, num_comm, split_k,
    COPY_BLOCK: tl.constexpr, PREFETCH: tl.constexpr, PRODUCT: tl.constexpr, SPLIT: tl.constexpr, trace_ptr=None,
):
    """Compute y = all_gather(x) @ w.T, for x [M_shard, K] and y [ranks * M_shard, N].

    The data of a half is [ranks, slot_rows, K]. Signal number ``source * num_comm + program`` is set when that program
    of rank ``source`` has stored its share there. With scaled operands, the scales of all rows follow, and program 0
    sends those of this rank.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    trace = (trace_ptr, tl.program_id(0))
    td.mark(trace, "starts")
    N = as_aligned(N, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    share = share // 16 * 16
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    me = td.rank(ctx)
    ranks = td.num_ranks(ctx)
    epoch, half, signal = td.call(ctx, plan)
    scale_columns = 1
    if PRODUCT.scaling == "block":
        scale_columns = (K + 127) // 128
    scales_offset = tl.cast(ranks, tl.int64) * slot_rows * K * PRODUCT.elem_bytes
    program = tl.program_id(0)
    if program < num_comm:
        td.mark(trace, "pushes", ALL_PEERS)
        slot = tl.cast(me, tl.int64) * slot_rows * K * PRODUCT.elem_bytes
        size = tl.cast(M_shard, tl.int64) * K
        _push(ctx, x_ptr, half, signal, slot, size, share, program, me, ranks, DTYPE, PRODUCT.elem_bytes, COPY_BLOCK)
        if PRODUCT.scaling != "":
            if program == 0:
                count = M_shard * scale_columns
                at = scales_offset + tl.cast(me, tl.int64) * slot_rows * scale_columns * 4
                _push(ctx, x_scale_ptr, half, signal, at, count, count, 0, me, ranks, tl.float32, 4, COPY_BLOCK, False)
        # waiter: the programs of all ranks that multiply
        td.notify_all(ctx, td.signal_at(ctx, half, me * num_comm + program), signal, WITH_OWN=True)
    else:
        rows = ranks * slot_rows
        tiles_m = (rows + BLOCK_M - 1) // BLOCK_M
        tile, part, row, col, first_k, last_k = place_of(program - num_comm, tiles_m, K, k_of_part, split_k, PRODUCT)
        if PREFETCH > 0:
            _prefetch_to_l2(
                w_ptr, stride_w, col, N, first_k, last_k, BLOCK_N, PREFETCH, PRODUCT.w_is_kn, PRODUCT.elem_bytes
            )
        td.mark(trace, "waits", ALL_PEERS)
        # producer: the programs of all ranks that push
        td.wait_plan_all(ctx, td.signal_at(ctx, half, 0), num_comm, signal, count=num_comm, WITH_OWN=True)
        if PRODUCT.use_tma:
            td.fence_before_tma_load()
        td.mark(trace, "multiplies")
        x_scale = None
        if PRODUCT.scaling != "":
            gathered_scales = td.pointer_to(td.data_at(ctx, half, me) + scales_offset, tl.float32)
            x_scale = scale_of_row(gathered_scales, row, K, PRODUCT)
        acc = small_m_tile(
            td.pointer_to(td.data_at(ctx, half, me), DTYPE), gathered_desc, half, row, rows, K,
            w_ptr, w_desc, col, stride_w, N, first_k, last_k, PRODUCT, x_scale, rows - row, w_scale_ptr,
        )
        stores = True
        if SPLIT:
            td.mark(trace, "joins")
            acc, stores = reduce_splits(ctx, acc, scratch_ptr, tile, part, split_k, BLOCK_M, BLOCK_N)
        if stores:
            td.mark(trace, "stores")
            offs_m = row + tl.arange(0, BLOCK_M)
            offs_n = col + tl.arange(0, BLOCK_N)
            acc = with_bias(acc, bias_ptr, offs_n, N, PRODUCT.has_bias)
            source = offs_m // slot_rows
            within = offs_m % slot_rows
            y_rows = (source * M_shard + within).to(tl.int64)[:, None] * N
            there = (source < ranks) & (within < M_shard)
            y = td.from_float32(acc, y_ptr.dtype.element_ty)
            tl.store(y_ptr + y_rows + offs_n[None, :], y, mask=there[:, None] & (offs_n < N)[None, :])
    td.mark(trace, "finishes")
    td.finish(ctx)
    td.mark(trace, "ends")
