"""Kernel of gemm_ar_rms_norm and gemm_ar_layer_norm for small M: GEMM, all-reduce, residual and norm in one launch.

    r = round(sum over ranks of x @ weight.T + bias + residual)        y = norm(r)

The first programs multiply: one program, or ``split_k`` programs, compute a partial tile, round it to the dtype of x
and store it in the buffers of all ranks, this rank included. The program that stores the last tile of BLOCK_M rows sets
one signal per rank. The other programs receive: ROW_PROGRAMS of them share a row. Each waits for the tiles of the row
from all ranks, adds the whole row, because the norm needs all of it, and stores its columns of r and y. The sum is in
rank order, or a tree (``reduce_partials``). So r and y are bitwise equal on all ranks.

With a reduction tree the kernel also runs in a group of one rank. Its partial is then the root of the tree, which is
not rounded, so it is stored in fp32.

Progress (invariant 1). A program that receives waits only for programs that multiply, which have lower ids and wait for
nothing. So it suffices that programs start in the order of their ids. There is no barrier: call t uses half t mod 2,
and no rank can finish call t + 1 before all ranks have begun it, because each rank waits for all ranks.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.gemm_tile import as_aligned
from tdkernels.ops.common.norm_rows import load_if, normalize_memory, normalize_registers
from tdkernels.ops.common.rank_reduce import reduce_partials
from tdkernels.ops.common.small_m_gemm import place_of, reduce_splits, small_m_tile, small_m_tree


@td.jit
def _multiply(
    ctx, x_ptr, x_desc, w_ptr, w_desc, scratch_ptr, M, N, K, stride_w, k_of_part, split_k, tiles_m, tiles_n, half,
    signal, PRODUCT: tl.constexpr, SPLIT: tl.constexpr, DTYPE: tl.constexpr, PART: tl.constexpr, RANKS: tl.constexpr,
):
    """Compute one partial tile, or one K split of it, and store it on all ranks as PART."""
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    TILE_BYTES: tl.constexpr = BLOCK_M * BLOCK_N * PRODUCT.out_bytes
    me = td.rank(ctx)
    tile, part, row, col, first_k, last_k = place_of(tl.program_id(0), tiles_m, K, k_of_part, split_k, PRODUCT)
    if PRODUCT.leaves > 1:
        acc = small_m_tree(x_ptr, x_desc, 0, row, M, K, w_ptr, w_desc, col, stride_w, N, K, PRODUCT, DTYPE)
    else:
        acc = small_m_tile(x_ptr, x_desc, 0, row, M, K, w_ptr, w_desc, col, stride_w, N, first_k, last_k, PRODUCT)
    sends = True
    if SPLIT:
        acc, sends = reduce_splits(ctx, acc, scratch_ptr, tile, part, split_k, BLOCK_M, BLOCK_N)
    if sends:
        mask = (row + tl.arange(0, BLOCK_M) < M)[:, None] & (col + tl.arange(0, BLOCK_N) < N)[None, :]
        # A void launch sends nothing: a peer may still read the data of an earlier launch.
        mask &= td.is_void(signal) == 0
        offs = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        partial = td.from_float32(acc, PART)
        slot = (tl.cast(me, tl.int64) * tiles_m * tiles_n + tile) * TILE_BYTES
        for step in tl.static_range(RANKS):
            dst = td.data_at(ctx, half, (me + step) % RANKS) + slot
            tl.store(td.pointer_to(dst, PART) + offs, partial, mask=mask)
        tile_m = tile % tiles_m
        if td.is_last_arriver(td.flag_at(ctx, tiles_m * tiles_n + tile_m), tiles_n):
            # waiter: the programs of every rank that receive these rows
            td.notify_all(ctx, td.signal_at(ctx, half, me * tiles_m + tile_m), signal, WITH_OWN=True)


@td.jit
def _columns_of_parts(row, columns, tiles_m, PRODUCT: tl.constexpr):
    """Return the offsets of columns of a row in the tiles of a rank, in elements."""
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    tile = columns // BLOCK_N * tiles_m + (row // BLOCK_M).to(tl.int32)
    in_tile = (row % BLOCK_M).to(tl.int32) * BLOCK_N + columns % BLOCK_N
    return tile.to(tl.int64) * (BLOCK_M * BLOCK_N) + in_tile


@td.jit
def _rounded_sum(
    parts, part_bytes, row, columns, mask, bias, residual, tiles_m,
    PRODUCT: tl.constexpr, RANKS: tl.constexpr, DTYPE: tl.constexpr, PART: tl.constexpr,
):
    """Return columns of r: the sum of all ranks' partials, stored as PART, plus bias and residual, as DTYPE."""
    offs = _columns_of_parts(row, columns, tiles_m, PRODUCT)
    own = tl.full(columns.shape, 0.0, tl.float32)  # not used: the partial of this rank is read like the others
    total = reduce_partials(parts, part_bytes, offs, mask, own, -1, RANKS, PART, PRODUCT.leaves > 0)
    if PRODUCT.has_bias:
        total += td.to_float32(bias)
    return td.from_float32(total + td.to_float32(residual), DTYPE)


@td.jit
def _receive_row(
    ctx, bias_ptr, residual_ptr, weight_ptr, norm_bias_ptr, y_ptr, r_ptr, scale_ptr, stats_ptr, row, part, N, share,
    eps, tiles_m, tiles_n, half, signal,
    PRODUCT: tl.constexpr, NORM: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, PART: tl.constexpr,
    RANKS: tl.constexpr, IN_REGISTERS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Add and normalize one row; store columns part * share to (part + 1) * share - 1.

    A row of more than BLOCK elements (not IN_REGISTERS) is stored by one program.
    """
    TILE_BYTES: tl.constexpr = PRODUCT.block_m * PRODUCT.block_n * PRODUCT.out_bytes
    me = td.rank(ctx)
    parts, part_bytes = td.data_at(ctx, half, me), tl.cast(tiles_m, tl.int64) * tiles_n * TILE_BYTES
    signals = td.signal_at(ctx, half, (row // PRODUCT.block_m).to(tl.int32))
    offs = tl.arange(0, BLOCK)
    r_row = row * N
    if IN_REGISTERS:
        mask = offs < N
        # Loaded before the wait, because it does not depend on the peers.
        bias = load_if(bias_ptr, offs, mask, PRODUCT.has_bias)
        residual = load_if(residual_ptr, r_row + offs, mask, NORM.has_residual)
        weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
        norm_bias = load_if(norm_bias_ptr, offs, mask, NORM.has_bias)
        # producer: on every rank, the program that stores the last tile of these rows
        td.wait_plan_all(ctx, signals, tiles_m, signal, WITH_OWN=True)
        r = _rounded_sum(parts, part_bytes, row, offs, mask, bias, residual, tiles_m, PRODUCT, RANKS, DTYPE, PART)
        stored = mask & (offs >= part * share) & (offs < part * share + share)
        tl.store(r_ptr + r_row + offs, r, mask=stored)
        normalize_registers(
            td.to_float32(r), row, offs, mask, stored, part == 0, weight, norm_bias, eps, y_ptr, scale_ptr, stats_ptr,
            N, NORM, FORMAT, DTYPE,
        )
    else:
        # producer: on every rank, the program that stores the last tile of these rows
        td.wait_plan_all(ctx, signals, tiles_m, signal, WITH_OWN=True)
        for start in range(0, N, BLOCK):
            columns = start + offs
            mask = columns < N
            bias = load_if(bias_ptr, columns, mask, PRODUCT.has_bias)
            residual = load_if(residual_ptr, r_row + columns, mask, NORM.has_residual)
            r = _rounded_sum(
                parts, part_bytes, row, columns, mask, bias, residual, tiles_m, PRODUCT, RANKS, DTYPE, PART
            )
            tl.store(r_ptr + r_row + columns, r, mask=mask)
        normalize_memory(
            r_ptr + r_row, row, weight_ptr, norm_bias_ptr, eps, y_ptr, scale_ptr, stats_ptr, N,
            NORM, FORMAT, DTYPE, BLOCK,
        )


@td.jit(do_not_specialize=["M", "N", "K", "stride_w", "k_of_part", "share", "eps", "plan", "split_k"])
def gemm_ar_norm_kernel(
    ctx, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, residual_ptr, norm_weight_ptr, norm_bias_ptr,
    y_ptr, r_ptr, scale_ptr, stats_ptr, scratch_ptr, M, N, K, stride_w, k_of_part, share, eps, plan, split_k,
    PRODUCT: tl.constexpr, NORM: tl.constexpr, FORMAT: tl.constexpr, SPLIT: tl.constexpr, RANKS: tl.constexpr,
    IN_REGISTERS: tl.constexpr, ROW_PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute r and y [M, N] for x [M, K] and w [N, K] of each rank.

    The data of a half is [ranks, tiles, BLOCK_M, BLOCK_N]; the tiles of a column are consecutive. Signal number
    ``source * tiles_m + tile_m`` is set when all tiles of BLOCK_M rows of ``source`` are stored. Flag number
    ``tiles + tile_m`` counts the tiles of these rows that this rank has stored.
    """
    N = as_aligned(N, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    share = as_aligned(share, True)
    DTYPE: tl.constexpr = r_ptr.dtype.element_ty
    PART: tl.constexpr = tl.float32 if PRODUCT.out_bytes == 4 else DTYPE
    epoch, half, signal = td.call(ctx, plan)
    tiles_m = (M + PRODUCT.block_m - 1) // PRODUCT.block_m
    tiles_n = (N + PRODUCT.block_n - 1) // PRODUCT.block_n
    multiplying = tiles_m * tiles_n * split_k
    if tl.program_id(0) < multiplying:
        _multiply(
            ctx, x_ptr, x_desc, w_ptr, w_desc, scratch_ptr, M, N, K, stride_w, k_of_part, split_k, tiles_m, tiles_n,
            half, signal, PRODUCT, SPLIT, DTYPE, PART, RANKS,
        )
    else:
        receiving = tl.num_programs(0) - multiplying
        for unit in range(tl.program_id(0) - multiplying, M * ROW_PROGRAMS, receiving):
            _receive_row(
                ctx, bias_ptr, residual_ptr, norm_weight_ptr, norm_bias_ptr, y_ptr, r_ptr, scale_ptr, stats_ptr,
                tl.cast(unit // ROW_PROGRAMS, tl.int64), unit % ROW_PROGRAMS, N, share, eps, tiles_m, tiles_n, half,
                signal, PRODUCT, NORM, FORMAT, DTYPE, PART, RANKS, IN_REGISTERS, BLOCK,
            )
    td.finish(ctx)
