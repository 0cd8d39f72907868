"""Warp-specialized kernel of moe_gemm_rs, for Hopper, in Gluon.

It computes what ``moe_gemm_rs_kernel`` does, with the same slots and signals, so ranks may run either of them. The
order of the work differs: slices of the columns of the output, instead of stages of tokens. All tiles of a slice are
computed, expert by expert, before those of the next one. Then the rows of all tokens can be added for these columns. So
each slice reads the rows h [R, K] again. A stage would read the weights [E, N, K] again, which are larger if E * N > R.
A program has five partitions of warps:

    multiply    two partitions of four warps, each for half of the rows of a tile; afterwards they add rows, too
    add         two warps: add the rows of tokens, send the sums to the peers, and add the sums of all ranks
    load        one warp: fetches tiles, and loads their operands with TMA
    store       one warp: stores a finished tile, and counts it

So storing, adding and sending overlap with the main loop, except for the last slice.

Progress (invariant 1): the warps that add wait for tiles of this rank. For this rank's tokens they also wait for the
peers' sums of the same slice. Up to the last tile, the warps that load, multiply and store wait only for each other,
within a program. All work items come from queues. The sums for the peers come before this rank's tokens of the same
slice.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.calls import call, finish
from tdkernels.lang.context import rank
from tdkernels.lang.gluon_kernel import gluon_jit
from tdkernels.lang.gluon_signals import agreed_signal
from tdkernels.ops.common.specialized.layout import (
    BLOCK_N,
    PROMOTE_REGISTERS,
    REGISTERS,
    WARPS,
    make_barriers,
    make_memory,
)
from tdkernels.ops.experts.grouped_gemm.specialized.multiply import multiply_experts
from tdkernels.ops.experts.tp_moe.kernel_route import BY_EXPERT, MAX_STAGES
from tdkernels.ops.experts.tp_moe.specialized.add import add_partition
from tdkernels.ops.experts.tp_moe.specialized.tiles import load_partition, store_partition


@gluon.jit
def _load(ctx, operands, memory, bars, tiles, problem, signal, steps, slices, trace_ptr, W_IS_KN: gl.constexpr):
    """Load the tiles of each slice."""
    num_items = gl.where(signal == 0, 0, slices[0] * tiles[2])
    load_partition(ctx, operands, memory, bars, tiles, problem, num_items, slices, steps, trace_ptr, W_IS_KN)


@gluon.jit
def _multiply_and_add(
    sums, memory, bars, steps, epilogue, trace_ptr, WHICH: gl.constexpr, W_IS_KN: gl.constexpr,
    SCALING: gl.constexpr, PROMOTE: gl.constexpr, COLUMNS: gl.constexpr, CHOICES: gl.constexpr, RANKS: gl.constexpr,
    ROUND_OWN: gl.constexpr,
):
    """Compute half of the rows of each tile. After the last tile, add rows of tokens."""
    multiply_experts(memory, bars, steps, epilogue, WHICH, W_IS_KN, False, False, SCALING, PROMOTE)
    add_partition(sums, trace_ptr, COLUMNS, CHOICES, RANKS, ROUND_OWN, 4, PROMOTE)


@gluon_jit(do_not_specialize=[
    "M_shard", "R", "N", "K", "plan", "chunk_rows", "slice_firsts", "slice_unit", "large_slices", "own_delay",
    "group_m",
])
def moe_gemm_rs_specialized_kernel(
    ctx, h_desc, w_desc, h_scale_ptr, w_scale_ptr, rows_ptr, weights_ptr, table_ptr, begins_ptr, done_ptr, out_ptr,
    out_desc, z_ptr,
    M_shard, R, N, K, plan, chunk_rows, slice_firsts, slice_unit, large_slices, own_delay, group_m,
    COLUMNS: gl.constexpr, CHOICES: gl.constexpr, RANKS: gl.constexpr, W_IS_KN: gl.constexpr,
    ROUND_OWN: gl.constexpr = False, SCALING: gl.constexpr = "", X_STEP: gl.constexpr = 0, W_STEP: gl.constexpr = 0,
    EXPERT_STEP: gl.constexpr = 0, PROMOTE: gl.constexpr = False, trace_ptr=None,
):
    """Compute z as ``moe_gemm_rs_kernel`` does.

    h_desc: tensor descriptor of [1, R, K] with blocks [1, HALF_M, BLOCK_K]
    out_desc: of [1, R, N] with blocks [1, HALF_M, HALF_N]
    w_desc, W_IS_KN, SCALING to PROMOTE: as for ``group_gemm_specialized_kernel``
    done_ptr: int64 [MAX_STAGES], zero: the finished tiles of each slice
    slice_firsts, slice_unit: see ``slices``; the columns of a unit are a multiple of COLUMNS
    large_slices: number of slices, the first ones, in which the work items that add rows are large
    own_delay: number of further slices whose sums for the peers come before this rank's tokens of a slice, at least 1
    COLUMNS: columns that are added at a time, as in the portable kernel
    ROUND_OWN: as there
    """
    N = N // 8 * 8  # so that the compiler knows it
    me = rank(ctx)
    number, half, signal = call(ctx, plan)
    signal = agreed_signal(signal)
    BLOCK_K: gl.constexpr = h_desc.block_type.shape[2]
    steps = (K + BLOCK_K - 1) // BLOCK_K
    tiles = table_ptr + BY_EXPERT, begins_ptr, (N + BLOCK_N - 1) // BLOCK_N, group_m
    slices = gl.load(begins_ptr + MAX_STAGES), slice_firsts, slice_unit
    memory = make_memory(h_desc.dtype, w_desc.dtype, W_IS_KN, out_desc.dtype)
    bars = make_barriers()
    tensors = out_ptr, z_ptr, rows_ptr, weights_ptr
    sums = ctx, tensors, slices, done_ptr, M_shard, N, chunk_rows, (large_slices, own_delay), half, signal, me
    epilogue = h_scale_ptr, R, w_scale_ptr, N, steps, X_STEP, W_STEP, EXPERT_STEP
    operands, out = (h_desc, w_desc), (out_ptr, out_desc)
    gl.warp_specialize(
        [
            (
                _multiply_and_add,
                (
                    sums, memory, bars, steps, epilogue, trace_ptr, 0, W_IS_KN, SCALING, PROMOTE, COLUMNS, CHOICES,
                    RANKS, ROUND_OWN,
                ),
            ),
            (
                _multiply_and_add,
                (
                    sums, memory, bars, steps, epilogue, trace_ptr, 1, W_IS_KN, SCALING, PROMOTE, COLUMNS, CHOICES,
                    RANKS, ROUND_OWN,
                ),
            ),
            (add_partition, (sums, trace_ptr, COLUMNS, CHOICES, RANKS, ROUND_OWN, 2, PROMOTE)),
            (_load, (ctx, operands, memory, bars, tiles, (N, K), signal, steps, slices, trace_ptr, W_IS_KN)),
            (
                store_partition, (memory, bars, out, out, tiles, N, done_ptr, slices, trace_ptr, False, False, True),
            ),
        ],
        WARPS.value,
        PROMOTE_REGISTERS.value if PROMOTE else REGISTERS.value,
    )
    finish(ctx)
