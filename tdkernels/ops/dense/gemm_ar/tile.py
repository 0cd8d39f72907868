"""Device functions for a tile of the two-shot gemm_ar, for groups on one node and on several nodes."""

from typing import TYPE_CHECKING

import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.gemm_tile import gemm_tile, scale_of_row, store_rows
from tdkernels.ops.common.staging import stage_tile

if TYPE_CHECKING:
    from tdkernels.ops.common.tile_config import Tiles

_SLICE = 8192  # elements of a tile that a program sums at a time, limited by its registers


@td.jit
def multiply_tile(
    ctx, x_ptr, x_desc, w_ptr, w_desc, dst_ptr, staged, pid_m, pid_n, M, N, K, stride_w, epoch,
    PRODUCT: tl.constexpr, trace, x_scale=None, w_scale=None,
):
    """Store this rank's partial of a tile at ``dst_ptr`` and set flag number ``staged``.

    Return the result of ``td.fetch_work_item``.
    """
    BLOCK_M: tl.constexpr = PRODUCT.block_m
    BLOCK_N: tl.constexpr = PRODUCT.block_n
    td.mark(trace, "multiplies")
    acc = gemm_tile(
        tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32), x_ptr, x_desc, 0, pid_m * BLOCK_M, M,
        w_ptr, w_desc, pid_n * BLOCK_N, stride_w, N, K, K, PRODUCT,
        scale_of_row(x_scale, pid_m * BLOCK_M, K, PRODUCT), M - pid_m * BLOCK_M, w_scale,
    )
    answer = td.fetch_work_item(ctx)
    td.mark(trace, "stores")
    stage_tile(ctx, dst_ptr, staged, acc, epoch, BLOCK_M, BLOCK_N)
    return answer


@td.jit
def receive_tile(src, z_ptr, row, col, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Copy the sum of a tile from address ``src`` in this rank's buffer to z."""
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    z = tl.load(td.pointer_to(src, z_ptr.dtype.element_ty) + rows[:, None] * BLOCK_N + cols[None, :])
    store_rows(z_ptr, z, row + rows, col + cols, M, N)


def slice_columns(tiles: "Tiles") -> int:
    """Return the number of columns that are summed at a time: whole groups of 32, see ``to_fragment_layout``."""
    return min(tiles.block_n, max(32, _SLICE // tiles.block_m))
