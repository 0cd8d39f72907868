"""Where the work items of ``gemm_rs_specialized_kernel`` are in the operands and in the output."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.ops.common.gemm_tile import swizzle
from tdkernels.ops.common.specialized.layout import BLOCK_M, BLOCK_N, HALF_M
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
def _number_of(pid_m, pid_n, tiles_m, tiles_n, group_m):
    """Return the number of a tile whose row and column ``swizzle`` returns."""
    first_m = pid_m // group_m * group_m
    height = gl.minimum(tiles_m - first_m, group_m)
    return first_m * tiles_n + pid_n * height + pid_m - first_m


@gluon.jit
def num_items_in_pairs(problem, RANKS: gl.constexpr):
    """Return the number of work items of ``place_of_pair``."""
    rows, columns, _, _, _ = problem
    tiles_m, tiles_n = (rows + BLOCK_M - 1) // BLOCK_M, (columns + BLOCK_N - 1) // BLOCK_N
    return tiles_n * ((tiles_m - 1) * RANKS + (RANKS + 1) // 2)


@gluon.jit
def place_of_pair(item, problem, me, RANKS: gl.constexpr):
    """Return (2 * number + 1 if it is a pair, rows in x of its halves, first column) of a work item.

    The last tile row of each shard has at most HALF_M rows. A pair has those of one rank in its first half, and those
    of the next rank in the second half. The number of an item is that of ``place_of_item``, for a pair that of its
    first half. With an odd number of ranks the second half of the last pair is not used.
    """
    rows, columns, _, group_m, segment_rows = problem
    tiles_m, tiles_n = (rows + BLOCK_M - 1) // BLOCK_M, (columns + BLOCK_N - 1) // BLOCK_N
    group_m, pairs = gl.maximum(group_m // RANKS, 1), (RANKS + 1) // 2
    whole = (tiles_m - 1) * tiles_n * RANKS
    is_pair, after = item >= whole, gl.maximum(item - whole, 0)
    # A number beyond the whole tiles would divide by 0. Its place is not used.
    tile = gl.maximum(gl.minimum(item, whole - 1), 0) // RANKS
    pid_m, pid_n = swizzle(tile, gl.maximum(tiles_m - 1, 1), tiles_n, group_m)
    pid_m, pid_n = gl.where(is_pair, tiles_m - 1, pid_m), gl.where(is_pair, after // pairs, pid_n)
    step = gl.where(is_pair, after % pairs * 2, item % RANKS)
    row, owner = pid_m * BLOCK_M, (me + 1 + step) % RANKS
    first = row_in_segments(row, owner, RANKS, segment_rows)
    second = gl.where(is_pair, row_in_segments(row, (owner + 1) % RANKS, RANKS, segment_rows), first + HALF_M)
    number = _number_of(pid_m, pid_n, tiles_m, tiles_n, group_m) * RANKS + step
    return 2 * number + gl.where(is_pair, 1, 0), first, second, pid_n * BLOCK_N


@gluon.jit
def place_of_item(item, problem, me, RANKS: gl.constexpr):
    """Return the first row in x and the first column of a work item: a PLACE of ``load_partition``."""
    row, col = place_of(item // RANKS, problem, RANKS)
    return row_in_segments(row, (me + 1 + item % RANKS) % RANKS, RANKS, problem[4]), col
