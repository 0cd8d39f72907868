"""Scales of fp8 operands in ``group_gemm_specialized_kernel``.

Arguments of several functions:

    place     (first row of the tile, tile column, expert)
    epilogue  (scales of x, rows of x, scales of w, N of a plane, steps of K, X_STEP, W_STEP, EXPERT_STEP)

An expert has one plane, or a pair of planes, gate and up. A tile of a pair has HALF_N columns of each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.ops.common.specialized.layout import BLOCK_N, HALF_M, HALF_N
from tdkernels.ops.common.specialized.vectors import (
    block_scale_pointers,
    load_block_scales,
    load_columns,
    load_half_columns,
    load_rows,
)

# ---- row-wise and tensor-wise scales ----


@gluon.jit
def _scales_of_rows(place, WHICH: gl.constexpr, epilogue):
    """Load the scales of the rows of a tile."""
    x_ptr, rows, step = epilogue[0], epilogue[1], epilogue[5]
    row = place[0] + WHICH * HALF_M
    return load_rows(x_ptr + row.to(gl.int64) * step, rows - row, step)


@gluon.jit
def scales_of_tile(place, WHICH: gl.constexpr, epilogue):
    """Load the scales of the rows and columns of a tile."""
    _, _, w_ptr, N, _, _, step, expert_step = epilogue
    col = place[1] * BLOCK_N
    w_ptr += place[2].to(gl.int64) * (N * step + expert_step) + col * step
    return _scales_of_rows(place, WHICH, epilogue), load_columns(w_ptr, N - col, step)


@gluon.jit
def scales_of_pair(place, WHICH: gl.constexpr, epilogue):
    """``scales_of_tile`` for a pair of planes."""
    _, _, w_ptr, N, _, _, step, expert_step = epilogue
    col = place[1] * HALF_N
    w_ptr += place[2].to(gl.int64) * (2 * N * step + expert_step) + col * step
    gate, up = load_half_columns(w_ptr, N - col, step), load_half_columns(w_ptr + N * step, N - col, step)
    return _scales_of_rows(place, WHICH, epilogue), (gate, up)


# ---- block-wise scales ----


@gluon.jit
def scales_of_step(place, step, WHICH: gl.constexpr, epilogue):
    """Load the block-wise scales of a step of K of a tile."""
    x_ptr, rows, w_ptr, N, blocks, _, _, _ = epilogue
    row, col = place[0] + WHICH * HALF_M, place[1] * BLOCK_N
    blocks_n = (N + HALF_N - 1) // HALF_N
    w_ptr += place[2].to(gl.int64) * (blocks_n * blocks)
    left_ptr, right_ptr = block_scale_pointers(w_ptr, col, N, blocks)
    return load_block_scales(x_ptr + row.to(gl.int64) * blocks, rows - row, left_ptr, right_ptr, blocks, step)


@gluon.jit
def scales_of_pair_step(place, step, WHICH: gl.constexpr, epilogue):
    """``scales_of_step`` for a pair of planes. N is a multiple of HALF_N."""
    x_ptr, rows, w_ptr, N, blocks, _, _, _ = epilogue
    row, blocks_n = place[0] + WHICH * HALF_M, N // HALF_N
    gate_ptr = w_ptr + (place[2].to(gl.int64) * (2 * blocks_n) + place[1]) * blocks
    up_ptr = gate_ptr + blocks_n * blocks
    return load_block_scales(x_ptr + row.to(gl.int64) * blocks, rows - row, gate_ptr, up_ptr, blocks, step)
