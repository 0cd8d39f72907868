"""Kernels of group_gemm: the grouped GEMM, and the gradient of its weights.

Group sizes are known only on the device. The grouped GEMM is persistent: it launches as many programs as fit on the
GPU, and each program computes every n-th tile for n programs. The weight gradient launches one program per tile of each
weight, whose main loop is over the rows of the group. There the GPU starts a new program whenever one finishes, so long
groups do not delay others.
"""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.gemm_tile import add_product, as_aligned, scale_of_row, store_rows, swizzle
from tdkernels.ops.experts.grouped_gemm.swiglu import HALVES, INTERLEAVED, NONE, swiglu
from tdkernels.ops.experts.grouped_gemm.tile import (
    group_of,
    grouped_tile,
    rows_of_groups,
    scales_of_expert,
    tile_of_groups,
    tiles_of_groups,
)


@td.jit
def store_product(acc, second, y_ptr, pre_ptr, offs_m, end, col, N, PRODUCT: tl.constexpr):
    """Store a tile, or its SwiGLU, to the rows ``offs_m`` that are below ``end``.

    N is the number of columns of a plane. y is [R, N], or [R, N / 2] with INTERLEAVED. If ``pre_ptr`` is given, the
    input of SwiGLU is stored there.
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    offs_n = col + tl.arange(0, BLOCK_N)
    if PRODUCT.activation == HALVES:
        if pre_ptr is not None:
            mask = (offs_m < end)[:, None] & (offs_n < N)[None, :]
            at = pre_ptr + offs_m[:, None].to(tl.int64) * (2 * N) + offs_n[None, :]
            tl.store(at, td.from_float32(acc, dtype), mask=mask)
            tl.store(at + N, td.from_float32(second, dtype), mask=mask)
        store_rows(y_ptr, td.from_float32(swiglu(acc, second), dtype), offs_m, offs_n, end, N)
    elif PRODUCT.activation == INTERLEAVED:
        if pre_ptr is not None:
            store_rows(pre_ptr, td.from_float32(acc, dtype), offs_m, offs_n, end, N)
        gate, up = acc.reshape(BLOCK_M, BLOCK_N // 2, 2).split()
        columns = col // 2 + tl.arange(0, BLOCK_N // 2)
        store_rows(y_ptr, td.from_float32(swiglu(gate, up), dtype), offs_m, columns, end, N // 2)
    else:
        store_rows(y_ptr, td.from_float32(acc, dtype), offs_m, offs_n, end, N)


# Compiled once per tile and number of experts, rounded up to a power of two. The shape does not matter.
@td.jit(do_not_specialize=["num_experts", "R", "N", "K", "stride_plane", "stride_w", "group_m"])
def group_gemm_kernel(
    x_ptr, x_desc, w_ptr, w_desc, x_scale_ptr, w_scale_ptr, splits_ptr, y_ptr, pre_ptr,
    num_experts, R, N, K, stride_plane, stride_w, group_m,
    EXPERTS: tl.constexpr, PRODUCT: tl.constexpr,
):
    """Compute y[rows of e] = act(x[rows of e] @ w[e].T). N is the N of a plane, see ``planes_of``.

    ``x_scale_ptr`` and ``w_scale_ptr`` are the scales of fp8 operands, see ``scaling.Scales``, or None.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    N = as_aligned(N, PRODUCT.aligned)
    K = as_aligned(K, PRODUCT.aligned)
    stride_plane = as_aligned(stride_plane, PRODUCT.aligned)
    stride_w = as_aligned(stride_w, PRODUCT.aligned)
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    rows = rows_of_groups(splits_ptr, num_experts, R, EXPERTS)
    tiles = tiles_of_groups(rows, tiles_n, BLOCK_M)
    # Flattened: the first loads of a tile are in flight while the tile before is stored. Not with SwiGLU: flattened
    # loops with two accumulators took 1.1 to 1.5 times as long (H100). Without TMA and with scales it was not measured.
    # Not with several leaves: each of them has a main loop.
    FLAT: tl.constexpr = (
        PRODUCT.use_tma and PRODUCT.activation == NONE and PRODUCT.scaling == "" and PRODUCT.leaves <= 1
    )
    for tile in tl.range(tl.program_id(0), td.sum_of(tiles, 0), tl.num_programs(0), flatten=FLAT):
        expert, begin, end, row, pid_n = tile_of_groups(tile, rows, tiles, tiles_n, group_m, EXPERTS, BLOCK_M)
        col = pid_n * BLOCK_N
        offs_m = row + tl.arange(0, BLOCK_M)
        inside = tl.minimum(offs_m, end - 1).to(tl.int64)
        x_at = x_ptr.to(tl.int64) + inside * K * (x_ptr.dtype.element_ty.primitive_bitwidth // 8)
        acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
        acc, second = grouped_tile(
            acc, acc, x_at, x_desc, 0, row, offs_m < end,
            w_ptr, w_desc, expert, col, stride_plane, stride_w, N, K, x_ptr.dtype.element_ty, PRODUCT,
            scale_of_row(x_scale_ptr, row, K, PRODUCT), end - row,
            scales_of_expert(w_scale_ptr, expert, N, K, PRODUCT),
        )
        store_product(acc, second, y_ptr, pre_ptr, offs_m, end, col, N, PRODUCT)


@td.jit(do_not_specialize=["num_experts", "R"])
def ends_kernel(splits_ptr, ends_ptr, num_experts, R, EXPERTS: tl.constexpr):
    """Store the end (exclusive) of each group's rows, int32."""
    experts = tl.arange(0, EXPERTS)
    ends = td.running_sum(rows_of_groups(splits_ptr, num_experts, R, EXPERTS), 0)
    tl.store(ends_ptr + experts, ends, mask=experts < num_experts)


@td.jit
def _block_of_rows(ptr, offs_r, end, offs, WIDTH):
    """Load a block of rows below ``end`` of [rows, WIDTH]. Elements outside are zero."""
    mask = (offs_r < end)[:, None] & (offs < WIDTH)[None, :]
    return tl.load(ptr + offs_r[:, None].to(tl.int64) * WIDTH + offs[None, :], mask=mask, other=0.0)


@td.jit
def _rows_before(end, row, desc, col, BLOCK_R: tl.constexpr):
    """Load a block of rows below ``end`` through a descriptor. Rows from ``end`` on, of the next group, are zero."""
    block = desc.load([row, col])
    offs_r = row + tl.arange(0, BLOCK_R)
    return tl.where((offs_r < end)[:, None], block, tl.full((), 0.0, block.dtype))


@td.jit
def _transposed_product_by_tma(
    acc, begin, end, a_desc, a_last_desc, a_col, b_desc, b_last_desc, b_col, BLOCK_R: tl.constexpr,
    LAST_R: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute ``_transposed_product`` with TMA.

    After the whole blocks, the rest of a group is processed in blocks of LAST_R rows. Only the last of them is masked,
    because masking moves a block through registers.
    """
    whole = begin + (end - begin) // BLOCK_R * BLOCK_R
    for row in range(begin, whole, BLOCK_R):
        acc = td.dot(a_desc.load([row, a_col]).T, b_desc.load([row, b_col]), acc, PRECISION)
    last = begin + (end - begin) // LAST_R * LAST_R
    for row in range(whole, last, LAST_R):
        acc = td.dot(a_last_desc.load([row, a_col]).T, b_last_desc.load([row, b_col]), acc, PRECISION)
    if last < end:
        a = _rows_before(end, last, a_last_desc, a_col, LAST_R)
        acc = td.dot(a.T, _rows_before(end, last, b_last_desc, b_col, LAST_R), acc, PRECISION)
    return acc


@td.jit
def _transposed_product(
    acc, begin, end, a_ptr, a_col, A_WIDTH, b_ptr, b_col, B_WIDTH,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):
    """Return acc + A[begin : end, a_col : +BLOCK_M].T @ B[begin : end, b_col : +BLOCK_N], both row-major."""
    offs_a = a_col + tl.arange(0, BLOCK_M)
    offs_b = b_col + tl.arange(0, BLOCK_N)
    for row in range(begin, end, BLOCK_R):
        offs_r = row + tl.arange(0, BLOCK_R)
        a = _block_of_rows(a_ptr, offs_r, end, offs_a, A_WIDTH)
        b = _block_of_rows(b_ptr, offs_r, end, offs_b, B_WIDTH)
        acc = add_product(acc, a.T, b, PRECISION)
    return acc


# The ``*_last_desc`` descriptors read the same rows in blocks of LAST_R.
@td.jit(do_not_specialize=["num_experts", "R", "N", "K", "group_m"])
def group_gemm_weights_kernel(
    dy_ptr, dy_desc, dy_last_desc, x_ptr, x_desc, x_last_desc, splits_ptr, dw_ptr, dw_desc,
    num_experts, R, N, K, group_m,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LAST_R: tl.constexpr,
    ALIGNED: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute dw[e] = dy[rows of e].T @ x[rows of e], [E, N, K]. It is zero for a group without rows."""
    N = as_aligned(N, ALIGNED)
    K = as_aligned(K, ALIGNED)
    tiles_m, tiles_n = (N + BLOCK_M - 1) // BLOCK_M, (K + BLOCK_N - 1) // BLOCK_N
    expert = tl.program_id(0) // (tiles_m * tiles_n)
    pid_m, pid_n = swizzle(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, group_m)
    begin, end = group_of(expert, splits_ptr, num_experts, R, EXPERTS)
    row, col = pid_m * BLOCK_M, pid_n * BLOCK_N
    acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    if USE_TMA:
        acc = _transposed_product_by_tma(
            acc, begin, end, dy_desc, dy_last_desc, row, x_desc, x_last_desc, col, BLOCK_K, LAST_R, PRECISION
        )
    else:
        acc = _transposed_product(
            acc, begin, end, dy_ptr, row, N, x_ptr, col, K, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION
        )
    dw = td.from_float32(acc, dw_ptr.dtype.element_ty)
    if USE_TMA:
        dw_desc.store([expert, row, col], dw.reshape(1, BLOCK_M, BLOCK_N))
    else:
        offs_m, offs_n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
        store_rows(dw_ptr + expert.to(tl.int64) * N * K, dw, offs_m, offs_n, N, K)
