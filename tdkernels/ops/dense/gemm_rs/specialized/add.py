"""The partition of ``gemm_rs_specialized_kernel`` that adds the partials of this rank's tiles as they arrive."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.context import data_at, signal_at
from tdkernels.lang.gluon_profile import mark_by_warps
from tdkernels.lang.gluon_signals import item_of_warps, request_by_warps, wait_for_ranks
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.common.specialized.layout import BLOCK_M, BLOCK_N
from tdkernels.ops.dense.direct_specialized.add import add_part
from tdkernels.ops.dense.gemm_rs.specialized.places import place_of


@gluon.jit
def add_partition(sums, ROWS: gl.constexpr, SPLIT: gl.constexpr, RANKS: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Add the partials of this rank's tiles, in two warps. A work item is one of SPLIT row blocks of a tile.

    sums: (ctx, problem as for ``place_of``, pointer to z, pointer to the bias, number of tiles of a shard, number of
        work items, half, signal, rank, trace buffer or None)
    ROWS: as for ``add_part``
    """
    ctx, problem, z_ptr, bias_ptr, tiles, num_items, half, signal, me, trace_ptr = sums
    M_shard, N, _, _, _ = problem
    tile_bytes: gl.constexpr = BLOCK_M * BLOCK_N * (z_ptr.dtype.element_ty.primitive_bitwidth // 8)
    item = item_of_warps(request_by_warps(ctx, 1))
    while item < num_items:
        answer = request_by_warps(ctx, 1)
        trace = trace_ptr, tiles * RANKS + item
        mark_by_warps(trace, "starts", 2)
        tile = item // SPLIT
        place = place_of(tile, problem, RANKS)
        mark_by_warps(trace, "waits", 2, ALL_PEERS)
        # producer: the partition that sends the tile, on every rank
        wait_for_ranks(ctx, signal_at(ctx, half, tile), tiles, signal)
        mark_by_warps(trace, "sums", 2, ALL_PEERS)
        partials = data_at(ctx, half, me) + tile.to(gl.int64) * tile_bytes
        add_part(
            partials, tiles.to(gl.int64) * tile_bytes, (), z_ptr, bias_ptr, place, item % SPLIT, M_shard, N, ROWS,
            SPLIT, RANKS, HAS_BIAS, 2,
        )
        mark_by_warps(trace, "ends", 2)
        item = item_of_warps(answer)
