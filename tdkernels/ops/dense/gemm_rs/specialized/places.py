"""Where the work items of ``gemm_rs_specialized_kernel`` are in the operands and in the output."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.ops.common.gemm_tile import swizzle
from tdkernels.ops.common.specialized.layout import BLOCK_M, BLOCK_N
from tdkernels.ops.dense.segments import row_in_segments


@gluon.jit
def place_of(tile, problem, RANKS: gl.constexpr):
    """Return the row and the column of a tile of a shard.

    problem: (rows of a shard, N, steps of K, group_m, rows of a segment)
    """
    rows, columns, _, group_m, _ = problem
    tiles_m, tiles_n = (rows + BLOCK_M - 1) // BLOCK_M, (columns + BLOCK_N - 1) // BLOCK_N
    # Work items compute a tile of all RANKS shards in turn, so a group of ``group_m`` tile rows spans all shards.
    pid_m, pid_n = swizzle(tile, tiles_m, tiles_n, gl.maximum(group_m // RANKS, 1))
    return pid_m * BLOCK_M, pid_n * BLOCK_N


@gluon.jit
def place_of_item(item, problem, me, RANKS: gl.constexpr):
    """Return the first row in x and the first column of a work item: a PLACE of ``load_partition``."""
    row, col = place_of(item // RANKS, problem, RANKS)
    return row_in_segments(row, (me + 1 + item % RANKS) % RANKS, RANKS, problem[4]), col
