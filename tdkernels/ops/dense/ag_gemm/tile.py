"""Epilogue of a tile of ag_gemm, for groups on one node and on several nodes."""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.gemm_tile import store_rows, with_bias


@td.jit
def store_tile(
    y_ptr, acc, bias_ptr, source, row, col, M_shard, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    """Add the bias to a tile of the shard of rank ``source``, and store it in y [W * M_shard, N].

    ``row`` is the first row of the tile within the shard.
    """
    offs_n = col + tl.arange(0, BLOCK_N)
    acc = with_bias(acc, bias_ptr, offs_n, N, HAS_BIAS)
    y = td.from_float32(acc, y_ptr.dtype.element_ty)
    y_rows = y_ptr + source.to(tl.int64) * M_shard * N
    store_rows(y_rows, y, row + tl.arange(0, BLOCK_M), offs_n, M_shard, N)
