"""Launch the kernel that adds the dot products of each row."""

import torch

from tdkernels.ops.experts.tp_moe.kernel_dots import moe_dots_kernel
from tdkernels.rounding import cdiv
from tdkernels.runtime.kernel_launch import Launch, launch_cached, local_workspace_of, output_spec

_BLOCK = 256


def sums_of_dots(dots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the sums of dots [·, R] fp32 over the first axis at the assignments of the R rows: [M, k] fp32.

    ``rows`` [M, k] int32 has the row of each assignment, or -1. The sum is then 0.
    """
    operands = dots.contiguous(), rows
    return launch_cached(local_workspace_of(dots.device), ("moe_dots",), operands, _prepare)[0]


def _prepare(dots, rows):
    out = output_spec(rows, *rows.shape, dtype=torch.float32)
    args = dots, rows, out, rows.numel(), dots.shape[1], dots.shape[0]
    workspace, grid = local_workspace_of(dots.device), (cdiv(rows.numel(), _BLOCK),)
    return Launch(workspace, moe_dots_kernel, grid, args, {"BLOCK": _BLOCK}, (dots, rows), [out], [])
