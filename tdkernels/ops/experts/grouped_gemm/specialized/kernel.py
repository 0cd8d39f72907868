"""Warp-specialized kernel of group_gemm, for Hopper, in Gluon.

It computes what ``group_gemm_kernel`` does, with the same bits. Programs are persistent, and have three kinds of warps:

    multiply    two partitions of four warps, each for half of the rows of a tile
    load        one warp: loads operands with TMA
    store       one warp: stores a finished tile, with TMA if it has no rows of another group and no columns past N

So storing a tile overlaps with the main loop of the next one. If only the first half of the rows of a tile belongs to
its group, one partition multiplies alone, in half of the time. Tiles come from a queue, so that programs with many
such tiles compute more of them. All programs then stay in the same few groups, whose weights are in the L2 cache.
"""

from triton.experimental.gluon import language as gl

from tdkernels.lang.gluon_kernel import gluon_jit
from tdkernels.ops.common.specialized.layout import (
    BLOCK_N,
    HALF_N,
    PROMOTE_REGISTERS,
    REGISTERS,
    WARPS,
    make_barriers,
    make_memory,
)
from tdkernels.ops.experts.grouped_gemm.specialized.multiply import multiply_experts
from tdkernels.ops.experts.grouped_gemm.specialized.partitions import load_partition, store_partition


@gluon_jit(do_not_specialize=["num_experts", "R", "N", "K", "group_m"])
def group_gemm_specialized_kernel(
    x_desc, w_desc, x_scale_ptr, w_scale_ptr, splits_ptr, counter_ptr, y_ptr, y_desc, pre_ptr, pre_desc,
    num_experts, R, N, K, group_m,
    EXPERTS: gl.constexpr, PAIR: gl.constexpr, W_IS_KN: gl.constexpr, SCALING: gl.constexpr = "",
    X_STEP: gl.constexpr = 0, W_STEP: gl.constexpr = 0, EXPERT_STEP: gl.constexpr = 0, PROMOTE: gl.constexpr = False,
):
    """Compute y[rows of e] = act(x[rows of e] @ w[e].T). N is the N of a plane, a multiple of 8.

    x_desc: tensor descriptor of [1, R, K] with blocks [1, HALF_M, BLOCK_K]
    w_desc: of [planes * N, K] with blocks [HALF_N, BLOCK_K]; W_IS_KN: of [experts * K, N] with [BLOCK_K, HALF_N]
    y_desc, pre_desc: of [1, R, N] and [1, R, 2 * N] with blocks [1, HALF_M, HALF_N]; pre_ptr and pre_desc may be None
    counter_ptr: an int32 that is zero before and after the launch, the work queue
    PAIR: SwiGLU, "swiglu"; ``pre_ptr``: where to store its input
    x_scale_ptr, w_scale_ptr: scales of fp8 operands, otherwise None
    SCALING: kind of scales, "row" or "block", or "". "block" with PAIR: N is a multiple of HALF_N
    X_STEP, W_STEP, EXPERT_STEP: for "row", see ``GroupedProduct``
    PROMOTE: see ``multiply_partition``
    """
    N = N // 8 * 8  # so that the compiler knows it
    KEEP: gl.constexpr = pre_ptr is not None
    width: gl.constexpr = HALF_N if PAIR else BLOCK_N  # columns of the output of a tile
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[2]
    steps = (K + BLOCK_K - 1) // BLOCK_K
    problem = N, K, (N + width - 1) // width, group_m
    splits = splits_ptr, num_experts, R
    memory = make_memory(x_desc.dtype, w_desc.dtype, W_IS_KN, y_desc.dtype)
    bars = make_barriers()
    epilogue = x_scale_ptr, R, w_scale_ptr, N, steps, X_STEP, W_STEP, EXPERT_STEP
    registers: gl.constexpr = PROMOTE_REGISTERS if PROMOTE else REGISTERS
    operands, y, pre = (x_desc, w_desc), (y_ptr, y_desc), (pre_ptr, pre_desc)
    gl.warp_specialize(
        [
            (multiply_experts, (memory, bars, steps, epilogue, 0, W_IS_KN, PAIR, KEEP, SCALING, PROMOTE)),
            (multiply_experts, (memory, bars, steps, epilogue, 1, W_IS_KN, PAIR, KEEP, SCALING, PROMOTE)),
            (load_partition, (operands, memory, bars, splits, counter_ptr, problem, steps, EXPERTS, PAIR, W_IS_KN)),
            (store_partition, (memory, bars, y, pre, splits, problem, EXPERTS, PAIR, KEEP)),
        ],
        [WARPS.value[0], 1, 1],
        [registers.value[0], registers.value[-1], registers.value[-1]],
    )
