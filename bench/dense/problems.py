"""Benchmark cases that are problems of the tuner, in 16 bits or with scaled fp8 operands."""

from dataclasses import dataclass

import torch

import tdkernels
from tdkernels.autotune.problem import Problem
from tdkernels.ops.common.scaled_problem import is_scaled
from tdkernels.ops.common.scaling import LAYOUTS


@dataclass(frozen=True)
class ProblemCase:
    """A problem of a dense operator.

    Attributes:
        operator: "ag_gemm", "gemm_rs" or "gemm_ar".
        shape: (M, N, K) of the whole problem.
        layout: The ``layout`` of the tuner's problem: "nk" for bf16, or one of ``scaling.LAYOUTS`` for fp8.
        ranks: Number of ranks, W.
    """

    operator: str
    shape: tuple
    layout: str
    ranks: int

    def __str__(self):
        return f"{self.operator} {'x'.join(map(str, self.shape))} {self.layout}"

    def problem(self, device):
        dtype = torch.float8_e4m3fn if self.layout in LAYOUTS else torch.bfloat16
        return Problem.on(device, self.operator, self.shape, dtype, self.layout, self.ranks, self.ranks)


def operator_call(problem):
    """Return call(operands, config=None) of the operator, for operands of the tuner."""
    op, fast = getattr(tdkernels, problem.operator), problem.layout == "scaled fast"

    def call(operands, config=None):
        x, weight, *scales = operands
        if not scales:
            return op(x, weight, config=config)
        return op(x, weight, scale_x=scales[0], scale_w=scales[1], use_fast_accum=fast, config=config)

    return call


def gemm_operands(problem, operands):
    """Return the operands of the GEMM of a rank alone: ``ag_gemm`` multiplies the rows of all ranks."""
    if problem.operator != "ag_gemm":
        return operands
    x, weight, *scales = operands
    x = x.view(torch.uint8).repeat(problem.world_size, 1).view(x.dtype)
    if is_scaled(problem):
        scales[0] = scales[0].repeat(problem.world_size, 1)
    return x, weight, *scales
