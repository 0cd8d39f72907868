"""The experts of a rank and the combine of their rows, as one autograd function.

The backward needs neither h, the input of w_down, nor the rows that are combined. So they are not saved:

    h                    is computed again from the input of SwiGLU
    dtopk_weights        the dot product of dy with a combined row is that of dy @ w_down with h
"""

from typing import TYPE_CHECKING

import torch

from tdkernels.ops.experts.dispatch.op import ep_combine
from tdkernels.ops.experts.grouped_gemm.dispatch import explicit_config, input_gradient, product, weight_gradient
from tdkernels.ops.experts.grouped_gemm.launch_weighted_rows import weighted_gradients
from tdkernels.ops.experts.grouped_gemm.op import group_gemm
from tdkernels.ops.experts.grouped_gemm.validation import check_method
from tdkernels.runtime import autograd
from tdkernels.symm.whole_call import whole_call

if TYPE_CHECKING:
    from tdkernels.ops.experts.dispatch.op import EpHandle, EpTokens
    from tdkernels.ops.experts.dispatch.routing import Routing
    from tdkernels.ops.experts.grouped_gemm.config import GroupGemmConfig


def experts_and_combine(
    recv: "EpTokens", handle: "EpHandle", rows: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor, activation: str, config: "GroupGemmConfig | None",
) -> torch.Tensor:
    """Apply the experts of this rank to their rows, and combine the results to y.

    Args:
        recv: The tokens that ``receive`` returned, with the weights of their rows.
        handle: The handle that ``receive`` returned.
        rows: The rows of recv in the dtype of the weights.
        topk_weights: Routing weights [T, k].
        w_gate_up: First weights of this rank's experts.
        w_down: Second weights of this rank's experts.
        activation: "swiglu" or "swiglu_interleaved".
        config: Config of the GEMMs.
    """
    if not autograd.may_be_differentiated([rows, topk_weights, w_gate_up, w_down]):
        # Calls of group_gemm without gradients are cached, which takes the host less time.
        h = group_gemm(rows, w_gate_up, recv.splits, activation=activation, config=config)
        return ep_combine(group_gemm(h, w_down, recv.splits, config=config), handle, group=handle._routing.group)
    for name, weight in ("w_gate_up", w_gate_up), ("w_down", w_down):
        check_method("ep_moe", config, weight, name)
    call = recv, handle, activation, explicit_config(config)
    return _ExpertsAndCombine.apply(rows, topk_weights, w_gate_up, w_down, *call)


def forward(
    rows: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, recv: "EpTokens", handle: "EpHandle",
    activation: str, config: "GroupGemmConfig | None", keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (y, the input of SwiGLU or None without ``keep``).

    Args:
        config: Config of the GEMMs from ``explicit_config``.
        keep: Whether the backward needs the input of SwiGLU.

    The others are those of ``experts_and_combine``.
    """
    h, pre = product(rows, w_gate_up, recv.splits, activation, keep, config)
    made, _ = product(h, w_down, recv.splits, config=config)
    return ep_combine(made, handle, group=handle._routing.group), pre


class _ExpertsAndCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, topk_weights, w_gate_up, w_down, recv, handle, activation, config):
        y, pre = forward(rows, w_gate_up, w_down, recv, handle, activation, config, keep=True)
        ctx.save_for_backward(rows, pre, recv.splits, recv.topk_weights, w_gate_up, w_down)
        ctx.call, ctx.weights_dtype = (handle._routing, activation), topk_weights.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        autograd.reject_second_derivatives("ep_moe")
        drows, dtopk, *dw = backward(dy, *ctx.saved_tensors, *ctx.call, ctx.needs_input_grad[:4])
        return drows, None if dtopk is None else dtopk.to(ctx.weights_dtype), *dw, *[None] * 4


@whole_call
def backward(
    dy: torch.Tensor, rows: torch.Tensor, pre: torch.Tensor, splits: torch.Tensor, row_weights: torch.Tensor,
    w_gate_up: torch.Tensor, w_down: torch.Tensor, routing: "Routing", activation: str,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of (rows, topk_weights in fp32, w_gate_up, w_down), each None if it is not needed.

    Args:
        dy: Gradient of y.
        rows: The rows that the experts multiplied.
        pre: The input of SwiGLU.
        splits: Number of rows of each expert.
        row_weights: Routing weight of each row.
        w_gate_up: First weights of this rank's experts.
        w_down: Second weights of this rank's experts.
        routing: The routing of the dispatch.
        activation: "swiglu" or "swiglu_interleaved".
        needs: Whether each gradient is needed.
    """
    need_drows, need_dtopk, need_dgate_up, need_ddown = needs
    dmade, _ = routing.dispatch_gradient(dy, None, None, False)  # without the routing weights
    unweighted = input_gradient(dmade, w_down, splits)
    dpre, weighted, dots = weighted_gradients(unweighted, pre, splits, None, row_weights, activation)
    drows = dtopk = dgate_up = ddown = None
    if need_dtopk:
        _, dtopk = routing.combine(dy.new_empty(routing.rows, 0), row_numbers=dots)
    if need_ddown:
        ddown = weight_gradient(dmade, weighted, splits, w_down.shape[0])
    if need_drows:
        drows = input_gradient(dpre, w_gate_up, splits)
    if need_dgate_up:
        dgate_up = weight_gradient(dpre, rows, splits, w_gate_up.shape[0])
    return drows, dtopk, dgate_up, ddown
