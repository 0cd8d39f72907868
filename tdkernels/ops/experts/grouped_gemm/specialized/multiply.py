"""The partitions that multiply, for tiles of experts: the epilogue and the scales of ``multiply_partition``."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tdkernels.ops.common.specialized.layout import HALF_ROWS
from tdkernels.ops.common.specialized.multiply import multiply_partition
from tdkernels.ops.common.specialized.output import no_epilogue, pass_halves
from tdkernels.ops.common.specialized.vectors import scale_tile
from tdkernels.ops.experts.grouped_gemm.specialized.partitions import pass_swiglu, pass_swiglu_and_input
from tdkernels.ops.experts.grouped_gemm.specialized.scales import (
    scales_of_pair,
    scales_of_pair_step,
    scales_of_step,
    scales_of_tile,
)


@gluon.jit
def multiply_experts(
    memory, bars, steps, epilogue, WHICH: gl.constexpr, W_IS_KN: gl.constexpr, PAIR: gl.constexpr, KEEP: gl.constexpr,
    SCALING: gl.constexpr, PROMOTE: gl.constexpr,
):
    """``multiply_partition`` for tiles whose place is (first row, tile column, expert).

    epilogue: as in ``specialized.scales``
    PAIR: whether an expert has two planes, for SwiGLU
    KEEP: whether the input of SwiGLU leaves, too
    SCALING: kind of scales, "row" or "block", or ""
    """
    pass_tile: gl.constexpr = pass_swiglu_and_input if KEEP else (pass_swiglu if PAIR else pass_halves)
    passes: gl.constexpr = 3 if KEEP else (1 if PAIR else 2)
    of_tile: gl.constexpr = scales_of_pair if PAIR else scales_of_tile
    of_step: gl.constexpr = scales_of_pair_step if PAIR else scales_of_step
    prepare: gl.constexpr = of_tile if SCALING == "row" else None
    apply: gl.constexpr = scale_tile if SCALING == "row" else no_epilogue
    factors: gl.constexpr = of_step if SCALING == "block" else None
    multiply_partition(
        memory, bars, steps, epilogue, WHICH, HALF_ROWS, W_IS_KN, apply, pass_tile, passes, prepare, PROMOTE, factors
    )
