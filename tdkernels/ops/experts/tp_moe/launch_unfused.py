"""Launch the kernel of method "torch" of tp_moe."""

import torch

from tdkernels.ops.experts.tp_moe.kernel_unfused import moe_sums_kernel
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime.kernel_launch import Launch, launch_cached, local_workspace_of, output_spec

_MOST_COLUMNS = 1024  # of a block: eight elements per thread


def sums(y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Return the weighted sums [M, N] of the rows of y [R, N] for each token, in the dtype of y.

    Args:
        y: Rows.
        rows: Row of each assignment, [M, k] int32, or -1.
        weights: Routing weights [M, k] fp32. None: 1.
    """
    operands = y.contiguous(), rows, weights
    return launch_cached(local_workspace_of(y.device), ("moe sums", weights is None), operands, _prepare_sums)[0]


def _prepare_sums(y, rows, weights):
    (tokens, choices), width = rows.shape, y.shape[1]
    block = min(next_power_of_2(width), _MOST_COLUMNS)
    out = output_spec(y, tokens, width)
    args = y, rows, rows if weights is None else weights, out, choices, width
    constants = {"WEIGHTED": weights is not None, "BLOCK": block, "num_warps": 4}
    grid, operands = (tokens, cdiv(width, block)), (y, rows, weights)
    return Launch(local_workspace_of(y.device), moe_sums_kernel, grid, args, constants, operands, [out], [])
