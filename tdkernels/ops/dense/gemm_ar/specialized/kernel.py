"""Warp-specialized kernel of gemm_ar with transport "direct", for Hopper, in Gluon.

It does what ``gemm_ar_direct_kernel`` does, with the same bundles, slots and signals, so ranks may run either of them.
A program has five partitions of warps:

    multiply    two partitions of four warps, each for half of the rows of a tile
    load        one warp: fetches work items, and loads their operands with TMA
    send        one warp: sends a tile with TMA, waits until it has arrived, and sets its signal
    exchange    two warps: add the partials of this rank's tiles as they arrive, send the sums to all peers, and copy
                the sums of peers to z

When there are no more tiles to multiply, the warps that multiply exchange, too.

Progress (invariant 1): only the warps that exchange wait for other programs. An item that adds waits for tiles that the
other warps compute and send, on any rank. An item that receives waits for items that add, on a peer, which have smaller
numbers. Both kinds of work items come from queues, so that programs that have started process all of them. None of the
warps that load, multiply and send tiles waits for the exchange. With split-K, the warps that multiply wait for
each other, see ``split_k``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.calls import call, finish
from tdkernels.lang.context import rank
from tdkernels.lang.gluon_kernel import gluon_jit
from tdkernels.lang.gluon_signals import agreed_signal
from tdkernels.ops.common.specialized.layout import (
    PROMOTE_REGISTERS,
    REGISTERS,
    WARPS,
    make_barriers,
    make_memory,
)
from tdkernels.ops.dense.direct_specialized.multiply import multiply_tiles
from tdkernels.ops.dense.direct_specialized.partitions import load_partition, send_partition
from tdkernels.ops.dense.gemm_ar.specialized.exchange import exchange_partition
from tdkernels.ops.dense.gemm_ar.specialized.places import grid_of, place_of_item


@gluon.jit
def _multiply_and_exchange(
    exchange, memory, bars, steps, epilogue, splits, WHICH: gl.constexpr, W_IS_KN: gl.constexpr, SCALING: gl.constexpr,
    PROMOTE: gl.constexpr, SPLIT_K: gl.constexpr, ROWS: gl.constexpr, SPLIT: gl.constexpr, PARTS: gl.constexpr,
    RANKS: gl.constexpr, HAS_BIAS: gl.constexpr,
):
    """Compute half of the rows of each tile. After the last tile, exchange."""
    multiply_tiles(memory, bars, steps, epilogue, splits, WHICH, W_IS_KN, SCALING, PROMOTE, SPLIT_K)
    exchange_partition(exchange, ROWS, SPLIT, PARTS, RANKS, HAS_BIAS, 4)


@gluon_jit(do_not_specialize=[
    "M", "N", "K", "plan", "group_m", "whole_tiles", "split_tiles", "num_splits", "first_flag", "delay",
])
def gemm_ar_specialized_kernel(
    ctx, x_desc, w_desc, bias_ptr, x_scale_ptr, w_scale_ptr, z_ptr, sums_ptr,
    desc1, desc2, desc3, desc4, desc5, desc6, desc7, desc8,
    M, N, K, plan, group_m, whole_tiles, split_tiles, num_splits, first_flag, delay,
    ROWS: gl.constexpr, SPLIT: gl.constexpr, PARTS: gl.constexpr, RANKS: gl.constexpr, HAS_BIAS: gl.constexpr,
    W_IS_KN: gl.constexpr, SCALING: gl.constexpr = "", X_STEP: gl.constexpr = 0, W_STEP: gl.constexpr = 0,
    PROMOTE: gl.constexpr = False, trace_ptr=None,
):
    """Compute z [M, N] as ``gemm_ar_direct_kernel`` does. N is a multiple of 16.

    x_desc: tensor descriptor of [1, M, K] with blocks [1, HALF_M, BLOCK_K]
    w_desc to w_scale_ptr, SCALING to PROMOTE: as for ``gemm_rs_specialized_kernel``
    desc1, desc2, ...: of the data of rank + 1, rank + 2, ..., rank: [halves, rows, BLOCK_N] with [1, HALF_M, HALF_N]
    sums_ptr, whole_tiles to first_flag: as for ``gemm_rs_specialized_kernel``
    delay: bundles by which the sums of peers are received later than this rank's tiles are added; at most their number
    ROWS: rows of a tile that two warps add at a time
    SPLIT, PARTS: row blocks of a tile that are added, and received, as separate work items
    """
    N = N // 16 * 16  # so that the compiler knows it
    me = rank(ctx)
    number, half, signal = call(ctx, plan)
    signal = agreed_signal(signal)
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[2]
    steps = (K + BLOCK_K - 1) // BLOCK_K
    problem = M, N, steps, group_m
    tiles_m, tiles_n = grid_of(problem)
    bundles = (tiles_m * tiles_n + RANKS - 1) // RANKS
    # A void launch has no work items: a peer may still read the data of an earlier launch.
    num_tiles = gl.where(signal != 0, bundles * RANKS, 0)
    exchanged = bundles * (SPLIT + (RANKS - 1) * PARTS)
    num_items = gl.where(signal != 0, exchanged, 0)
    first_piece = bundles * RANKS + exchanged
    last_wave = whole_tiles, split_tiles, num_splits
    splits = sums_ptr, ctx, first_flag, signal, num_splits, trace_ptr, first_piece
    SPLIT_K: gl.constexpr = sums_ptr is not None
    if SPLIT_K:
        num_tiles += gl.where(signal != 0, split_tiles * (num_splits - 1), 0)
    memory = make_memory(x_desc.dtype, w_desc.dtype, W_IS_KN, z_ptr.dtype.element_ty)
    bars = make_barriers()
    descs = (desc1, desc2, desc3, desc4, desc5, desc6, desc7, desc8)
    operands = x_desc, w_desc
    epilogue = x_scale_ptr, M, w_scale_ptr, N, steps, X_STEP, W_STEP
    place: gl.constexpr = place_of_item  # Triton 3.6 does not accept the function itself as an argument
    exchange = ctx, problem, z_ptr, bias_ptr, num_items, delay, half, signal, me, trace_ptr
    gl.warp_specialize(
        [
            (
                _multiply_and_exchange,
                (
                    exchange, memory, bars, steps, epilogue, splits, 0, W_IS_KN, SCALING, PROMOTE, SPLIT_K, ROWS,
                    SPLIT, PARTS, RANKS, HAS_BIAS,
                ),
            ),
            (
                _multiply_and_exchange,
                (
                    exchange, memory, bars, steps, epilogue, splits, 1, W_IS_KN, SCALING, PROMOTE, SPLIT_K, ROWS,
                    SPLIT, PARTS, RANKS, HAS_BIAS,
                ),
            ),
            (exchange_partition, (exchange, ROWS, SPLIT, PARTS, RANKS, HAS_BIAS, 2)),
            (
                load_partition,
                (
                    ctx, operands, memory, bars, num_tiles, problem, me, last_wave, trace_ptr, first_piece, RANKS,
                    W_IS_KN, place, SPLIT_K,
                ),
            ),
            (send_partition, (ctx, memory, bars, descs, 2 * bundles, half, signal, me, trace_ptr, RANKS, SPLIT_K)),
        ],
        WARPS.value,
        PROMOTE_REGISTERS.value if PROMOTE else REGISTERS.value,
    )
    finish(ctx)
