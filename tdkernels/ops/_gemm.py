"""One output tile of a matrix product: the main loop that the dense operators share."""

import triton.language as tl

from tdkernels import lang as td


@td.jit
def swizzle(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of a tile, such that tiles running at the same time share rows and columns in the L2 cache."""
    width = GROUP_M * tiles_n
    first_m = tile // width * GROUP_M
    height = tl.minimum(tiles_m - first_m, GROUP_M)
    return first_m + (tile % width) % height, (tile % width) // height


@td.jit
def gemm_tile(
    acc,
    a_ptr, a_desc, a_plane, a_row, a_rows,  # A: [a_rows, K] row-major; the descriptor is [planes, rows, K]
    b_ptr, b_desc, b_col, stride_bn, stride_bk,  # B: [N, K] by its strides; the descriptor is contiguous in one of them
    N, K, stride_am,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    USE_TMA: tl.constexpr, B_IS_KN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + A[a_row : +BLOCK_M] @ B[b_col : +BLOCK_N].T over the first K columns, fp32 [BLOCK_M, BLOCK_N].

    Rows past ``a_rows`` and columns past ``N`` hold anything: each depends on its own operands only, and the caller
    does not store them.
    """
    if USE_TMA:
        for k in range(0, K, BLOCK_K):
            a = a_desc.load([a_plane, a_row, k]).reshape(BLOCK_M, BLOCK_K)
            if B_IS_KN:
                b = b_desc.load([k, b_col])
            else:
                b = b_desc.load([b_col, k]).T
            acc = td.dot(a, b, acc, PRECISION)
    else:
        offs_m = a_row + tl.arange(0, BLOCK_M)
        offs_n = b_col + tl.arange(0, BLOCK_N)
        offs_k = tl.arange(0, BLOCK_K)
        a_ptrs = a_ptr + offs_m[:, None].to(tl.int64) * stride_am + offs_k[None, :]
        b_ptrs = b_ptr + offs_n[None, :].to(tl.int64) * stride_bn + offs_k[:, None].to(tl.int64) * stride_bk
        mask_m = offs_m[:, None] < a_rows
        mask_n = offs_n[None, :] < N
        for k in range(0, K, BLOCK_K):
            a = tl.load(a_ptrs, mask=mask_m & (offs_k[None, :] < K - k), other=0.0)
            b = tl.load(b_ptrs, mask=mask_n & (offs_k[:, None] < K - k), other=0.0)
            acc = td.dot(a, b, acc, PRECISION)
            a_ptrs += BLOCK_K
            b_ptrs += BLOCK_K * stride_bk
    return acc
