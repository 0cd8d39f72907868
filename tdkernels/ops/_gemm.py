"""One output tile of a matrix product: the main loop that the dense operators share."""

import triton.language as tl

from tdkernels import lang as td


@td.jit
def swizzle(tile, tiles_m, tiles_n, group_m):
    """Row and column of a tile, such that tiles running at the same time share rows and columns in the L2 cache."""
    width = group_m * tiles_n
    first_m = tile // width * group_m
    height = tl.minimum(tiles_m - first_m, group_m)
    return first_m + (tile % width) % height, (tile % width) // height


@td.jit
def as_aligned(size, ALIGNED: tl.constexpr):
    """``size``, which the compiler may take for a multiple of 16 elements if it is ALIGNED; see ``_operands.aligned``.

    Triton would find that out by itself, by compiling once for every combination of sizes that are 1, multiples of 16
    or neither. Kernels here take sizes as they come, so that one compiled kernel serves all aligned shapes.
    """
    return size // 16 * 16 if ALIGNED else size


@td.jit
def gemm_tile(
    acc,
    a_ptr, a_desc, a_plane, a_row, a_rows,  # A: [a_rows, K] row-major; the descriptor is [planes, rows, K]
    b_ptr, b_desc, b_col, stride_b,  # B: [N, K], or [K, N] if B_IS_KN, row-major
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
        if B_IS_KN:
            step_b = tl.cast(stride_b, tl.int64) * BLOCK_K
            b_ptrs = b_ptr + offs_n[None, :] + offs_k[:, None].to(tl.int64) * stride_b
        else:
            step_b = tl.full((), BLOCK_K, tl.int64)
            b_ptrs = b_ptr + offs_n[None, :].to(tl.int64) * stride_b + offs_k[:, None]
        mask_m = offs_m[:, None] < a_rows
        mask_n = offs_n[None, :] < N
        for k in range(0, K, BLOCK_K):
            a = tl.load(a_ptrs, mask=mask_m & (offs_k[None, :] < K - k), other=0.0)
            b = tl.load(b_ptrs, mask=mask_n & (offs_k[:, None] < K - k), other=0.0)
            if a.dtype == tl.float32 and PRECISION == "ieee":
                # One long chain of additions would round more often than a library does, so sum by blocks. As an
                # addition the compiler would make the chain of it again.
                part = td.dot(a, b, tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32), PRECISION)
                acc = tl.fma(part, tl.full((BLOCK_M, BLOCK_N), 1.0, tl.float32), acc)
            else:
                acc = td.dot(a, b, acc, PRECISION)
            a_ptrs += BLOCK_K
            b_ptrs += step_b
    return acc


@td.jit
def sum_in_rank_order(parts, part_bytes, offs, mask, own, me, ranks, DTYPE: tl.constexpr):
    """All ranks' partials added in fp32, in rank order; ours is at hand, rank r's is at address parts + r * part_bytes.

    Four of them are read at a time, for a read takes far longer than the addition.
    """
    total = tl.full(own.shape, 0.0, tl.float32)
    for first in range(0, ranks, 4):
        part0 = _partial_of(first, parts, part_bytes, offs, mask, me, ranks, DTYPE)
        part1 = _partial_of(first + 1, parts, part_bytes, offs, mask, me, ranks, DTYPE)
        part2 = _partial_of(first + 2, parts, part_bytes, offs, mask, me, ranks, DTYPE)
        part3 = _partial_of(first + 3, parts, part_bytes, offs, mask, me, ranks, DTYPE)
        total += td.to_float32(tl.where(first == me, own, part0))
        total += td.to_float32(tl.where(first + 1 == me, own, part1))
        total += td.to_float32(tl.where(first + 2 == me, own, part2))
        total += td.to_float32(tl.where(first + 3 == me, own, part3))
    return total


@td.jit
def _partial_of(source, parts, part_bytes, offs, mask, me, ranks, DTYPE: tl.constexpr):
    """A peer's partial; zeros for ourselves and for ranks that there are not."""
    is_peer = (source < ranks) & (source != me)
    return tl.load(td.pointer_to(parts + source * part_bytes, DTYPE) + offs, mask=mask & is_peer, other=0.0)
