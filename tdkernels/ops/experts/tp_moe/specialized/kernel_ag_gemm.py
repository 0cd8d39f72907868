"""Warp-specialized kernel of moe_ag_gemm, for Hopper, in Gluon.

It does what ``moe_ag_gemm_kernel`` does, with the same slots and signals, so ranks may run either of them. A program
has five partitions of warps:

    multiply    two partitions of four warps, each for half of the rows of a tile; before, they copy tokens of this rank
    push        two warps: in the first programs push this rank's tokens to the peers; then copy tokens to their rows
    load        one warp: fetches tiles, waits for the rows of their stage, and loads their operands with TMA
    store       one warp: stores a finished tile

So pushing, copying and storing overlap with the main loop, except for the copies of this rank's tokens, which the
first tiles need.

Progress (invariant 1): only the warps that push wait for peers, after they have pushed. The warps that load wait for
copies of this rank. Each kind of work items comes from a queue, so that programs that have started do all of it.
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
    WARPS,
    make_barriers,
    make_memory,
)
from tdkernels.ops.common.specialized.push import push_partition
from tdkernels.ops.experts.grouped_gemm.specialized.multiply import multiply_experts
from tdkernels.ops.experts.tp_moe.kernel_route import MAX_STAGES
from tdkernels.ops.experts.tp_moe.specialized.copy import await_copies, copy_tokens
from tdkernels.ops.experts.tp_moe.specialized.tiles import (
    ends_of_stages,
    load_partition,
    place_by_stage,
    store_partition,
)

_OWN, _OTHERS = MAX_STAGES, gl.constexpr(MAX_STAGES.value + 1)  # words of ``done_ptr``: work items that copy


@gluon.jit
def _copy_own(copies, CHOICES: gl.constexpr, WARPS: gl.constexpr, AT_ONCE: gl.constexpr):
    """Copy this rank's tokens to their rows.

    copies: (ctx, ``places`` and ``sizes`` of ``copy_tokens``, half, signal, ``done_ptr``, rank)
    """
    ctx, places, sizes, half, signal, done_ptr, me = copies
    counters = (done_ptr + _OWN).to(gl.pointer_type(gl.int32)), done_ptr
    copy_tokens(ctx, places, sizes, half, signal, counters, 0, sizes[4], me, CHOICES, WARPS, AT_ONCE)


@gluon.jit
def _copy_and_multiply(
    copies, memory, bars, steps, epilogue, WHICH: gl.constexpr, CHOICES: gl.constexpr, W_IS_KN: gl.constexpr,
    PAIR: gl.constexpr, KEEP: gl.constexpr, SCALING: gl.constexpr, PROMOTE: gl.constexpr,
):
    """Copy this rank's tokens to their rows, and compute half of the rows of each tile."""
    _copy_own(copies, CHOICES, 4, 16)
    multiply_experts(memory, bars, steps, epilogue, WHICH, W_IS_KN, PAIR, KEEP, SCALING, PROMOTE)


@gluon.jit
def _push_and_copy(copies, program, num_comm, CHOICES: gl.constexpr, AT_ONCE: gl.constexpr):
    """Push this rank's tokens if this is one of the first ``num_comm`` programs. Then copy tokens to their rows."""
    ctx, places, sizes, half, signal, done_ptr, me = copies
    M_shard, row_bytes, slot_bytes, chunk_rows, num_chunks, ranks, _ = sizes
    shard = M_shard, row_bytes, gl.minimum(chunk_rows, M_shard), row_bytes, 1, num_chunks, slot_bytes
    if num_comm > 0:
        push_partition(ctx, places[0], half, signal, shard, (None, 0, 0), program, num_comm, False)
    _copy_own(copies, CHOICES, 2, AT_ONCE)
    counters = (done_ptr + _OTHERS).to(gl.pointer_type(gl.int32)), done_ptr
    first, last = num_chunks, ranks * num_chunks
    copy_tokens(ctx, places, sizes, half, signal, counters, first, last, me, CHOICES, 2, AT_ONCE)


@gluon.jit
def _load(
    ctx, operands, memory, bars, tiles, problem, signal, steps, waits, PAIR: gl.constexpr, W_IS_KN: gl.constexpr
):
    """Load the tiles of each stage when its rows have been copied."""
    ends = ends_of_stages(tiles)
    num_items = gl.where(signal == 0, 0, gl.max(ends, 0))
    load_partition(
        ctx, operands, memory, bars, tiles, problem, num_items, ends, steps, waits, place_by_stage, await_copies, PAIR,
        W_IS_KN,
    )


@gluon_jit(do_not_specialize=[
    "M_shard", "R", "N", "K", "slot_rows", "plan", "num_comm", "chunk_rows", "stages", "group_m",
])
def moe_ag_gemm_specialized_kernel(
    ctx, x_ptr, sorted_ptr, sorted_desc, w_desc, x_scale_ptr, w_scale_ptr, rows_ptr, table_ptr, begins_ptr, done_ptr,
    y_ptr, y_desc, pre_ptr, pre_desc,
    M_shard, R, N, K, slot_rows, plan, num_comm, chunk_rows, stages, group_m,
    CHOICES: gl.constexpr, PAIR: gl.constexpr, W_IS_KN: gl.constexpr, SCALING: gl.constexpr = "",
    X_STEP: gl.constexpr = 0, W_STEP: gl.constexpr = 0, EXPERT_STEP: gl.constexpr = 0, PROMOTE: gl.constexpr = False,
):
    """Compute y as ``moe_ag_gemm_kernel`` does, without the results for gradients.

    sorted_ptr: the rows [R, K]
    sorted_desc: tensor descriptor of [1, R, K] with blocks [1, HALF_M, BLOCK_K]
    w_desc, y_ptr to pre_desc, PAIR to PROMOTE: as for ``group_gemm_specialized_kernel``
    done_ptr: int64 [MAX_STAGES + 2], zero: the finished copies of each stage, and two queues of copies
    num_comm: number of programs that push, 0 for one rank
    """
    N = N // 8 * 8  # so that the compiler knows it
    KEEP: gl.constexpr = pre_ptr is not None
    width: gl.constexpr = HALF_N if PAIR else BLOCK_N  # columns of the output of a tile
    me, ranks = rank(ctx), num_ranks(ctx)
    number, half, signal = call(ctx, plan)
    signal = agreed_signal(signal)
    BLOCK_K: gl.constexpr = sorted_desc.block_type.shape[2]
    steps = (K + BLOCK_K - 1) // BLOCK_K
    row_bytes = K * (sorted_desc.dtype.primitive_bitwidth // 8)
    num_chunks = (M_shard + chunk_rows - 1) // chunk_rows
    places = x_ptr.to(gl.int64), data_at(ctx, half, me), sorted_ptr.to(gl.int64), rows_ptr
    sizes = M_shard, row_bytes, slot_rows * row_bytes.to(gl.int64), chunk_rows, num_chunks, ranks, stages
    copies = ctx, places, sizes, half, signal, done_ptr, me
    tiles = table_ptr, begins_ptr, (N + width - 1) // width, group_m
    memory = make_memory(sorted_desc.dtype, w_desc.dtype, W_IS_KN, y_desc.dtype)
    bars = make_barriers()
    epilogue = x_scale_ptr, R, w_scale_ptr, N, steps, X_STEP, W_STEP, EXPERT_STEP
    operands, y, pre = (sorted_desc, w_desc), (y_ptr, y_desc), (pre_ptr, pre_desc)
    gl.warp_specialize(
        [
            (
                _copy_and_multiply,
                (copies, memory, bars, steps, epilogue, 0, CHOICES, W_IS_KN, PAIR, KEEP, SCALING, PROMOTE),
            ),
            (
                _copy_and_multiply,
                (copies, memory, bars, steps, epilogue, 1, CHOICES, W_IS_KN, PAIR, KEEP, SCALING, PROMOTE),
            ),
            (_push_and_copy, (copies, gl.program_id(0), num_comm, CHOICES, 4 if PROMOTE else 8)),
            (
                _load,
                (ctx, operands, memory, bars, tiles, (N, K), signal, steps, (done_ptr, sizes, me), PAIR, W_IS_KN),
            ),
            (store_partition, (memory, bars, y, pre, tiles, N, done_ptr, 1, PAIR, KEEP, False)),
        ],
        WARPS.value,
        PROMOTE_REGISTERS.value if PROMOTE else REGISTERS.value,
    )
    finish(ctx)
