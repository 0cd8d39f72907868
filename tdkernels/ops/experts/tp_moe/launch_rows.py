"""Launch the kernel that copies gathered tokens to their rows."""

from typing import TYPE_CHECKING

import torch

from tdkernels.ops.experts.grouped_gemm.launch import launch_by_rows
from tdkernels.ops.experts.tp_moe.kernel_rows import moe_rows_kernel
from tdkernels.runtime.kernel_launch import Launch, WithinCall, launch_cached, output_spec

if TYPE_CHECKING:
    from tdkernels.ops.experts.tp_moe.routing import MoeRouting
    from tdkernels.symm.workspace import Workspace

_MOST_COLUMNS = 4096  # of a block: four vectors of 16 bytes per thread


def rows_of_workspace(x: torch.Tensor, routing: "MoeRouting", workspace: "Workspace") -> torch.Tensor:
    """Return the token of each row, [R, K], after a launch of moe_ag_gemm with these arguments in the same stream.

    Call this before the next launch of moe_ag_gemm on the workspace. Call t + 2 of a peer overwrites the tokens of call
    t. It begins only after this rank has begun call t + 1.
    """
    order, operands = WithinCall(workspace), (x, routing.choices, routing.splits)
    rows = launch_cached(order, ("moe rows", routing.sizes), operands, lambda *of: _prepare(order, routing, of))[0]
    workspace.extend_launch()
    return rows


def _prepare(workspace, routing, operands):
    x, choices, splits = operands
    rows, (tokens, width) = choices.shape[0], x.shape
    out = output_spec(x, rows, width)
    args = workspace.ctx, *operands, out, tokens, rows, width, routing.slot_rows, splits.shape[0]
    grid, constants = launch_by_rows(rows, width, splits, _MOST_COLUMNS)
    constants |= {"CHOICES": routing.num_choices, "ALIGNED": width * x.element_size() % 16 == 0}
    return Launch(workspace, moe_rows_kernel, grid, args, constants, operands, [out], [workspace.ctx])
