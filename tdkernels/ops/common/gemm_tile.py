"""Device functions for one output tile of a GEMM: main loop, epilogue, and layouts for storing accumulators."""

from typing import NamedTuple

import triton.language as tl

from tdkernels import lang as td


class Product(NamedTuple):
    """Compile-time properties of a GEMM x @ weight.T: the argument ``PRODUCT`` of kernels.

    Attributes:
        block_m: Rows per tile.
        block_n: Columns per tile.
        block_k: Step of the main loop.
        elem_bytes: Bytes per element of x.
        aligned: Whether sizes and strides are multiples of 16 elements (``gemm_operands.aligned``).
        has_bias: Whether the epilogue adds a bias.
        use_tma: Whether operands are read through tensor descriptors.
        w_is_kn: Whether the memory layout of the weight is [K, N] instead of [N, K].
        precision: The ``input_precision`` of ``tl.dot`` for fp32.
        out_bytes: Bytes per element of the output and of partial sums that are sent.
        scaling: "" for unscaled operands, otherwise "row" or "block" (``scaling.Scales``).
        x_scale_step: For "row": 1 if each row of x has a scale, 0 if all of x has one.
        w_scale_step: For "row": 1 if each row of the weight has a scale, 0 if all of it has one.
        imprecise_k: ``IMPRECISE_K`` of ``td.dot``.
        leaves: Number of leaves of the reduction tree over K that this rank computes, see ``autotune.invariance``. 0: K
            is summed in one loop, and partials of ranks are summed in rank order.
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
    out_bytes: int
    scaling: str = ""
    x_scale_step: int = 0
    w_scale_step: int = 0
    imprecise_k: int | None = None
    leaves: int = 0


@td.jit
def swizzle(tile, tiles_m, tiles_n, group_m):
    """Return (row, column) of a tile in grouped order: tiles that run concurrently share operands in the L2 cache."""
    width = group_m * tiles_n
    first_m = tile // width * group_m
    height = tl.minimum(tiles_m - first_m, group_m)
    return first_m + (tile % width) % height, (tile % width) // height


@td.jit
def as_aligned(size, ALIGNED: tl.constexpr):
    """Return ``size``; if ALIGNED (``gemm_operands.aligned``), the compiler knows that it is a multiple of 16.

    Triton's integer specialization would also find this out, but it compiles a kernel for every combination of sizes
    that are 1, multiples of 16, or neither. Kernels here are not specialized on sizes, so that one compiled kernel
    serves all aligned shapes.
    """
    return size // 16 * 16 if ALIGNED else size


@td.jit
def add_product(acc, a, b, PRECISION: tl.constexpr):
    """Return acc + a @ b in fp32."""
    if b.dtype == tl.float32 and PRECISION == "ieee":
        # One long chain of additions has a larger rounding error than a library, so the sum is blocked. The fma keeps
        # the compiler from fusing an addition into the chain again.
        part = td.dot(a, b, tl.full(acc.shape, 0.0, tl.float32), PRECISION)
        return tl.fma(part, tl.full(acc.shape, 1.0, tl.float32), acc)
    else:
        return td.dot(a, b, acc, PRECISION)


@td.jit
def add_scaled(acc, a, b, k, K, x_scale, rows, w_scale, col, N, PRODUCT: tl.constexpr):
    """Return acc plus the product of two blocks: with block-wise scales, times the scales of the blocks at column k."""
    if PRODUCT.scaling == "block":
        # Loaded before the product, which hides the latency of the loads.
        scale_x, scale_w = block_scales(k, K, x_scale, rows, w_scale, col, N, PRODUCT)
        part = td.dot(a, b, tl.full(acc.shape, 0.0, tl.float32), PRODUCT.precision)
        if PRODUCT.block_n <= 128:
            return acc + part * (scale_x * scale_w)[:, None]
        else:
            return acc + part * (scale_x[:, None] * scale_w[None, :])
    else:
        return td.dot(a, b, acc, PRODUCT.precision, PRODUCT.imprecise_k)


@td.jit
def block_scales(k, K, x_scale, rows, w_scale, col, N, PRODUCT: tl.constexpr):
    """Return the block-wise scales of the rows and of the columns of a tile, for the blocks at column k.

    A tile with at most 128 columns lies in one block, so the second is a scalar. A thread loads it once, instead of
    once for each of its columns.
    """
    blocks = (K + 127) // 128
    offs_m = tl.arange(0, PRODUCT.block_m)
    scale_x = tl.load(x_scale + offs_m * blocks + k // 128, mask=offs_m < rows, other=0.0)
    w_ptr = w_scale + col // 128 * blocks + k // 128
    scale_w = tl.load(w_ptr)
    if PRODUCT.block_n > 128:
        tl.static_assert(PRODUCT.block_n == 256)
        other = tl.load(w_ptr + blocks, mask=col + 128 < N, other=0.0)
        scale_w = tl.where(tl.arange(0, 256) < 128, scale_w, other)
    return scale_x, scale_w


@td.jit
def scaled_by_rows(acc, x_scale, rows, w_scale, col, N, PRODUCT: tl.constexpr):
    """Return acc times the scales of its rows and of its columns."""
    offs_m = tl.arange(0, PRODUCT.block_m)
    scale_x = tl.load(x_scale + offs_m * PRODUCT.x_scale_step, mask=offs_m < rows, other=0.0)
    offs_n = col + tl.arange(0, PRODUCT.block_n)
    scale_w = tl.load(w_scale + offs_n * PRODUCT.w_scale_step, mask=offs_n < N, other=0.0)
    return acc * scale_x[:, None] * scale_w[None, :]


@td.jit
def scale_of_row(x_scale, row, K, PRODUCT: tl.constexpr):
    """Return the pointer to the scales of row ``row`` of x, for ``gemm_tile``.

    For unscaled operands the result is not used. It is not None, because Triton 3.6 rejects functions that return None.
    """
    if PRODUCT.scaling == "block":
        return x_scale + row.to(tl.int64) * ((K + 127) // 128)
    elif PRODUCT.scaling == "row":
        return x_scale + row.to(tl.int64) * PRODUCT.x_scale_step
    else:
        return row


@td.jit
def gemm_tile(
    acc,
    a_ptr, a_desc, a_plane, a_row, a_rows,  # A: [a_rows, K] row-major; the descriptor is [planes, rows, K]
    b_ptr, b_desc, b_col, stride_b,  # B: [N, K], or [K, N] if PRODUCT.w_is_kn, row-major
    N, K, stride_am, PRODUCT: tl.constexpr, x_scale=None, scaled_rows=0, w_scale=None, DTYPE: tl.constexpr = None,
):
    """Return acc + A[a_row : +BLOCK_M] @ B[b_col : +BLOCK_N].T over the first K columns, fp32 [BLOCK_M, BLOCK_N].

    Rows past ``a_rows`` and columns past ``N`` are undefined. The caller does not store them, and they do not affect
    other rows and columns.

    With scaled operands, acc must be zero. ``x_scale`` points to the scales of the first row of the tile
    (``scale_of_row``), ``w_scale`` to those of all of B; ``scaled_rows`` rows of the tile have scales.

    With PRODUCT.leaves > 1 the result is the root of the rank's reduction tree over K, not rounded; other nodes are
    rounded to DTYPE. acc must be zero, K divisible by the number of leaves times BLOCK_K, and there are no scales.
    """
    if PRODUCT.leaves > 1:
        tl.static_assert(PRODUCT.scaling == "")
        leaf_k = columns_of_leaf(K, PRODUCT)
        acc = _tree_over_k(
            a_ptr, a_desc, a_plane, a_row, a_rows, b_ptr, b_desc, b_col, stride_b, N, 0, leaf_k, stride_am,
            PRODUCT, PRODUCT.leaves, DTYPE,
        )
    else:
        acc = _main_loop(
            acc, a_ptr, a_desc, a_plane, a_row, a_rows, b_ptr, b_desc, b_col, stride_b, N, 0, K, stride_am,
            PRODUCT, x_scale, scaled_rows, w_scale,
        )
    if PRODUCT.scaling == "row":
        acc = scaled_by_rows(acc, x_scale, scaled_rows, w_scale, b_col, N, PRODUCT)
    return acc


@td.jit
def pack_node(acc, DTYPE: tl.constexpr):
    """Return an accumulator rounded to DTYPE, to be kept in registers; see ``unpack_node`` and ``add_nodes``.

    Two 16-bit numbers share a 32-bit register. As a tensor of 16-bit numbers, each would take a register of its own.
    """
    if DTYPE == tl.float32:
        return acc
    else:
        left, right = acc.reshape(acc.shape[0], acc.shape[1] // 2, 2).split()
        if td.target() == "cuda":
            # By an instruction that LLVM does not know, or it would keep the two numbers instead of the pair.
            FORMAT: tl.constexpr = "bf16x2" if DTYPE == tl.bfloat16 else "f16x2"
            return tl.inline_asm_elementwise(
                "cvt.rn." + FORMAT + ".f32 $0, $2, $1;", "=r,f,f", [left, right], tl.uint32, is_pure=True, pack=1
            )
        left = td.from_float32(left, DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
        return left | (td.from_float32(right, DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@td.jit
def unpack_node(node, DTYPE: tl.constexpr):
    """Return the rounded accumulator of ``pack_node`` in fp32."""
    if DTYPE == tl.float32:
        return node
    else:
        left = td.to_float32((node & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True))
        right = td.to_float32((node >> 16).to(tl.uint16).to(DTYPE, bitcast=True))
        return tl.join(left, right).reshape(node.shape[0], node.shape[1] * 2)


@td.jit
def add_nodes(left, right, DTYPE: tl.constexpr):
    """Return the fp32 sum of two nodes of a reduction tree, each rounded to DTYPE.

    ``left`` is the result of ``pack_node``, ``right`` an accumulator.
    """
    return unpack_node(left, DTYPE) + td.to_float32(td.from_float32(right, DTYPE))


@td.jit
def columns_of_leaf(K, PRODUCT: tl.constexpr):
    """Return the number of columns of a leaf, for a K that is divisible by PRODUCT.leaves * BLOCK_K.

    The compiler need not know that K is divisible by this. It uses that a leaf is a multiple of BLOCK_K.
    """
    return K // (PRODUCT.leaves * PRODUCT.block_k) * PRODUCT.block_k


@td.jit
def _tree_over_k(
    a_ptr, a_desc, a_plane, a_row, a_rows, b_ptr, b_desc, b_col, stride_b, N, first_k, leaf_k, stride_am,
    PRODUCT: tl.constexpr, LEAVES: tl.constexpr, DTYPE: tl.constexpr,
):
    """Return the sum of LEAVES leaves of the reduction tree, from column ``first_k`` on, in fp32.

    A leaf has ``leaf_k`` columns, a multiple of BLOCK_K. The sum of the left half is rounded to DTYPE before the right
    half is computed, so in 16 bits it takes half of the registers of an accumulator.
    """
    if LEAVES > 1:
        HALF: tl.constexpr = LEAVES // 2
        left = pack_node(_tree_over_k(
            a_ptr, a_desc, a_plane, a_row, a_rows, b_ptr, b_desc, b_col, stride_b, N, first_k, leaf_k, stride_am,
            PRODUCT, HALF, DTYPE,
        ), DTYPE)
        right = _tree_over_k(
            a_ptr, a_desc, a_plane, a_row, a_rows, b_ptr, b_desc, b_col, stride_b, N, first_k + HALF * leaf_k, leaf_k,
            stride_am, PRODUCT, HALF, DTYPE,
        )
        return add_nodes(left, right, DTYPE)
    else:
        acc = tl.full((PRODUCT.block_m, PRODUCT.block_n), 0.0, tl.float32)
        # With pointers, the leaf is an operand of its own that begins at column first_k.
        b_first = first_k * tl.cast(stride_b, tl.int64) if PRODUCT.w_is_kn else first_k
        return _main_loop(
            acc, a_ptr + first_k, a_desc, a_plane, a_row, a_rows, b_ptr + b_first, b_desc, b_col, stride_b, N,
            first_k, leaf_k, stride_am, PRODUCT,
        )


@td.jit
def _main_loop(
    acc, a_ptr, a_desc, a_plane, a_row, a_rows, b_ptr, b_desc, b_col, stride_b, N, first_k, K, stride_am,
    PRODUCT: tl.constexpr, x_scale=None, scaled_rows=0, w_scale=None,
):
    """Return acc plus the product over K columns. ``gemm_tile`` has the other arguments.

    The columns of the descriptors begin at ``first_k``, those of the pointers at their addresses.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    BLOCK_K: tl.constexpr = PRODUCT.block_k
    if PRODUCT.use_tma:
        for k in range(first_k, first_k + K, BLOCK_K):
            a = a_desc.load([a_plane, a_row, k]).reshape(BLOCK_M, BLOCK_K)
            if PRODUCT.w_is_kn:
                b = b_desc.load([k, b_col])
            else:
                b = b_desc.load([b_col, k]).T
            if PRODUCT.scaling == "":
                acc = td.dot(a, b, acc, PRODUCT.precision)
            else:
                acc = add_scaled(acc, a, b, k, K, x_scale, scaled_rows, w_scale, b_col, N, PRODUCT)
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
            if PRODUCT.scaling == "":
                acc = add_product(acc, a, b, PRODUCT.precision)
            else:
                acc = add_scaled(acc, a, b, k, K, x_scale, scaled_rows, w_scale, b_col, N, PRODUCT)
            a_ptrs += BLOCK_K
            b_ptrs += step_b
    return acc


@td.jit
def with_bias(acc, bias_ptr, offs_n, N, HAS_BIAS: tl.constexpr):
    """Return ``acc`` in fp32, plus the bias of its columns if HAS_BIAS."""
    if HAS_BIAS:
        acc += td.to_float32(tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0))[None, :]
    return acc


@td.jit
def store_rows(z_ptr, tile, offs_m, offs_n, M, N):
    """Store a tile in a contiguous matrix [M, N]. Elements outside of the matrix are masked."""
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(z_ptr + offs_m[:, None].to(tl.int64) * N + offs_n[None, :], tile, mask=mask)


@td.jit
def to_fragment_layout(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return a tile [BLOCK_M, BLOCK_N] as a vector in fragment layout: the order of Hopper's wgmma in registers.

    Each thread has eight consecutive elements, and each warp 32 times as many. So an accumulator is stored and loaded
    in whole sectors without data exchange between threads. Groups of 32 columns follow one another. On other targets
    the order has no advantage, but it is valid.
    """
    GROUP: tl.constexpr = 4 if BLOCK_N >= 32 else BLOCK_N // 8
    # A row number has 2 * 8 values per group of 16 rows, a column number GROUP * 4 * 2 values per group of columns.
    bits = tile.reshape(BLOCK_M // 16, 2, 8, BLOCK_N // (8 * GROUP), GROUP, 4, 2)
    return bits.permute(3, 1, 0, 2, 5, 4, 6).reshape(BLOCK_M * BLOCK_N)


@td.jit
def from_fragment_layout(vector, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the tile [BLOCK_M, BLOCK_N] for a vector from ``to_fragment_layout``."""
    GROUP: tl.constexpr = 4 if BLOCK_N >= 32 else BLOCK_N // 8
    bits = vector.reshape(BLOCK_N // (8 * GROUP), 2, BLOCK_M // 16, 8, 4, GROUP, 2)
    return bits.permute(2, 1, 3, 0, 5, 4, 6).reshape(BLOCK_M, BLOCK_N)
