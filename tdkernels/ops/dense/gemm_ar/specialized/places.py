"""Where the work items of ``gemm_ar_specialized_kernel`` are in the operands and in the output.

``problem`` is (M, N, steps of K, group_m) in all functions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.ops.common.gemm_tile import swizzle
from tdkernels.ops.common.specialized.layout import BLOCK_M, BLOCK_N


@gluon.jit
def grid_of(problem):
    """Return the number of tile rows and tile columns of the output."""
    return (problem[0] + BLOCK_M - 1) // BLOCK_M, (problem[1] + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def place_of(tile, problem):
    """Return the first row and the first column of a tile."""
    tiles_m, tiles_n = grid_of(problem)
    pid_m, pid_n = swizzle(tile, tiles_m, tiles_n, problem[3])
    return pid_m * BLOCK_M, pid_n * BLOCK_N


@gluon.jit
def place_of_item(item, problem, me, RANKS: gl.constexpr):
    """Return the first row and the first column of a tile to multiply: a PLACE of ``load_partition``."""
    tiles_m, tiles_n = grid_of(problem)
    owner = (me + 1 + item % RANKS) % RANKS
    # Ranks without a tile in the last bundle get the last tile, which they do not use.
    return place_of(gl.minimum(item // RANKS * RANKS + owner, tiles_m * tiles_n - 1), problem)
