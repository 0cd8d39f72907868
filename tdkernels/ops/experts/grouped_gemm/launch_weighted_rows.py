"""Launch the kernel of the gradients of the input of a grouped GEMM whose output rows have routing weights."""

import torch

from tdkernels.ops.experts.grouped_gemm.launch import launch_by_rows
from tdkernels.ops.experts.grouped_gemm.swiglu import NUMBERS
from tdkernels.ops.experts.grouped_gemm.weighted_rows import weighted_gradients_kernel
from tdkernels.runtime.kernel_launch import Launch, launch_cached, local_workspace_of, output_spec


def weighted_gradients(
    dy: torch.Tensor, inner: torch.Tensor, splits: torch.Tensor, choices: torch.Tensor | None, weights: torch.Tensor,
    activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (gradient of ``inner``, h [R, N] times the routing weights of its rows, gradients of these weights).

    The last one is in fp32 and has the shape of ``weights``, with 0 for assignments without a row. Rows that belong to
    no expert are not written.

    Args:
        dy: Gradients [R, N] of the rows of h before the routing weights are applied.
        inner: h, or with an activation its input [R, 2 * N].
        splits: Number of rows of each expert.
        choices: Assignment of each row, [R] int32: its index in ``weights``. None: the row itself.
        weights: Routing weights of all assignments in fp32.
        activation: None, "swiglu" or "swiglu_interleaved".
    """
    operands = dy.contiguous(), inner.contiguous(), splits, choices, weights
    if not dy.shape[0]:
        return torch.empty_like(operands[1]), torch.empty_like(operands[0]), torch.zeros_like(weights)
    dinner, weighted, dweights = launch_cached(
        local_workspace_of(dy.device), ("weighted gradients", activation), operands,
        lambda *of: _prepare(*of, activation),  # type: ignore[call-arg]
    )
    return dinner, weighted, dweights


def _prepare(dy, inner, splits, choices, weights, activation):
    operands, (rows, width) = (dy, inner, splits, choices, weights), dy.shape
    outputs = [
        output_spec(inner, *inner.shape), output_spec(dy, rows, width),
        output_spec(weights, *weights.shape, zeros=True),  # dropped assignments have no row
    ]
    grid, constants = launch_by_rows(rows, width, splits)
    constants["ACTIVATION"] = NUMBERS[activation]
    args = *operands, *outputs, rows, width, splits.shape[0]
    workspace = local_workspace_of(dy.device)
    return Launch(workspace, weighted_gradients_kernel, grid, args, constants, operands, outputs, [])
