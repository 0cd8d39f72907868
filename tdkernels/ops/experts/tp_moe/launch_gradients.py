"""Launch the kernels of the backward of tp_moe besides its GEMMs."""

from typing import TYPE_CHECKING

import torch

from tdkernels.ops.experts.grouped_gemm.swiglu import NUMBERS
from tdkernels.ops.experts.tp_moe.kernel_gradients import moe_gradients_kernel, moe_rows_kernel
from tdkernels.rounding import next_power_of_2
from tdkernels.runtime import gpu
from tdkernels.runtime.kernel_launch import Launch, WithinCall, launch_cached, local_workspace_of, output_spec

if TYPE_CHECKING:
    from tdkernels.ops.experts.tp_moe.routing import MoeRouting
    from tdkernels.symm.workspace import Workspace

_MOST_COLUMNS = 1024  # of a block: eight elements per thread
_MOST_COPIED = 4096  # of a block that is only copied: four vectors of 16 bytes per thread
_PROGRAMS_PER_SM = 8


def gradients(
    dy: torch.Tensor, inner: torch.Tensor, weights: torch.Tensor, routing: "MoeRouting", activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (gradient of ``inner``, h [R, N] times the routing weights of its rows, gradient of the routing weights).

    The last one is the contribution [M, k] fp32 of this rank's columns of h. Rows that belong to no expert are not
    written.

    Args:
        dy: Gradients [R, N] of the rows of h before the routing weights are applied.
        inner: h, or with an activation its input [R, 2 * N].
        weights: Routing weights [M, k] of all ranks in fp32.
        routing: The MoeRouting.
        activation: None, "swiglu" or "swiglu_interleaved".
    """
    operands = dy.contiguous(), inner.contiguous(), routing.splits, routing.choices, weights
    dinner, weighted, dweights = launch_cached(
        local_workspace_of(dy.device), ("moe gradients", activation), operands,
        lambda *of: _prepare_gradients(*of, activation),  # type: ignore[call-arg]
    )
    return dinner, weighted, dweights


def _prepare_gradients(dy, inner, splits, choices, weights, activation):
    operands, (rows, width) = (dy, inner, splits, choices, weights), dy.shape
    outputs = [
        output_spec(inner, *inner.shape), output_spec(dy, rows, width),
        output_spec(weights, *weights.shape, zeros=True),  # dropped assignments have no row
    ]
    constants = {"ACTIVATION": NUMBERS[activation], **_constants(splits, width, _MOST_COLUMNS)}
    args = *operands, *outputs, rows, width, splits.shape[0]
    workspace, grid = local_workspace_of(dy.device), _grid(rows, dy.device)
    return Launch(workspace, moe_gradients_kernel, grid, args, constants, operands, outputs, [])


def rows_of_workspace(x: torch.Tensor, routing: "MoeRouting", workspace: "Workspace") -> torch.Tensor:
    """Return the token of each row, [R, K], after a launch of moe_ag_gemm with these arguments in the same stream.

    Call this before the next launch of moe_ag_gemm on the workspace. Call t + 2 of a peer overwrites the tokens of call
    t. It begins only after this rank has begun call t + 1.
    """
    order, operands = WithinCall(workspace), (x, routing.choices, routing.splits)
    rows = launch_cached(
        order, ("moe rows", routing.sizes), operands, lambda *of: _prepare_rows(order, routing, of)
    )[0]
    workspace.extend_launch()
    return rows


def _prepare_rows(workspace, routing, operands):
    x, choices, splits = operands
    rows, (tokens, width) = choices.shape[0], x.shape
    out = output_spec(x, rows, width)
    args = workspace.ctx, *operands, out, tokens, rows, width, routing.slot_rows, splits.shape[0]
    constants = {
        "CHOICES": routing.num_choices, "ALIGNED": width * x.element_size() % 16 == 0,
        **_constants(splits, width, _MOST_COPIED),
    }
    grid = _grid(rows, x.device)
    return Launch(workspace, moe_rows_kernel, grid, args, constants, operands, [out], [workspace.ctx])


def _constants(splits, width, most_columns):
    block = min(next_power_of_2(width), most_columns)
    # Eight elements per thread are 16 bytes of bf16.
    return {
        "EXPERTS": next_power_of_2(splits.shape[0]), "BLOCK": block, "num_warps": min(max(block // 256, 1), 4),
    }


def _grid(rows, device):
    return (min(rows, _PROGRAMS_PER_SM * gpu.num_sms(device)),)
