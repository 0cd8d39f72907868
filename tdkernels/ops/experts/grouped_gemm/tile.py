"""Building blocks of grouped-GEMM kernels: mapping tiles to groups, the main loop, and the epilogue of gradients."""

from typing import NamedTuple

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.gemm_tile import (
    add_nodes,
    add_product,
    add_scaled,
    columns_of_leaf,
    pack_node,
    scaled_by_rows,
    swizzle,
)


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
        scaling: "" for unscaled operands, otherwise "row" or "block" (``scaling.Scales``).
        x_scale_step: For "row": 1 if each row of x has a scale, 0 if all of x has one.
        w_scale_step: For "row": 1 if each row of a weight has a scale, 0 if all of an expert's weight has one.
        expert_scale_step: For "row" without ``w_scale_step``: 1 if each expert has a scale, 0 if all of w has one.
        crosses_blocks: For "block": whether a tile of the second plane may begin inside a block of scales and end in
            the next one. Tiles of the first plane begin at multiples of block_n.
        imprecise_k: ``IMPRECISE_K`` of ``td.dot``.
        leaves: Number of leaves of the reduction tree over K, see ``gemm_tile.Product``. 0: K is summed in one loop.
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
    scaling: str = ""
    x_scale_step: int = 0
    w_scale_step: int = 0
    expert_scale_step: int = 0
    crosses_blocks: bool = False
    imprecise_k: int | None = None
    leaves: int = 0


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
def scales_of_expert(w_scale, expert, N, K, PRODUCT: tl.constexpr):
    """Return the pointer to the scales of an expert's weight, for ``grouped_tile``.

    N is the number of columns of a plane. For unscaled operands the result is not used (``scale_of_row``).
    """
    rows = N * 2 if PRODUCT.pair else N
    if PRODUCT.scaling == "block":
        return w_scale + expert.to(tl.int64) * ((rows + 127) // 128 * ((K + 127) // 128))
    elif PRODUCT.scaling == "row":
        step = rows if PRODUCT.w_scale_step else PRODUCT.expert_scale_step
        return w_scale + expert.to(tl.int64) * step
    else:
        return expert


@td.jit
def grouped_tile(
    acc, second,
    a_at, a_desc, a_plane, a_row, a_mask,  # A: addresses of rows, or a descriptor [planes, rows, K] and the first row
    w_ptr, w_desc, expert, col, stride_plane, stride_w,  # W: [planes, N, K], or [planes, K, N] if PRODUCT.w_is_kn
    N, K, DTYPE: tl.constexpr, PRODUCT: tl.constexpr, x_scale=None, scaled_rows=0, w_scale=None,
):
    """Accumulate one tile of A @ W[plane].T in fp32, and return (acc, second).

    ``acc`` gets A @ W[plane, col : +BLOCK_N].T, where ``plane`` is the first plane of the expert. An expert has one
    plane, or two if PRODUCT.pair; then ``second`` gets the product with the next plane. Rows outside ``a_mask`` and
    columns past ``N`` are undefined. With PRODUCT.even_k ``a_mask`` is ignored and all rows of ``a_at`` are read.

    With scaled operands, ``acc`` and ``second`` must be zero. ``x_scale`` points to the scales of the first row of the
    tile (``gemm_tile.scale_of_row``), ``w_scale`` to those of the expert (``scales_of_expert``); ``scaled_rows`` rows
    of the tile have scales.

    With PRODUCT.leaves > 1 ``acc`` is the root of the reduction tree over K, not rounded; other nodes are rounded to
    DTYPE. K must be divisible by the number of leaves times BLOCK_K. There is one plane, and there are no scales.
    """
    if PRODUCT.leaves > 1:
        tl.static_assert(PRODUCT.scaling == "" and not PRODUCT.pair)
        leaf_k = columns_of_leaf(K, PRODUCT)
        acc = _grouped_tree(
            acc, a_at, a_desc, a_plane, a_row, a_mask, w_ptr, w_desc, expert, col, stride_plane, stride_w, N, K,
            0, leaf_k, DTYPE, PRODUCT, PRODUCT.leaves,
        )
    else:
        acc, second = _grouped_loop(
            acc, second, a_at, a_desc, a_plane, a_row, a_mask, w_ptr, w_desc, expert, col, stride_plane, stride_w, N, K,
            0, K, DTYPE, PRODUCT, x_scale, scaled_rows, w_scale,
        )
    if PRODUCT.scaling == "row":
        acc = scaled_by_rows(acc, x_scale, scaled_rows, w_scale, col, N, PRODUCT)
        if PRODUCT.pair:
            second = scaled_by_rows(second, x_scale, scaled_rows, w_scale, N + col, 2 * N, PRODUCT)
    return acc, second


@td.jit
def _grouped_tree(
    zeros, a_at, a_desc, a_plane, a_row, a_mask, w_ptr, w_desc, expert, col, stride_plane, stride_w, N, K,
    first_k, leaf_k, DTYPE: tl.constexpr, PRODUCT: tl.constexpr, LEAVES: tl.constexpr,
):
    """Return the sum of LEAVES leaves of the reduction tree, from column ``first_k`` on, see ``gemm_tile``."""
    if LEAVES > 1:
        HALF: tl.constexpr = LEAVES // 2
        left = pack_node(_grouped_tree(
            zeros, a_at, a_desc, a_plane, a_row, a_mask, w_ptr, w_desc, expert, col, stride_plane, stride_w, N, K,
            first_k, leaf_k, DTYPE, PRODUCT, HALF,
        ), DTYPE)
        right = _grouped_tree(
            zeros, a_at, a_desc, a_plane, a_row, a_mask, w_ptr, w_desc, expert, col, stride_plane, stride_w, N, K,
            first_k + HALF * leaf_k, leaf_k, DTYPE, PRODUCT, HALF,
        )
        return add_nodes(left, right, DTYPE)
    else:
        return _grouped_loop(
            zeros, zeros, a_at, a_desc, a_plane, a_row, a_mask, w_ptr, w_desc, expert, col, stride_plane, stride_w,
            N, K, first_k, first_k + leaf_k, DTYPE, PRODUCT, None, 0, None,
        )[0]


@td.jit
def _grouped_loop(
    acc, second, a_at, a_desc, a_plane, a_row, a_mask, w_ptr, w_desc, expert, col, stride_plane, stride_w, N, K,
    first_k, last_k, DTYPE: tl.constexpr, PRODUCT: tl.constexpr, x_scale, scaled_rows, w_scale,
):
    """``grouped_tile`` over columns ``first_k`` to ``last_k - 1``, without the scales of rows."""
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_K: tl.constexpr = PRODUCT.block_k
    plane = expert * (2 if PRODUCT.pair else 1)
    for k in range(first_k, last_k, BLOCK_K):
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
        acc = _add(acc, a, b, k, K, x_scale, scaled_rows, w_scale, col, N, PRODUCT, False)
        if PRODUCT.pair:
            b = _weight_block(w_ptr, w_desc, plane + 1, col, k, stride_plane, stride_w, N, K, PRODUCT)
            # The rows of the second plane are rows N to 2 * N - 1 of the expert's weight.
            CROSSES: tl.constexpr = PRODUCT.crosses_blocks
            second = _add(second, a, b, k, K, x_scale, scaled_rows, w_scale, N + col, 2 * N, PRODUCT, CROSSES)
    return acc, second


@td.jit
def _add(
    acc, a, b, k, K, x_scale, scaled_rows, w_scale, first, past, PRODUCT: tl.constexpr, CROSSES_BLOCKS: tl.constexpr
):
    """Return acc + a @ b, with the scales of the weight's rows from ``first`` up to ``past`` if there are scales."""
    if PRODUCT.scaling == "":
        return add_product(acc, a, b, PRODUCT.precision)
    elif CROSSES_BLOCKS:
        blocks = (K + 127) // 128
        offs_m, offs_n = tl.arange(0, PRODUCT.block_m), first + tl.arange(0, PRODUCT.block_n)
        scale_x = tl.load(x_scale + offs_m * blocks + k // 128, mask=offs_m < scaled_rows, other=0.0)
        scale_w = tl.load(w_scale + offs_n // 128 * blocks + k // 128, mask=offs_n < past, other=0.0)
        part = td.dot(a, b, tl.full(acc.shape, 0.0, tl.float32), PRODUCT.precision)
        return acc + part * (scale_x[:, None] * scale_w[None, :])
    else:
        return add_scaled(acc, a, b, k, K, x_scale, scaled_rows, w_scale, first, past, PRODUCT)


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
