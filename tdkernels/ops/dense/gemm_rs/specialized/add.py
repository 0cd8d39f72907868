"""The partition of ``gemm_rs_specialized_kernel`` that adds the partials of this rank's tiles as they arrive."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.context import data_at, signal_at
from tdkernels.lang.gluon_signals import item_of_warps, request_by_warps, wait_for_ranks
from tdkernels.lang.memory import pointer_to
from tdkernels.ops.common.specialized.layout import BLOCK_M, BLOCK_N
from tdkernels.ops.dense.gemm_rs.specialized.partitions import place_of


@gluon.jit
def _add_rows(
    partials, partial_bytes, z_ptr, bias_ptr, row, col, M_shard, N, ROWS: gl.constexpr, RANKS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """Add the partials of all ranks, in rank order, for ROWS rows of a tile, and store them in z at (row, col).

    The partial of rank r is at the address ``partials + r * partial_bytes``.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [2, 1], [1, 0])
    dtype: gl.constexpr = z_ptr.dtype.element_ty
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    offsets = rows[:, None] * BLOCK_N + columns[None, :]
    total = gl.zeros((ROWS, BLOCK_N), gl.float32, layout)
    for source in gl.static_range(RANKS):
        partial = pointer_to(partials + source * partial_bytes, dtype) + offsets
        total += gl.load(partial, eviction_policy="evict_first").to(gl.float32)
    offs_m, offs_n = row + rows, col + columns
    if HAS_BIAS:
        total += gl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(gl.float32)[None, :]
    mask = (offs_m < M_shard)[:, None] & (offs_n < N)[None, :]
    gl.store(z_ptr + offs_m[:, None].to(gl.int64) * N + offs_n[None, :], total.to(dtype), mask=mask)


@gluon.jit
def add_partition(
    ctx, problem, z_ptr, bias_ptr, tiles, num_items, half, signal, me, ROWS: gl.constexpr, SPLIT: gl.constexpr,
    RANKS: gl.constexpr, HAS_BIAS: gl.constexpr,
):
    """Add the partials of this rank's tiles. A work item is one of SPLIT row blocks of a tile.

    problem: as for ``place_of``
    tiles: number of tiles of a shard
    """
    M_shard, N, _, _, _ = problem
    row_bytes: gl.constexpr = BLOCK_N * (z_ptr.dtype.element_ty.primitive_bitwidth // 8)
    tile_bytes: gl.constexpr = BLOCK_M * row_bytes
    part_rows: gl.constexpr = BLOCK_M // SPLIT
    item = item_of_warps(request_by_warps(ctx, 1))
    while item < num_items:
        answer = request_by_warps(ctx, 1)
        tile = item // SPLIT
        row, col = place_of(tile, problem, RANKS)
        # producer: the partition that sends the tile, on every rank
        wait_for_ranks(ctx, signal_at(ctx, half, tile), tiles, signal)
        partials = data_at(ctx, half, me) + tile.to(gl.int64) * tile_bytes
        begin = item % SPLIT * part_rows
        for first in range(begin, begin + part_rows, ROWS):
            _add_rows(
                partials + first * row_bytes, tiles.to(gl.int64) * tile_bytes, z_ptr, bias_ptr, row + first, col,
                M_shard, N, ROWS, RANKS, HAS_BIAS,
            )
        item = item_of_warps(answer)
