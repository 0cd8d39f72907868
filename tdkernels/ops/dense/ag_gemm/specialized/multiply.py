"""The partitions of ``ag_gemm_specialized_kernel`` that multiply: the bias and the scales of ``multiply_partition``.

Arguments of several functions:

    place     (first row in the shard, first column, 4 * shard + weight); if tiles have rows of several shards, these
              are one shard, number 0
    epilogue  (weights, pointers to the biases, of_x, scales of the weight, steps of K, X_STEP, W_STEP); with scales
              there is one weight
    weights   as in ``partitions``
    of_x      (rank, scales of its rows, address of the gathered scales, rows of a shard, bytes of its scales). If tiles
              have rows of several shards, the rank is negative, so that all scales are gathered ones, and the rows are
              those of all shards
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.lang.memory import pointer_to
from tdkernels.ops.common.specialized.layout import HALF_COLUMNS, HALF_M
from tdkernels.ops.common.specialized.multiply import multiply_partition
from tdkernels.ops.common.specialized.output import no_epilogue, pass_halves
from tdkernels.ops.common.specialized.vectors import (
    block_scale_pointers,
    load_block_scales,
    load_columns,
    load_rows,
    plus_bias,
    times_scales,
)
from tdkernels.ops.dense.ag_gemm.specialized.partitions import columns_of, of_weight


@gluon.jit
def bias_of_tile(place, WHICH: gl.constexpr, epilogue):
    """Load the bias of the columns of a tile."""
    which, col = place[2] % 4, place[1]
    return load_columns(of_weight(which, epilogue[1]) + col, columns_of(which, epilogue[0]) - col, 1)


@gluon.jit
def add_bias(half, place, WHICH: gl.constexpr, side: gl.constexpr, prepared):
    """Add the bias to half a tile."""
    return plus_bias(half, prepared[1], side)


@gluon.jit
def _scales_of_shard(source, of_x):
    """Return the pointer to the scales of the rows of a shard."""
    me, own_ptr, gathered, _, scales_bytes = of_x
    address = gl.where(source == me, own_ptr.to(gl.int64), gathered + source * scales_bytes)
    return pointer_to(address, gl.float32)


@gluon.jit
def scales_of_tile(place, WHICH: gl.constexpr, epilogue):
    """Load the scales of the rows and columns of a tile, and the bias, if there is one.

    The first slice of the rows has arrived, and their scales with it.
    """
    weights, bias_ptrs, of_x, w_ptr, _, x_step, w_step = epilogue
    row, col = place[0] + WHICH * HALF_M, place[1]
    of_rows = load_rows(_scales_of_shard(place[2] // 4, of_x) + row * x_step, of_x[3] - row, x_step)
    of_columns = load_columns(w_ptr + col * w_step, weights[2] - col, w_step)
    # Without a bias, this value is not used.
    bias = of_columns if bias_ptrs[0] is None else bias_of_tile(place, WHICH, epilogue)
    return of_rows, of_columns, bias


@gluon.jit
def scale_tile(half, place, WHICH: gl.constexpr, side: gl.constexpr, prepared):
    """Multiply half a tile by its scales, and add the bias, if there is one."""
    of_rows, of_columns, bias = prepared[1]
    half = times_scales(half, of_rows, of_columns, side)
    return half if prepared[0][1][0] is None else plus_bias(half, bias, side)


@gluon.jit
def scales_of_step(place, step, WHICH: gl.constexpr, epilogue):
    """Load the block-wise scales of a step of K of a tile, whose first slice of rows has arrived."""
    weights, _, of_x, w_ptr, blocks, _, _ = epilogue
    row, col = place[0] + WHICH * HALF_M, place[1]
    x_ptr = _scales_of_shard(place[2] // 4, of_x) + row.to(gl.int64) * blocks
    left_ptr, right_ptr = block_scale_pointers(w_ptr, col, weights[2], blocks)
    return load_block_scales(x_ptr, of_x[3] - row, left_ptr, right_ptr, blocks, step)


@gluon.jit
def multiply_tiles(
    memory, bars, steps, epilogue, WHICH: gl.constexpr, W_IS_KN: gl.constexpr, HAS_BIAS: gl.constexpr,
    SCALING: gl.constexpr, PROMOTE: gl.constexpr,
):
    """``multiply_partition`` with a bias or scales. SCALING: kind of scales, "row" or "block", or ""."""
    prepare: gl.constexpr = scales_of_tile if SCALING == "row" else (bias_of_tile if HAS_BIAS else None)
    apply: gl.constexpr = scale_tile if SCALING == "row" else (add_bias if HAS_BIAS else no_epilogue)
    factors: gl.constexpr = scales_of_step if SCALING == "block" else None
    pass_tile: gl.constexpr = pass_halves  # Triton 3.6 does not accept the function itself as an argument
    multiply_partition(
        memory, bars, steps, epilogue, WHICH, HALF_COLUMNS, W_IS_KN, apply, pass_tile, 2, prepare, PROMOTE, factors
    )
