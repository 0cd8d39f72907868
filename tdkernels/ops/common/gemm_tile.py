"""One output tile of a matrix product: the main loop that the dense operators share."""

from typing import NamedTuple

import triton.language as tl

from tdkernels import lang as td


class Product(NamedTuple):
    """What a kernel of x @ weight.T is compiled for; its argument ``PRODUCT``.

    Args:
        block_m, block_n, block_k: of a tile
        elem_bytes: of an element of x
        aligned: sizes and strides are multiples of 16 elements (``gemm_operands.aligned``)
        use_tma: the operands are read through tensor descriptors
        w_is_kn: the weight lies as [K, N], not as [N, K]
        precision: of a product of fp32 operands, as of ``tl.dot``
    """

    block_m: int
    block_n: int
    block_k: int
    elem_bytes: int
    aligned: bool
    has_bias: bool
    use_tma: bool
    w_is_kn: bool
    precision: str


@td.jit
def swizzle(tile, tiles_m, tiles_n, group_m):
    """Row and column of a tile, such that tiles running at the same time share rows and columns in the L2 cache."""
    width = group_m * tiles_n
    first_m = tile // width * group_m
    height = tl.minimum(tiles_m - first_m, group_m)
    return first_m + (tile % width) % height, (tile % width) // height


@td.jit
def as_aligned(size, ALIGNED: tl.constexpr):
    """``size``, which the compiler may take for a multiple of 16 elements if it is ALIGNED (``gemm_operands.aligned``).

    Triton would find that out by itself, by compiling once for every combination of sizes that are 1, multiples of 16
    or neither. Kernels here take sizes as they come, so that one compiled kernel serves all aligned shapes.
    """
    return size // 16 * 16 if ALIGNED else size


@td.jit
def add_product(acc, a, b, PRECISION: tl.constexpr):
    """acc + a @ b, fp32."""
    if b.dtype == tl.float32 and PRECISION == "ieee":
        # One long chain of additions would round more often than a library does, so sum by blocks. As an addition the
        # compiler would make the chain of it again.
        part = td.dot(a, b, tl.full(acc.shape, 0.0, tl.float32), PRECISION)
        return tl.fma(part, tl.full(acc.shape, 1.0, tl.float32), acc)
    else:
        return td.dot(a, b, acc, PRECISION)


@td.jit
def gemm_tile(
    acc,
    a_ptr, a_desc, a_plane, a_row, a_rows,  # A: [a_rows, K] row-major; the descriptor is [planes, rows, K]
    b_ptr, b_desc, b_col, stride_b,  # B: [N, K], or [K, N] if PRODUCT.w_is_kn, row-major
    N, K, stride_am, PRODUCT: tl.constexpr,
):
    """acc + A[a_row : +BLOCK_M] @ B[b_col : +BLOCK_N].T over the first K columns, fp32 [BLOCK_M, BLOCK_N].

    Rows past ``a_rows`` and columns past ``N`` hold anything: each depends on its own operands only, and the caller
    does not store them.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    BLOCK_K: tl.constexpr = PRODUCT.block_k
    if PRODUCT.use_tma:
        for k in range(0, K, BLOCK_K):
            a = a_desc.load([a_plane, a_row, k]).reshape(BLOCK_M, BLOCK_K)
            if PRODUCT.w_is_kn:
                b = b_desc.load([k, b_col])
            else:
                b = b_desc.load([b_col, k]).T
            acc = td.dot(a, b, acc, PRODUCT.precision)
    else:
        offs_m = a_row + tl.arange(0, BLOCK_M)
        offs_n = b_col + tl.arange(0, BLOCK_N)
        offs_k = tl.arange(0, BLOCK_K)
        a_ptrs = a_ptr + offs_m[:, None].to(tl.int64) * stride_am + offs_k[None, :]
        if PRODUCT.w_is_kn:
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
            acc = add_product(acc, a, b, PRODUCT.precision)
            a_ptrs += BLOCK_K
            b_ptrs += step_b
    return acc


@td.jit
def with_bias(acc, bias_ptr, offs_n, N, HAS_BIAS: tl.constexpr):
    """fp32 rows plus the bias of their columns, if there is one."""
    if HAS_BIAS:
        acc += td.to_float32(tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0))[None, :]
    return acc


@td.jit
def store_rows(z_ptr, tile, offs_m, offs_n, M, N):
    """Store a tile in a contiguous [M, N]; what is outside is left out."""
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(z_ptr + offs_m[:, None].to(tl.int64) * N + offs_n[None, :], tile, mask=mask)


@td.jit
def to_fragment_layout(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile [BLOCK_M, BLOCK_N] as a vector, in the order in which Hopper's wgmma leaves it in the registers.

    Each thread has eight consecutive elements of it, and a warp 32 times as many, so an accumulator can be stored and
    loaded in whole sectors with no exchange between threads. Groups of 32 columns come one after the other. On other
    targets it is an order like any other.
    """
    GROUP: tl.constexpr = 4 if BLOCK_N >= 32 else BLOCK_N // 8
    # Of a row number the bits are 2 * 8 in a piece of 16, of a column number GROUP * 4 * 2 in a piece.
    bits = tile.reshape(BLOCK_M // 16, 2, 8, BLOCK_N // (8 * GROUP), GROUP, 4, 2)
    return bits.permute(3, 1, 0, 2, 5, 4, 6).reshape(BLOCK_M * BLOCK_N)


@td.jit
def from_fragment_layout(vector, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tile [BLOCK_M, BLOCK_N] of which ``to_fragment_layout`` made a vector."""
    GROUP: tl.constexpr = 4 if BLOCK_N >= 32 else BLOCK_N // 8
    bits = vector.reshape(BLOCK_N // (8 * GROUP), 2, BLOCK_M // 16, 8, 4, GROUP, 2)
    return bits.permute(2, 1, 3, 0, 5, 4, 6).reshape(BLOCK_M, BLOCK_N)
