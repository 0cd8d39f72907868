"""Warp-specialized kernel of moe_ag_gemm, for Hopper, in Gluon.

It does what ``moe_ag_gemm_kernel`` does, with the same slots and signals, so ranks may run either of them. A program
has five partitions of warps:

    multiply    two partitions of four warps, each for half of the rows of a tile
    load        two warps: fetch tiles, wait for the tokens of their stage, and gather their rows; TMA loads the weight
    push        one warp: in the first programs pushes this rank's tokens to the peers
    store       one warp: stores a finished tile

So pushing, loading and storing overlap with the main loop. Unlike in the portable kernel, tokens are not copied to rows
in the order of experts.

Progress (invariant 1): the warps that load wait for peers, those that push do not. Each kind of work items comes from a
queue, so that programs that have started do all of it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.calls import call, finish
from tdkernels.lang.context import data_at, num_ranks, rank
from tdkernels.lang.gluon_kernel import gluon_jit
from tdkernels.lang.gluon_signals import agreed_signal
from tdkernels.ops.common.specialized.layout import (
    BLOCK_N,
    HALF_N,
    PROMOTE_REGISTERS,
    REGISTERS,
    STEP_BYTES,
    WARPS,
    make_barriers,
    make_memory,
)
from tdkernels.ops.common.specialized.push import push_partition
from tdkernels.ops.experts.grouped_gemm.specialized.multiply import multiply_experts
from tdkernels.ops.experts.tp_moe.kernel_route import MAX_STAGES
from tdkernels.ops.experts.tp_moe.specialized.gather import ARRIVALS, gather_partition
from tdkernels.ops.experts.tp_moe.specialized.tiles import store_partition


@gluon.jit
def _push(shard, program, num_comm, trace_ptr, tiles):
    """Push this rank's tokens if this is one of the first ``num_comm`` programs.

    shard: (ctx, address of the tokens, half, signal, ``sizes``)
    """
    first_piece = 0
    if trace_ptr is not None:
        first_piece = gl.load(tiles[1] + MAX_STAGES) * tiles[2]  # after the tiles
    ctx, x_at, half, signal, sizes = shard
    M_shard, row_bytes, slot_bytes, chunk_rows, num_chunks, _, _ = sizes
    shard = M_shard, row_bytes, gl.minimum(chunk_rows, M_shard), row_bytes, 1, num_chunks, slot_bytes
    if num_comm > 0:
        push_partition(
            ctx, x_at, half, signal, shard, (None, 0, 0), program, num_comm, False, 1, trace_ptr, first_piece,
            DIVIDE_ROWS=True,
        )


@gluon_jit(do_not_specialize=[
    "M_shard", "R", "N", "K", "slot_rows", "plan", "num_comm", "chunk_rows", "stages", "group_m",
])
def moe_ag_gemm_specialized_kernel(
    ctx, x_ptr, w_desc, x_scale_ptr, w_scale_ptr, choices_ptr, table_ptr, begins_ptr, y_ptr, y_desc, pre_ptr, pre_desc,
    M_shard, R, N, K, slot_rows, plan, num_comm, chunk_rows, stages, group_m,
    CHOICES: gl.constexpr, PAIR: gl.constexpr, W_IS_KN: gl.constexpr, SCALING: gl.constexpr = "",
    X_STEP: gl.constexpr = 0, W_STEP: gl.constexpr = 0, EXPERT_STEP: gl.constexpr = 0, PROMOTE: gl.constexpr = False,
    trace_ptr=None,
):
    """Compute y as ``moe_ag_gemm_kernel`` does, without the rows [R, K].

    choices_ptr: int32 [R], the assignment of each row; a token has CHOICES assignments, see ``kernel_route``
    w_desc, y_ptr to pre_desc, PAIR to PROMOTE: as for ``group_gemm_specialized_kernel``
    num_comm: number of programs that push, 0 for one rank
    """
    N = N // 8 * 8  # so that the compiler knows it
    KEEP: gl.constexpr = pre_ptr is not None
    width: gl.constexpr = HALF_N if PAIR else BLOCK_N  # columns of the output of a tile
    me, ranks = rank(ctx), num_ranks(ctx)
    number, half, signal = call(ctx, plan)
    signal = agreed_signal(signal)
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    BLOCK_K: gl.constexpr = STEP_BYTES * 8 // dtype.primitive_bitwidth
    K = K // (BLOCK_K // 8) * (BLOCK_K // 8)  # likewise: rows have a multiple of 16 bytes
    steps = (K + BLOCK_K - 1) // BLOCK_K
    row_bytes = K * (dtype.primitive_bitwidth // 8)
    num_chunks = (M_shard + chunk_rows - 1) // chunk_rows
    x_at = x_ptr.to(gl.int64)
    sizes = M_shard, row_bytes, slot_rows * row_bytes.to(gl.int64), chunk_rows, num_chunks, ranks, stages
    tokens, waits = ((x_at, data_at(ctx, half, me)), choices_ptr), (half, signal, sizes, me)
    tiles = table_ptr, begins_ptr, (N + width - 1) // width, group_m
    memory = make_memory(dtype, w_desc.dtype, W_IS_KN, y_desc.dtype, True)
    bars = make_barriers(ARRIVALS)
    epilogue = x_scale_ptr, R, w_scale_ptr, N, steps, X_STEP, W_STEP, EXPERT_STEP
    y, pre = (y_ptr, y_desc), (pre_ptr, pre_desc)
    gl.warp_specialize(
        [
            (multiply_experts, (memory, bars, steps, epilogue, 0, W_IS_KN, PAIR, KEEP, SCALING, PROMOTE)),
            (multiply_experts, (memory, bars, steps, epilogue, 1, W_IS_KN, PAIR, KEEP, SCALING, PROMOTE)),
            (
                gather_partition,
                (ctx, tokens, w_desc, memory, bars, tiles, (N, K), steps, waits, trace_ptr, CHOICES, PAIR, W_IS_KN),
            ),
            (_push, ((ctx, x_at, half, signal, sizes), gl.program_id(0), num_comm, trace_ptr, tiles)),
            (store_partition, (memory, bars, y, pre, tiles, N, None, None, trace_ptr, PAIR, KEEP, False)),
        ],
        WARPS.value,
        PROMOTE_REGISTERS.value if PROMOTE else REGISTERS.value,
    )
    finish(ctx)
