"""Warp-specialized kernel of gemm_rs with transport "direct", for Hopper, in Gluon.

It does what ``gemm_rs_direct_kernel`` does, with the same work items, slots and signals, so ranks may run either of
them. A program has five partitions of warps:

    multiply    two partitions of four warps, each for half of the rows of a tile
    load        one warp: fetches work items, and loads their operands with TMA
    send        one warp: sends a tile with TMA, waits until it has arrived, and sets its signal
    add         two warps: add the partials of this rank's tiles as they arrive

So storing, sending and signalling a tile, and the sums, overlap with the main loop on every SM.

Progress (invariant 1): only the warps that add wait for other programs, and only for tiles that the other warps
compute and send, on any rank. Both kinds of work items come from queues, so that programs that have started compute all
tiles. None of these warps waits for those that add. With split-K, the warps that multiply wait for each other, see
``split_k``.
"""

from triton.experimental.gluon import language as gl

from tdkernels.lang.calls import call, finish
from tdkernels.lang.context import rank
from tdkernels.lang.gluon_kernel import gluon_jit
from tdkernels.lang.gluon_signals import agreed_signal
from tdkernels.ops.common.specialized.layout import (
    BLOCK_M,
    BLOCK_N,
    PROMOTE_REGISTERS,
    REGISTERS,
    WARPS,
    make_barriers,
    make_memory,
)
from tdkernels.ops.dense.direct_specialized.multiply import multiply_tiles
from tdkernels.ops.dense.direct_specialized.partitions import load_partition, send_partition
from tdkernels.ops.dense.gemm_rs.specialized.add import add_partition
from tdkernels.ops.dense.gemm_rs.specialized.places import num_items_in_pairs, place_of_item, place_of_pair


@gluon_jit(do_not_specialize=[
    "M_shard", "N", "K", "plan", "group_m", "whole_tiles", "split_tiles", "num_splits", "first_flag", "segment_rows",
])
def gemm_rs_specialized_kernel(
    ctx, x_desc, w_desc, bias_ptr, x_scale_ptr, w_scale_ptr, z_ptr, sums_ptr,
    desc1, desc2, desc3, desc4, desc5, desc6, desc7, desc8,
    M_shard, N, K, plan, group_m, whole_tiles, split_tiles, num_splits, first_flag, segment_rows,
    ROWS: gl.constexpr, SPLIT: gl.constexpr, RANKS: gl.constexpr, HAS_BIAS: gl.constexpr, W_IS_KN: gl.constexpr,
    SCALING: gl.constexpr = "", X_STEP: gl.constexpr = 0, W_STEP: gl.constexpr = 0, PROMOTE: gl.constexpr = False,
    PAIRS: gl.constexpr = False, trace_ptr=None,
):
    """Compute z as ``gemm_rs_direct_kernel`` does. N is a multiple of 16.

    x_desc: tensor descriptor of [1, W * M_shard, K] with blocks [1, HALF_M, BLOCK_K]
    w_desc: of [N, K] with blocks [HALF_N, BLOCK_K]; W_IS_KN: of [K, N] with [BLOCK_K, HALF_N]
    x_scale_ptr, w_scale_ptr: scales of fp8 operands, otherwise None
    desc1, desc2, ...: of the data of rank + 1, rank + 2, ..., rank: [halves, rows, BLOCK_N] with [1, HALF_M, HALF_N]
    sums_ptr: sums in fp32 of the tiles that are split along K, or None: no tile is
    whole_tiles, split_tiles, num_splits: see ``split_of``; first_flag: number of the first of its flags
    ROWS: rows of a tile that are added at a time
    SPLIT: row blocks of a tile that are added as separate work items
    SCALING: kind of scales, "row" or "block", or ""
    X_STEP, W_STEP: for "row": 1 if each row of x or of the weight has a scale, 0 if all of it has one
    PROMOTE: see ``multiply_partition``
    PAIRS: the last tile row of each shard has at most HALF_M rows, and two of them are one work item, see
        ``place_of_pair``. There is no split-K then.
    """
    N = N // 16 * 16  # so that the compiler knows it
    me = rank(ctx)
    number, half, signal = call(ctx, plan)
    signal = agreed_signal(signal)
    tiles = ((M_shard + BLOCK_M - 1) // BLOCK_M) * ((N + BLOCK_N - 1) // BLOCK_N)
    # A void launch has no work items: a peer may still read the data of an earlier launch.
    num_tiles = gl.where(signal != 0, tiles, 0)
    num_items, num_sums = num_tiles * RANKS, num_tiles * SPLIT
    first_piece = tiles * (RANKS + SPLIT)
    last_wave = whole_tiles, split_tiles, num_splits
    splits = sums_ptr, ctx, first_flag, signal, num_splits, trace_ptr, first_piece
    SPLIT_K: gl.constexpr = sums_ptr is not None
    if SPLIT_K:
        num_items += gl.where(signal != 0, split_tiles * (num_splits - 1), 0)
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[2]
    steps = (K + BLOCK_K - 1) // BLOCK_K
    problem = M_shard, N, steps, group_m, segment_rows
    if PAIRS:
        num_items = gl.where(signal != 0, num_items_in_pairs(problem, RANKS), 0)
    memory = make_memory(x_desc.dtype, w_desc.dtype, W_IS_KN, z_ptr.dtype.element_ty)
    bars = make_barriers()
    descs = (desc1, desc2, desc3, desc4, desc5, desc6, desc7, desc8)
    operands = x_desc, w_desc
    epilogue = x_scale_ptr, RANKS * M_shard, w_scale_ptr, N, steps, X_STEP, W_STEP
    # Triton 3.6 does not accept the function itself as an argument.
    place: gl.constexpr = place_of_pair if PAIRS else place_of_item
    sums = ctx, problem, z_ptr, bias_ptr, tiles, num_sums, half, signal, me, trace_ptr
    gl.warp_specialize(
        [
            (multiply_tiles, (memory, bars, steps, epilogue, splits, 0, W_IS_KN, SCALING, PROMOTE, SPLIT_K)),
            (multiply_tiles, (memory, bars, steps, epilogue, splits, 1, W_IS_KN, SCALING, PROMOTE, SPLIT_K)),
            (add_partition, (sums, ROWS, SPLIT, RANKS, HAS_BIAS)),
            (
                load_partition,
                (
                    ctx, operands, memory, bars, num_items, problem, me, last_wave, trace_ptr, first_piece, RANKS,
                    W_IS_KN, place, SPLIT_K, PAIRS,
                ),
            ),
            (send_partition, (ctx, memory, bars, descs, tiles, half, signal, me, trace_ptr, RANKS, SPLIT_K, PAIRS)),
        ],
        WARPS.value,
        PROMOTE_REGISTERS.value if PROMOTE else REGISTERS.value,
    )
    finish(ctx)
