"""What the kernels of AG-GEMM do with a tile, whether the group is on one node or on several."""

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.gemm_tile import store_rows, with_bias


@td.jit
def store_tile(
    y_ptr, acc, bias_ptr, source, row, col, M_shard, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    """Store a tile of the product of the source's shard, y [W * M_shard, N], with the bias."""
    offs_n = col + tl.arange(0, BLOCK_N)
    acc = with_bias(acc, bias_ptr, offs_n, N, HAS_BIAS)
    y = td.from_float32(acc, y_ptr.dtype.element_ty)
    y_rows = y_ptr + source.to(tl.int64) * M_shard * N
    store_rows(y_rows, y, row + tl.arange(0, BLOCK_M), offs_n, M_shard, N)
