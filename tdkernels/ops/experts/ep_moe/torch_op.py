"""torch.library operators of ep_moe for torch.compile: one for the forward and one for the backward.

They need ``max_tokens``, which makes shapes static. A routing is not a tensor, so it cannot be passed from the forward
to the backward. The backward counts the ids again, and makes a dispatch of width 0 to find the source of each row. The
order of rows does not depend on the configs.
"""

import torch

from tdkernels.ops.common.config import from_text
from tdkernels.ops.experts.dispatch.config import EpConfig
from tdkernels.ops.experts.dispatch.request import DispatchRequest
from tdkernels.ops.experts.dispatch.route import plan_route, route
from tdkernels.ops.experts.ep_moe.experts import backward, forward
from tdkernels.ops.experts.ep_moe.steps import receive, rows_of
from tdkernels.ops.experts.grouped_gemm.config import GroupGemmConfig
from tdkernels.ops.experts.grouped_gemm.dispatch import explicit_config
from tdkernels.runtime import autograd, torch_op
from tdkernels.runtime.autograd import fake_gradients, pack_gradients, unpack_gradients
from tdkernels.symm.whole_call import whole_call


@whole_call
def _ep_moe(
    x, topk_ids, topk_weights, w_gate_up, w_down, num_experts, activation, quantize, max_tokens, max_tokens_per_rank,
    keep, group, ep, gemm,
):
    group, config = torch_op.group_by_name(group), from_text(EpConfig, ep) if ep else None
    recv, handle = receive(
        x, topk_ids, topk_weights, num_experts, quantize, max_tokens, max_tokens_per_rank, group, config
    )
    rows, gemm_config = rows_of(recv, x.dtype), explicit_config(from_text(GroupGemmConfig, gemm) if gemm else None)
    y, pre = forward(rows, w_gate_up, w_down, recv, handle, activation, gemm_config, keep)
    return (y, rows, pre, recv.topk_weights) if keep else (y, *(y.new_empty(0) for _ in range(3)))


@whole_call
def _ep_moe_backward(
    dy, x, topk_ids, topk_weights, w_gate_up, w_down, rows, pre, row_weights, need_dx, need_dtopk, need_dgate_up,
    need_ddown, num_experts, activation, quantize, max_tokens, _max_tokens_per_rank, group, ep,
):
    group, config = torch_op.group_by_name(group), from_text(EpConfig, ep) if ep else None
    request = DispatchRequest("ep_moe", group, x, topk_ids, num_experts, config, quantize, max_tokens)
    routing = route(plan_route(request), request)
    routing.dispatch(x.new_empty(x.shape[0], 0))
    needs = need_dx, need_dtopk, need_dgate_up, need_ddown
    drows, *gradients = backward(
        dy, rows, pre, routing.splits, row_weights, w_gate_up, w_down, routing, activation, needs
    )
    dx = routing.combine(drows)[0] if need_dx else None
    return pack_gradients((dx, *gradients), (x, topk_weights, w_gate_up, w_down), needs)


_OPERANDS = "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w_gate_up, Tensor w_down"
_SETTINGS = "int num_experts, str activation, str? quantize, SymInt max_tokens, int? max_tokens_per_rank"


def _fake_ep_moe(
    x, topk_ids, topk_weights, w_gate_up, w_down, num_experts, activation, quantize, max_tokens, _most, keep, *_call
):
    y = x.new_empty(x.shape)
    if not keep:
        return y, *(x.new_empty(0) for _ in range(3))
    rows, pre = (x.new_empty(max_tokens, width) for width in (x.shape[1], w_gate_up.shape[1]))
    return y, rows, pre, x.new_empty(max_tokens, dtype=torch.float32)


def _fake_ep_moe_backward(dy, x, topk_ids, topk_weights, w_gate_up, w_down, rows, pre, row_weights, *call):
    return fake_gradients((x, topk_weights, w_gate_up, w_down), call[:4])


torch_op.register(
    f"ep_moe({_OPERANDS}, {_SETTINGS}, bool keep, str group, str ep, str gemm)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _ep_moe,
    _fake_ep_moe,
)
torch_op.register(
    f"ep_moe_backward(Tensor dy, {_OPERANDS}, Tensor rows, Tensor pre, Tensor row_weights, bool need_dx,"
    f" bool need_dtopk, bool need_dgate_up, bool need_ddown, {_SETTINGS}, str group, str ep)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _ep_moe_backward,
    _fake_ep_moe_backward,
)


class _EpMoe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, topk_ids, topk_weights, w_gate_up, w_down, *call):
        *settings, group, ep, gemm = call
        operands = x, topk_ids, topk_weights, w_gate_up, w_down
        y, *kept = torch.ops.tdkernels.ep_moe(*operands, *settings, True, group, ep, gemm)
        ctx.save_for_backward(*operands, *kept)
        ctx.call = *settings, group, ep
        return y

    @staticmethod
    def backward(ctx, dy):
        autograd.reject_second_derivatives("ep_moe")
        need_dx, _, *others = ctx.needs_input_grad[:5]
        needs = need_dx, *others
        made = torch.ops.tdkernels.ep_moe_backward(dy, *ctx.saved_tensors, *needs, *ctx.call)
        dx, *gradients = unpack_gradients(made, needs)
        return dx, None, *gradients, *[None] * 8


def ep_moe_compiled(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    num_experts: int, activation: str, quantize: str | None, max_tokens: int, max_tokens_per_rank: int | None,
    group: str, ep: str, gemm: str,
) -> torch.Tensor:
    """Return y for valid operands, through torch.library. The group is given by its name, the configs as text."""
    operands = x, topk_ids, topk_weights, w_gate_up, w_down
    settings = num_experts, activation, quantize, max_tokens, max_tokens_per_rank
    if autograd.may_be_differentiated([x, topk_weights, w_gate_up, w_down]):
        return _EpMoe.apply(*operands, *settings, group, ep, gemm)
    return torch.ops.tdkernels.ep_moe(*operands, *settings, False, group, ep, gemm)[0]
