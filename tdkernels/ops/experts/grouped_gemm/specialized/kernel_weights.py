"""Warp-specialized kernel of the weight gradient of group_gemm, for Hopper, in Gluon.

It computes what ``group_gemm_weights_kernel`` does. There are the same partitions as in
``group_gemm_specialized_kernel``. A step of the main loop has rows instead of elements of K, and both operands are
columns. The number of steps depends on the group, so it travels with the first step of a tile.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tdkernels.lang.gluon_kernel import gluon_jit
from tdkernels.ops.common.specialized.layout import (
    BLOCK_M,
    BLOCK_N,
    REGISTERS,
    STAGES,
    WARPS,
    make_barriers,
    make_memory,
)
from tdkernels.ops.experts.grouped_gemm.specialized.weights import (
    LAST,
    load_weights_partition,
    multiply_weights,
    store_weights_partition,
)


@gluon_jit(do_not_specialize=["num_experts", "R", "N", "K", "group_m"])
def group_gemm_weights_specialized_kernel(
    dy_desc, x_desc, splits_ptr, counter_ptr, dw_desc, num_experts, R, N, K, group_m, EXPERTS: gl.constexpr,
):
    """Compute dw[e] = dy[rows of e].T @ x[rows of e], [num_experts, N, K]. It is zero for a group without rows.

    dy_desc: tensor descriptor of [1, R, N] with blocks [1, STEP, HALF_M]
    x_desc: of [R, K] with blocks [STEP, HALF_N]
    counter_ptr: an int32 that is zero before and after the launch, the work queue
    dw_desc: of [num_experts, N, K] with blocks [1, HALF_M, HALF_N]
    """
    tiles_m, tiles_n = (N + BLOCK_M - 1) // BLOCK_M, (K + BLOCK_N - 1) // BLOCK_N
    problem = tiles_m, tiles_n, group_m
    memory = make_memory(dy_desc.dtype, x_desc.dtype, True, dw_desc.dtype, X_IS_KM=True)
    bars = make_barriers()
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(LAST + stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_weights, (memory, bars, 0)),
            (multiply_weights, (memory, bars, 1)),
            (load_weights_partition, (
                (dy_desc, x_desc), memory, bars, (splits_ptr, num_experts, R), counter_ptr, problem,
                num_experts * tiles_m * tiles_n, EXPERTS,
            )),
            (store_weights_partition, (memory, bars, dw_desc, problem)),
        ],
        [WARPS.value[0], 1, 1],
        [REGISTERS.value[0], REGISTERS.value[-1], REGISTERS.value[-1]],
    )
