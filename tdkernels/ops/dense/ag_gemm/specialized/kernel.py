"""Warp-specialized kernel of ag_gemm, for Hopper, in Gluon.

It does what ``ag_gemm_kernel`` does, with the same slots and signals, so ranks may run either of them. A chunk of a
shard has a signal for each slice of its columns, so that a tile can begin when the first slice has arrived. A program
has five partitions of warps:

    multiply    two partitions of four warps, each for half of the rows of a tile
    load        one warp: fetches work items, waits for their rows, and loads their operands with TMA
    store       one warp: stores a finished tile with TMA
    push        two warps of the first programs: push this rank's shard to the peers

So every SM multiplies from the start, and storing a tile overlaps with the main loop of the next one. The last tiles
can be divided into halves, so that they occupy more SMs.

Progress (invariant 1): only the warps that load wait for other programs, and only for warps that push, on any rank.
These wait for nothing and are in the programs with the smallest ids. Both kinds of work items come from queues, so that
programs that have started push all rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.calls import call, epoch, finish, signal_of
from tdkernels.lang.context import data_at, num_ranks, rank
from tdkernels.lang.gluon_kernel import gluon_jit
from tdkernels.lang.gluon_signals import agreed_signal
from tdkernels.ops.common.specialized.layout import (
    BLOCK_M,
    BLOCK_N,
    PROMOTE_REGISTERS,
    REGISTERS,
    STEP_BYTES,
    WARPS,
    make_barriers,
    make_memory,
)
from tdkernels.ops.common.specialized.push import push_partition
from tdkernels.ops.dense.ag_gemm.specialized.multiply import multiply_tiles
from tdkernels.ops.dense.ag_gemm.specialized.partitions import load_partition, store_partition


@gluon.jit
def _begin_call(ctx, plan, me, FIXED_HALF: gl.constexpr):
    """Return (number of the half, signal of the call)."""
    if FIXED_HALF:  # after the barrier of an AsyncAllGather, which has counted this call
        half = me * 0
        signal = signal_of(ctx, epoch(ctx), plan)
    else:
        number, half, signal = call(ctx, plan)
    return half, agreed_signal(signal)


@gluon.jit
def _tile_columns(N, N_2, N_3):
    """Return (``weights`` of the partitions, number of tile columns)."""
    starts_2 = (N + BLOCK_N - 1) // BLOCK_N
    starts_3 = starts_2 + (N_2 + BLOCK_N - 1) // BLOCK_N
    return (starts_2, starts_3, N, N_2, N_3), starts_3 + (N_3 + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def _sizes_of(x_desc, K, slot_rows, scales_of_row):
    """Return (bytes of a row, of a slot, of the scales of a slot)."""
    row_bytes = K * (x_desc.dtype.primitive_bitwidth // 8)
    wide = slot_rows.to(gl.int64)
    return row_bytes, wide * row_bytes, wide * scales_of_row * 4


@gluon_jit(do_not_specialize=[
    "M_shard", "N", "N_2", "N_3", "K", "slot_rows", "plan", "num_comm", "num_whole", "chunk_tiles", "group_m",
    "segment_rows", "slice_steps",
])
def ag_gemm_specialized_kernel(
    ctx, x_ptr, x_desc, gathered_desc, w_desc, bias_ptr, y_desc, w_desc_2, bias_ptr_2, y_desc_2, w_desc_3, bias_ptr_3,
    y_desc_3, x_scale_ptr, w_scale_ptr,
    M_shard, N, N_2, N_3, K, slot_rows, plan, num_comm, num_whole, chunk_tiles, group_m, segment_rows,
    slice_steps,
    FIXED_HALF: gl.constexpr, W_IS_KN: gl.constexpr, SCALING: gl.constexpr = "",
    X_STEP: gl.constexpr = 0, W_STEP: gl.constexpr = 0, PROMOTE: gl.constexpr = False, ACROSS: gl.constexpr = False,
    trace_ptr=None,
):
    """Compute y as ``ag_gemm_kernel`` does. Each N is a multiple of 16.

    x_desc: tensor descriptor of [1, M_shard, K] with blocks [1, HALF_M, BLOCK_K]
    gathered_desc: of [halves, W * slot_rows, K] with the same blocks
    w_desc, w_desc_2, w_desc_3: of [N, K] with blocks [HALF_N, BLOCK_K]; W_IS_KN: of [K, N] with [BLOCK_K, HALF_N]
    y_desc, y_desc_2, y_desc_3: of [W * M_shard / segment_rows, segment_rows, N] with blocks [1, HALF_M, HALF_N]
    num_comm: number of programs that push
    slice_steps: steps of K with one signal; all, if other kernels or the copy engine send the rows
    num_whole: number of tiles that are not divided into halves
    x_scale_ptr, w_scale_ptr: scales of fp8 operands, otherwise None; with them there is one weight and no FIXED_HALF
    SCALING: kind of scales, "row" or "block", or ""
    X_STEP, W_STEP: for "row": 1 if each row of x or of the weight has a scale, 0 if all of it has one
    PROMOTE: see ``multiply_partition``
    ACROSS: tiles have rows of several shards, also of this rank's, which it copies to its slot. Slots have M_shard rows
        then, and outputs one segment. There is no FIXED_HALF.
    """
    me, ranks = rank(ctx), num_ranks(ctx)
    half, signal = _begin_call(ctx, plan, me, FIXED_HALF)
    weights, tiles_n = _tile_columns(N, N_2, N_3)
    tiles_m = (M_shard + BLOCK_M - 1) // BLOCK_M
    num_chunks = (tiles_m + chunk_tiles - 1) // chunk_tiles
    # A void launch has no work items: a peer may still read the data of an earlier launch.
    all_rows = (ranks * M_shard + BLOCK_M - 1) // BLOCK_M if ACROSS else ranks * tiles_m
    num_items = gl.where(signal == 0, 0, 2 * all_rows * tiles_n - num_whole)
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[2]
    steps = (K + BLOCK_K - 1) // BLOCK_K
    slices = (steps + slice_steps - 1) // slice_steps
    scales_of_row = steps if SCALING == "block" else 1
    row_bytes, slot_bytes, scales_bytes = _sizes_of(x_desc, K, slot_rows, scales_of_row)
    scales_offset = ranks * slot_bytes
    chunk_rows = gl.minimum(chunk_tiles * BLOCK_M, M_shard)
    shard = M_shard, row_bytes, chunk_rows, slice_steps * STEP_BYTES, slices, num_chunks, slot_bytes
    order = me, ranks, tiles_m, tiles_n, group_m, chunk_tiles, num_whole
    if ACROSS:
        # At least 2, because ``tile_by_arrival`` divides by one less.
        order = me * M_shard // BLOCK_M, gl.maximum(all_rows, 2), 1, tiles_n, group_m, 1, num_whole
    across = ranks, M_shard, chunk_rows, num_chunks
    memory = make_memory(x_desc.dtype, w_desc.dtype, W_IS_KN, y_desc.dtype)
    bars = make_barriers()
    operands = x_desc, gathered_desc, (w_desc, w_desc_2, w_desc_3)
    y_descs = y_desc, y_desc_2, y_desc_3
    HAS_BIAS: gl.constexpr = bias_ptr is not None
    gathered_scales = data_at(ctx, half, me) + scales_offset
    of_x = me, x_scale_ptr, gathered_scales, M_shard, scales_bytes
    if ACROSS:
        of_x = me - ranks, x_scale_ptr, gathered_scales, ranks * M_shard, scales_bytes
    epilogue = weights, (bias_ptr, bias_ptr_2, bias_ptr_3), of_x, w_scale_ptr, steps, X_STEP, W_STEP
    scales = x_scale_ptr, scales_offset + me * scales_bytes, scales_of_row
    gl.warp_specialize(
        [
            (multiply_tiles, (memory, bars, steps, epilogue, 0, W_IS_KN, HAS_BIAS, SCALING, PROMOTE)),
            (multiply_tiles, (memory, bars, steps, epilogue, 1, W_IS_KN, HAS_BIAS, SCALING, PROMOTE)),
            (
                push_partition,
                (
                    ctx, x_ptr.to(gl.int64), half, signal, shard, scales, gl.program_id(0), num_comm,
                    FIXED_HALF or ACROSS, 2, trace_ptr, num_items, False, ACROSS,
                ),
            ),
            (
                load_partition,
                (
                    ctx, operands, memory, bars, num_items, order, weights, half, signal, slot_rows, num_chunks, steps,
                    slice_steps, trace_ptr, across, W_IS_KN, ACROSS,
                ),
            ),
            (store_partition, (memory, bars, y_descs, order, weights, segment_rows, trace_ptr, ACROSS)),
        ],
        WARPS.value,
        PROMOTE_REGISTERS.value if PROMOTE else REGISTERS.value,
    )
    finish(ctx, ADVANCE=FIXED_HALF == 0)
