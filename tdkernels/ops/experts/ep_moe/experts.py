"""The experts of a rank and the combine of their rows, as one autograd function.

Neither h, the input of w_down, nor the outputs of the experts are saved. The backward computes h again from the input
of SwiGLU. The gradient of a routing weight is the dot product of dy with the output of the expert. It equals the dot
product of dy @ w_down with h, so the output is not needed.
"""

from typing import TYPE_CHECKING

import torch

from tdkernels.ops.experts.dispatch.op import ep_combine
from tdkernels.ops.experts.grouped_gemm.dispatch import explicit_config, input_gradient, product, weight_gradient
from tdkernels.ops.experts.grouped_gemm.launch_weighted_rows import weighted_gradients
from tdkernels.ops.experts.grouped_gemm.op import group_gemm
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
    call = recv, handle, activation, explicit_config(config)
    return _ExpertsAndCombine.apply(rows, topk_weights, w_gate_up, w_down, *call)


def forward(
    rows: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, recv: "EpTokens", handle: "EpHandle",
    activation: str, config: "GroupGemmConfig | None", keep_pre: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y, the input of SwiGLU, or h without ``keep_pre``).

    Args:
        config: Config of the GEMMs from ``explicit_config``.
        keep_pre: Whether the backward needs the input of SwiGLU.

    The others are those of ``experts_and_combine``.
    """
    h, pre = product(rows, w_gate_up, recv.splits, activation, keep_pre, config)
    expert_out, _ = product(h, w_down, recv.splits, config=config)
    return ep_combine(expert_out, handle, group=handle._routing.group), h if pre is None else pre


class _ExpertsAndCombine(torch.autograd.Function):
    """If neither the rows nor w_gate_up need a gradient, h is saved, which is half as wide as the input of SwiGLU."""

    @staticmethod
    def forward(ctx, rows, topk_weights, w_gate_up, w_down, recv, handle, activation, config):
        need_drows, _, need_dgate_up, _ = ctx.needs_input_grad[:4]
        keep_pre = need_drows or need_dgate_up
        y, inner = forward(rows, w_gate_up, w_down, recv, handle, activation, config, keep_pre)
        kept_rows = rows if need_dgate_up else None
        ctx.save_for_backward(kept_rows, inner, recv.splits, recv.topk_weights, w_gate_up, w_down)
        ctx.call = handle._routing, activation if keep_pre else None
        ctx.weights_dtype = topk_weights.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        autograd.reject_second_derivatives("ep_moe")
        saved = ctx.saved_tensors
        drows, dtopk, *dw = backward(dy, *saved, *ctx.call, ctx.needs_input_grad[:4])
        autograd.clear_unwritten_rows(drows, saved[2])
        return drows, None if dtopk is None else dtopk.to(ctx.weights_dtype), *dw, *[None] * 4


@whole_call
def backward(
    dy: torch.Tensor, rows: torch.Tensor | None, inner: torch.Tensor, splits: torch.Tensor, row_weights: torch.Tensor,
    w_gate_up: torch.Tensor, w_down: torch.Tensor, routing: "Routing", activation: str | None,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of (rows, topk_weights in fp32, w_gate_up, w_down), each None if it is not needed.

    Args:
        dy: Gradient of y.
        rows: The rows that the experts multiplied, or None if w_gate_up needs no gradient.
        inner: The input of SwiGLU, or h if ``activation`` is None.
        splits: Number of rows of each expert.
        row_weights: Routing weight of each row.
        w_gate_up: First weights of this rank's experts.
        w_down: Second weights of this rank's experts.
        routing: The routing of the dispatch.
        activation: "swiglu", "swiglu_interleaved", or None.
        needs: Whether each gradient is needed.
    """
    need_drows, need_dtopk, need_dgate_up, need_ddown = needs
    d_expert_out, _ = routing.dispatch_gradient(dy, None, None, False)  # without the routing weights
    unweighted = input_gradient(d_expert_out, w_down, splits)
    dpre, weighted, dots = weighted_gradients(unweighted, inner, splits, None, row_weights, activation)
    del unweighted
    drows = dtopk = dgate_up = ddown = None
    if need_dtopk:
        _, dtopk = routing.combine(dy.new_empty(routing.rows, 0), row_numbers=dots)
    if need_ddown:
        ddown = weight_gradient(d_expert_out, weighted, splits, w_down.shape[0])
    del d_expert_out, weighted  # free their memory for the gradient of the rows
    if need_drows:
        drows = input_gradient(dpre, w_gate_up, splits)
    if need_dgate_up:
        assert rows is not None
        dgate_up = weight_gradient(dpre, rows, splits, w_gate_up.shape[0])
    return drows, dtopk, dgate_up, ddown
