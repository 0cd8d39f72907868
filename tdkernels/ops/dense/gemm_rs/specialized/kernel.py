"""Warp-specialized kernel of gemm_rs with transport "direct", for Hopper, in Gluon.

It does what ``gemm_rs_direct_kernel`` does, with the same work items, slots and signals, so ranks may run either of
them. A program has five partitions of warps, four of them in ``partitions`` and in ``specialized.multiply``:

    multiply    two partitions of four warps, each for half of the rows of a tile
    load        one warp: fetches work items, and loads their operands with TMA
    send        one warp: sends a tile with TMA, waits until it has arrived, and sets its signal
    add         two warps: add the partials of this rank's tiles as they arrive

So storing, sending and signalling a tile, and the sums, overlap with the main loop on every SM.

Progress (invariant 1): only the warps that add wait for other programs, and only for tiles that the other warps
compute and send, on any rank. Both kinds of work items come from queues, so that programs that have started compute all
tiles. None of these warps waits for those that add.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.calls import call, finish
from tdkernels.lang.context import data_at, rank, signal_at
from tdkernels.lang.gluon_kernel import gluon_jit
from tdkernels.lang.gluon_signals import agreed_signal, item_of_warps, request_by_warps, wait_for_ranks
from tdkernels.lang.memory import pointer_to
from tdkernels.ops.common.specialized.layout import (
    BLOCK_M,
    BLOCK_N,
    NO_HALVES,
    PROMOTE_REGISTERS,
    REGISTERS,
    WARPS,
    make_barriers,
    make_memory,
)
from tdkernels.ops.common.specialized.multiply import multiply_partition
from tdkernels.ops.common.specialized.output import no_epilogue, pass_halves
from tdkernels.ops.common.specialized.vectors import scale_tile
from tdkernels.ops.dense.gemm_rs.specialized.partitions import (
    load_partition,
    place_of,
    scales_of_step,
    scales_of_tile,
    send_partition,
)


@gluon.jit
def _add_rows(
    parts, part_bytes, z_ptr, bias_ptr, row, col, M_shard, N, ROWS: gl.constexpr, RANKS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """Add the partials of all ranks, in rank order, for ROWS rows of a tile, and store them in z at (row, col).

    The partial of rank r is at the address ``parts + r * part_bytes``.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [2, 1], [1, 0])
    dtype: gl.constexpr = z_ptr.dtype.element_ty
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    offsets = rows[:, None] * BLOCK_N + columns[None, :]
    total = gl.zeros((ROWS, BLOCK_N), gl.float32, layout)
    for source in gl.static_range(RANKS):
        partial = pointer_to(parts + source * part_bytes, dtype) + offsets
        total += gl.load(partial, eviction_policy="evict_first").to(gl.float32)
    offs_m, offs_n = row + rows, col + columns
    if HAS_BIAS:
        total += gl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(gl.float32)[None, :]
    mask = (offs_m < M_shard)[:, None] & (offs_n < N)[None, :]
    gl.store(z_ptr + offs_m[:, None].to(gl.int64) * N + offs_n[None, :], total.to(dtype), mask=mask)


@gluon.jit
def _add_partition(
    ctx, problem, z_ptr, bias_ptr, tiles, num_items, half, signal, me, ROWS: gl.constexpr, SPLIT: gl.constexpr,
    RANKS: gl.constexpr, HAS_BIAS: gl.constexpr,
):
    """Add the partials of this rank's tiles, each in SPLIT parts."""
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
        parts = data_at(ctx, half, me) + tile.to(gl.int64) * tile_bytes
        begin = item % SPLIT * part_rows
        for first in range(begin, begin + part_rows, ROWS):
            _add_rows(
                parts + first * row_bytes, tiles.to(gl.int64) * tile_bytes, z_ptr, bias_ptr, row + first, col,
                M_shard, N, ROWS, RANKS, HAS_BIAS,
            )
        item = item_of_warps(answer)


@gluon_jit(do_not_specialize=["M_shard", "N", "K", "plan", "group_m", "segment_rows"])
def gemm_rs_specialized_kernel(
    ctx, x_desc, w_desc, bias_ptr, x_scale_ptr, w_scale_ptr, z_ptr,
    desc1, desc2, desc3, desc4, desc5, desc6, desc7, desc8,
    M_shard, N, K, plan, group_m, segment_rows,
    ROWS: gl.constexpr, SPLIT: gl.constexpr, RANKS: gl.constexpr, HAS_BIAS: gl.constexpr, W_IS_KN: gl.constexpr,
    SCALING: gl.constexpr = "", X_STEP: gl.constexpr = 0, W_STEP: gl.constexpr = 0, PROMOTE: gl.constexpr = False,
):
    """Compute z as ``gemm_rs_direct_kernel`` does. N is a multiple of 16.

    x_desc: [1, W * M_shard, K], for [1, HALF_M, BLOCK_K] elements
    w_desc: [N, K], for [HALF_N, BLOCK_K] elements; W_IS_KN: [K, N], for [BLOCK_K, HALF_N]
    x_scale_ptr, w_scale_ptr: scales of fp8 operands, otherwise None
    desc1, desc2, ...: the data of rank + 1, rank + 2, ..., rank, [halves, rows, BLOCK_N], for [1, HALF_M, HALF_N]
    ROWS: rows of a tile that are added at a time
    SPLIT: parts of a tile that are added as separate work items
    SCALING: kind of scales, "row" or "block", or ""
    X_STEP, W_STEP: for "row": 1 if each row of x or of the weight has a scale, 0 if all of it has one
    PROMOTE: see ``multiply_partition``
    """
    N = N // 16 * 16  # so that the compiler knows it
    me = rank(ctx)
    number, half, signal = call(ctx, plan)
    signal = agreed_signal(signal)
    tiles = ((M_shard + BLOCK_M - 1) // BLOCK_M) * ((N + BLOCK_N - 1) // BLOCK_N)
    # A void launch has no work items: a peer may still read the data of an earlier launch.
    there = gl.where(signal != 0, tiles, 0)
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[2]
    steps = (K + BLOCK_K - 1) // BLOCK_K
    problem = M_shard, N, steps, group_m, segment_rows
    memory = make_memory(x_desc.dtype, w_desc.dtype, W_IS_KN, z_ptr.dtype.element_ty)
    bars = make_barriers()
    descs = (desc1, desc2, desc3, desc4, desc5, desc6, desc7, desc8)
    operands = x_desc, w_desc
    prepare: gl.constexpr = scales_of_tile if SCALING == "row" else None
    scaled: gl.constexpr = scale_tile if SCALING == "row" else no_epilogue
    factors: gl.constexpr = scales_of_step if SCALING == "block" else None
    epilogue = x_scale_ptr, RANKS * M_shard, w_scale_ptr, N, steps, X_STEP, W_STEP
    halves: gl.constexpr = pass_halves  # Triton 3.6 does not take the function itself
    gl.warp_specialize(
        [
            (
                multiply_partition,
                (memory, bars, steps, epilogue, 0, NO_HALVES, W_IS_KN, scaled, halves, 2, prepare, PROMOTE, factors),
            ),
            (
                multiply_partition,
                (memory, bars, steps, epilogue, 1, NO_HALVES, W_IS_KN, scaled, halves, 2, prepare, PROMOTE, factors),
            ),
            (
                _add_partition,
                (ctx, problem, z_ptr, bias_ptr, tiles, there * SPLIT, half, signal, me, ROWS, SPLIT, RANKS, HAS_BIAS),
            ),
            (load_partition, (ctx, operands, memory, bars, there * RANKS, problem, me, RANKS, W_IS_KN)),
            (send_partition, (ctx, memory, bars, descs, tiles, half, signal, me, RANKS)),
        ],
        WARPS.value,
        PROMOTE_REGISTERS.value if PROMOTE else REGISTERS.value,
    )
    finish(ctx)
