"""Building blocks of grouped-GEMM kernels: mapping tiles to groups, the main loop, and the epilogue of gradients."""

from typing import NamedTuple

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.gemm_tile import add_product, store_rows, swizzle

_COLUMNS = tl.constexpr(64)  # columns of a gradient's tile that are stored at a time


class GroupedProduct(NamedTuple):
    """Compile-time parameters of a grouped product: the constexpr argument ``PRODUCT`` of its kernels.

    Args:
        block_m: Tile size in rows.
        block_n: Tile size in columns of the output.
        block_k: Tile size along K.
        elem_bytes: Bytes per element of the weight.
        aligned: Whether sizes and strides are multiples of 16 elements (``gemm_operands.aligned``).
        even_k: Whether K is a multiple of block_k. Rows start at multiples of 16 bytes then.
        use_tma: Whether rows and weights are read through tensor descriptors.
        w_is_kn: Whether each plane of the weight is stored as [K, N] instead of [N, K].
        activation: One of ``swiglu.NUMBERS``.
        pair: Whether a tile uses two planes of the weight, gate and up of SwiGLU.
        precision: ``input_precision`` of ``tl.dot`` for fp32 operands.
    """

    block_m: int
    block_n: int
    block_k: int
    elem_bytes: int
    aligned: bool
    even_k: bool
    use_tma: bool
    w_is_kn: bool
    activation: int
    pair: bool
    precision: str


@td.jit
def rows_of_groups(splits_ptr, num_experts, R, EXPERTS: tl.constexpr):
    """Return the number of rows of each group, int32 [EXPERTS]. Rows beyond R are cut off."""
    experts = tl.arange(0, EXPERTS)
    splits = tl.load(splits_ptr + experts, mask=experts < num_experts, other=0).to(tl.int64)
    rows = tl.minimum(tl.maximum(splits, 0), R)  # clamped first, so that the running sum cannot overflow
    ends = td.running_sum(rows, 0)
    return tl.maximum(tl.minimum(rows, R - (ends - rows)), 0).to(tl.int32)


@td.jit
def group_of(expert, splits_ptr, num_experts, R, EXPERTS: tl.constexpr):
    """Return (begin, end) of the rows of one group, consistent with ``rows_of_groups``."""
    experts = tl.arange(0, EXPERTS)
    splits = tl.load(splits_ptr + experts, mask=experts < num_experts, other=0).to(tl.int64)
    rows = tl.minimum(tl.maximum(splits, 0), R)
    begin = td.sum_of(tl.where(experts < expert, rows, 0), 0)
    end = begin + td.sum_of(tl.where(experts == expert, rows, 0), 0)
    return tl.minimum(begin, R).to(tl.int32), tl.minimum(end, R).to(tl.int32)


@td.jit
def tiles_of_groups(rows, tiles_n, BLOCK_M: tl.constexpr):
    """Return the number of tiles of each group."""
    return (rows + BLOCK_M - 1) // BLOCK_M * tiles_n


@td.jit
def tile_of_groups(tile, rows, tiles, tiles_n, group_m, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return (group, begin and end of its rows, first row of the tile, tile column) for tile number ``tile``."""
    experts = tl.arange(0, EXPERTS)
    expert = td.sum_of((td.running_sum(tiles, 0) <= tile).to(tl.int32), 0)
    before = experts < expert
    begin = td.sum_of(tl.where(before, rows, 0), 0)
    end = begin + td.sum_of(tl.where(experts == expert, rows, 0), 0)
    within = tile - td.sum_of(tl.where(before, tiles, 0), 0)
    pid_m, pid_n = swizzle(within, (end - begin + BLOCK_M - 1) // BLOCK_M, tiles_n, group_m)
    return expert, begin, end, begin + pid_m * BLOCK_M, pid_n


@td.jit
def grouped_tile(
    acc, second,
    a_at, a_desc, a_plane, a_row, a_mask,  # A: addresses of rows, or a descriptor [planes, rows, K] and the first row
    w_ptr, w_desc, expert, col, stride_plane, stride_w,  # W: [planes, N, K], or [planes, K, N] if PRODUCT.w_is_kn
    N, K, DTYPE: tl.constexpr, PRODUCT: tl.constexpr,
):
    """Accumulate one tile of A @ W[plane].T in fp32, and return (acc, second).

    ``acc`` gets A @ W[plane, col : +BLOCK_N].T, where ``plane`` is the first plane of the expert. An expert has one
    plane, or two if PRODUCT.pair; then ``second`` gets the product with the next plane. Rows outside ``a_mask`` and
    columns past ``N`` are undefined. With PRODUCT.even_k ``a_mask`` is ignored and all rows of ``a_at`` are read.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_K: tl.constexpr = PRODUCT.block_k
    plane = expert * (2 if PRODUCT.pair else 1)
    for k in range(0, K, BLOCK_K):
        if PRODUCT.use_tma:
            a = a_desc.load([a_plane, a_row, k]).reshape(BLOCK_M, BLOCK_K)
        else:
            offs_k = k + tl.arange(0, BLOCK_K)
            a_ptrs = td.pointer_to(a_at, DTYPE, PRODUCT.even_k)[:, None] + offs_k[None, :]
            if PRODUCT.even_k:
                a = tl.load(a_ptrs)
            else:
                a = tl.load(a_ptrs, mask=a_mask[:, None] & (offs_k < K)[None, :], other=0.0)
        b = _weight_block(w_ptr, w_desc, plane, col, k, stride_plane, stride_w, N, K, PRODUCT)
        acc = add_product(acc, a, b, PRODUCT.precision)
        if PRODUCT.pair:
            b = _weight_block(w_ptr, w_desc, plane + 1, col, k, stride_plane, stride_w, N, K, PRODUCT)
            second = add_product(second, a, b, PRODUCT.precision)
    return acc, second


@td.jit
def _weight_block(w_ptr, w_desc, plane, col, k, stride_plane, stride_w, N, K, PRODUCT: tl.constexpr):
    """Load a block [BLOCK_K, BLOCK_N] of a plane of the weight. It is zero past K and undefined past N."""
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    BLOCK_K: tl.constexpr = PRODUCT.block_k
    if PRODUCT.use_tma:
        if PRODUCT.w_is_kn:
            return w_desc.load([plane, k, col]).reshape(BLOCK_K, BLOCK_N)
        else:
            return w_desc.load([plane, col, k]).reshape(BLOCK_N, BLOCK_K).T
    else:
        offs_n = col + tl.arange(0, BLOCK_N)
        offs_k = k + tl.arange(0, BLOCK_K)
        base = w_ptr + tl.cast(plane, tl.int64) * stride_plane
        mask = (offs_k < K)[:, None] & (offs_n < N)[None, :]
        if PRODUCT.w_is_kn:
            return tl.load(base + offs_k[:, None].to(tl.int64) * stride_w + offs_n[None, :], mask=mask, other=0.0)
        else:
            return tl.load(base + offs_n[None, :].to(tl.int64) * stride_w + offs_k[:, None], mask=mask, other=0.0)


@td.jit
def store_gradient(
    acc, y_ptr, h_ptr, weighted_ptr, weight, offs_m, end, col, N, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr
):
    """Store WIDTH columns of the gradient of rows h, and of h itself, both scaled by the routing weight of the row.

    Return the contribution of these columns to the dot product of each row's unscaled gradient with its h, fp32
    [BLOCK_M]. It is the gradient of the routing weight.
    """
    if WIDTH > _COLUMNS:
        # Split into parts: the rows h and the whole accumulator do not fit into the registers together.
        HALF: tl.constexpr = WIDTH // 2
        left, right = acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        dots = store_gradient(left, y_ptr, h_ptr, weighted_ptr, weight, offs_m, end, col, N, BLOCK_M, HALF)
        dots += store_gradient(right, y_ptr, h_ptr, weighted_ptr, weight, offs_m, end, col + HALF, N, BLOCK_M, HALF)
        return dots
    else:
        dtype: tl.constexpr = y_ptr.dtype.element_ty
        offs_n = col + tl.arange(0, WIDTH)
        mask = (offs_m < end)[:, None] & (offs_n < N)[None, :]
        h = td.to_float32(tl.load(h_ptr + offs_m[:, None].to(tl.int64) * N + offs_n[None, :], mask=mask, other=0.0))
        store_rows(weighted_ptr, td.from_float32(h * weight[:, None], dtype), offs_m, offs_n, end, N)
        store_rows(y_ptr, td.from_float32(acc * weight[:, None], dtype), offs_m, offs_n, end, N)
        return td.sum_of(tl.where(mask, acc, 0.0) * h, 1)
