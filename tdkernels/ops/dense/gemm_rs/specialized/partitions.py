"""The partitions of ``gemm_rs_specialized_kernel`` that load, multiply and send. None waits for another program.

The number of a work item travels with the first step of its operands, and with its output.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tdkernels.lang.context import signal_at
from tdkernels.lang.gluon_signals import FOUR_WARPS, item_of_warp, notify_from_warp, request_by_warp
from tdkernels.lang.memory import await_tma_stores
from tdkernels.ops.common.gemm_tile import swizzle
from tdkernels.ops.dense.gemm_rs.specialized.layout import (
    BLOCK_K,
    BLOCK_M,
    BLOCK_N,
    FREE,
    FULL,
    HALF_M,
    HALF_N,
    NO_ITEM,
    ONE_WARP,
    OUT_FREE,
    OUT_FULL,
    SENDS,
    STAGES,
    read_item,
    write_item,
)
from tdkernels.ops.dense.segments import row_in_segments

# ---- load ----


@gluon.jit
def place_of(tile, problem, RANKS: gl.constexpr):
    """Return the row and the column of a tile of a shard.

    problem: (rows of a shard, N, steps of K, group_m, rows of a segment)
    """
    rows, columns, _, group_m, _ = problem
    tiles_m, tiles_n = (rows + BLOCK_M - 1) // BLOCK_M, (columns + BLOCK_N - 1) // BLOCK_N
    # A bundle has RANKS tile rows, so a group has ``group_m`` tile rows in all.
    pid_m, pid_n = swizzle(tile, tiles_m, tiles_n, gl.maximum(group_m // RANKS, 1))
    return pid_m * BLOCK_M, pid_n * BLOCK_N


@gluon.jit
def _load_steps(operands, memory, bars, item, row, col, turn, first, last, W_IS_KN: gl.constexpr):
    """Load the steps ``first`` to ``last`` of K of a tile. Return ``turn``, the number of steps so far."""
    x_desc, w_desc = operands
    x, w, _, items, _ = memory
    for step in range(first, last):
        stage = turn % STAGES
        mbarrier.wait(bars.index(FREE + stage), ((turn // STAGES) & 1) ^ 1)
        write_item(items.index(stage), item, ONE_WARP)
        full = bars.index(FULL + stage)
        mbarrier.expect(full, (BLOCK_M + BLOCK_N) * BLOCK_K * 2)
        tma.async_copy_global_to_shared(x_desc, [row, step * BLOCK_K], full, x.index(2 * stage))
        tma.async_copy_global_to_shared(x_desc, [row + HALF_M, step * BLOCK_K], full, x.index(2 * stage + 1))
        if W_IS_KN:
            tma.async_copy_global_to_shared(w_desc, [step * BLOCK_K, col], full, w.index(stage))
        else:
            tma.async_copy_global_to_shared(w_desc, [col, step * BLOCK_K], full, w.index(stage))
        turn += 1
    return turn


@gluon.jit
def load_partition(
    ctx, operands, memory, bars, num_items, problem, me, RANKS: gl.constexpr, W_IS_KN: gl.constexpr
):
    """Fetch work items, and load their operands.

    The next item is requested STAGES steps before the end of one. Its number arrives meanwhile.
    """
    _, _, steps, _, segment_rows = problem
    turn = 0
    item = item_of_warp(request_by_warp(ctx, 0))
    while item < num_items:
        row, col = place_of(item // RANKS, problem, RANKS)
        row = row_in_segments(row, (me + 1 + item % RANKS) % RANKS, RANKS, segment_rows)
        middle = gl.maximum(steps - STAGES, 0)
        turn = _load_steps(operands, memory, bars, item, row, col, turn, 0, middle, W_IS_KN)
        answer = request_by_warp(ctx, 0)
        turn = _load_steps(operands, memory, bars, item, row, col, turn, middle, steps, W_IS_KN)
        item = item_of_warp(answer)
    stage = turn % STAGES
    mbarrier.wait(bars.index(FREE + stage), ((turn // STAGES) & 1) ^ 1)
    write_item(memory[3].index(stage), NO_ITEM, ONE_WARP)
    mbarrier.arrive(bars.index(FULL + stage), count=1)


# ---- multiply ----


@gluon.jit
def _multiply_tile(memory, bars, turn, steps, WHICH: gl.constexpr, W_IS_KN: gl.constexpr):
    """Return (HALF_M rows of a tile in fp32, number of steps so far)."""
    x, w, _, _, _ = memory
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros((HALF_M, BLOCK_N), gl.float32, layout)
    for step in range(steps):
        stage = turn % STAGES
        mbarrier.wait(bars.index(FULL + stage), (turn // STAGES) & 1)
        weight = w.index(stage)
        if not W_IS_KN:
            weight = weight.permute((1, 0))
        product = warpgroup_mma(x.index(2 * stage + WHICH), weight, acc, use_acc=step > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[product])
        # The product of the step before is complete.
        mbarrier.arrive(bars.index(FREE + (turn + STAGES - 1) % STAGES), count=1, pred=step > 0)
        turn += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(bars.index(FREE + (turn + STAGES - 1) % STAGES), count=1)
    return acc, turn


@gluon.jit
def _halves(tile):
    """Return columns 0 to HALF_N - 1 and the others of [HALF_M, BLOCK_N]. No element moves to another thread."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_N, 16])
    left, right = tile.reshape((HALF_M, 2, HALF_N)).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def multiply_partition(memory, bars, steps, WHICH: gl.constexpr, W_IS_KN: gl.constexpr):
    """Compute HALF_M rows of each tile: the first ones (WHICH = 0) or the last ones."""
    _, _, out, items, sent = memory
    turn = 0  # steps so far
    mbarrier.wait(bars.index(FULL), 0)
    item = read_item(items.index(0), FOUR_WARPS)
    while item != NO_ITEM:
        acc, turn = _multiply_tile(memory, bars, turn, steps, WHICH, W_IS_KN)
        left, right = _halves(acc.to(out.dtype))
        # A tile has two phases of OUT_FULL and OUT_FREE, one for each half.
        mbarrier.wait(bars.index(OUT_FREE), 1)
        out.index(WHICH).store(left)
        if WHICH == 0:
            write_item(sent.index(0), item, FOUR_WARPS)
        fence_async_shared()
        mbarrier.arrive(bars.index(OUT_FULL), count=1)
        mbarrier.wait(bars.index(OUT_FREE), 0)
        out.index(WHICH).store(right)
        fence_async_shared()
        mbarrier.arrive(bars.index(OUT_FULL), count=1)
        mbarrier.wait(bars.index(FULL + turn % STAGES), (turn // STAGES) & 1)
        item = read_item(items.index(turn % STAGES), FOUR_WARPS)
    # Both partitions wait. Otherwise this arrival could count for the half before, in place of the other partition.
    mbarrier.wait(bars.index(OUT_FREE), 1)
    if WHICH == 0:
        write_item(sent.index(0), NO_ITEM, FOUR_WARPS)
    mbarrier.arrive(bars.index(OUT_FULL), count=1)


# ---- send ----


@gluon.jit
def _send(desc, out, half, row, col):
    """Start to send what is in ``out``."""
    for part in gl.static_range(2):
        shaped = out.index(part)._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
        tma.async_copy_shared_to_global(desc, [half, row + part * HALF_M, col], shaped)


@gluon.jit
def send_partition(ctx, memory, bars, descs, tiles, half, signal, me, RANKS: gl.constexpr):
    """Send each tile to its owner, wait until it has arrived, and set its signal there.

    descs: the data of rank + 1, rank + 2, ..., rank, [halves, rows, BLOCK_N]
    """
    _, _, out, _, sent = memory
    mbarrier.wait(bars.index(OUT_FULL), 0)
    item = read_item(sent.index(0), ONE_WARP)
    while item != NO_ITEM:
        slot = me * tiles + item // RANKS
        step = item % RANKS
        for side in gl.static_range(SENDS):
            if side > 0:
                mbarrier.wait(bars.index(OUT_FULL), side)
            for peer in gl.static_range(RANKS):
                if step == peer:
                    _send(descs[peer], out, half, slot * BLOCK_M, side * HALF_N)
            tma.store_wait(0)  # the half has been read
            mbarrier.arrive(bars.index(OUT_FREE), count=1)
        await_tma_stores()
        # waiter: the partition of the owner that adds the partials of this tile
        notify_from_warp(ctx, signal_at(ctx, half, slot), (me + 1 + step) % RANKS, signal)
        mbarrier.wait(bars.index(OUT_FULL), 0)
        item = read_item(sent.index(0), ONE_WARP)
