"""ep_moe with its products hidden behind the ways there and back: two launches forward, two and the weights' backward.

    forward     rows = tokens to their experts, multiplied by w_gate_up as they come: ``ep_dispatch_gemm_kernel``
                y    = their hidden states times w_down, brought to the tokens' ranks and added up there:
                       ``ep_gemm_combine_kernel``
    backward    the same two, of dy with w_down transposed, and of what comes of it with w_gate_up transposed; a weight
                of a choice gets the product of its row's gradient with its hidden state, which goes back with dx

A token crosses the wire once for each of its experts, both ways. What is kept for the backward are the rows, what
SwiGLU is of, the hidden states, and where each row came from.

With max_tokens there is room for that many rows, and for as many choices of a rank's own tokens, or with
max_tokens_per_rank for those of that many tokens. Only rows that come take time.
"""

import torch

from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.tile_config import default_tiles
from tdkernels.ops.experts.dispatch.config import default_config
from tdkernels.ops.experts.dispatch.counted import Reach, routing_to_compile
from tdkernels.ops.experts.dispatch.counting import count
from tdkernels.ops.experts.dispatch.device_errors import own_too_many
from tdkernels.ops.experts.dispatch.request import RoutePlan, RoutingShape
from tdkernels.ops.experts.ep_moe import launch_dispatch_gemm, launch_gemm_combine
from tdkernels.ops.experts.ep_moe.launch_sort import order_of
from tdkernels.ops.experts.grouped_gemm import launch as grouped_gemm_launch
from tdkernels.ops.experts.grouped_gemm.dispatch import weight_gradient
from tdkernels.runtime import autograd
from tdkernels.symm.whole_call import whole_call


def why_not(group, quantize):
    """Why the fused kernels cannot take a call; None when they can."""
    if spans_nodes(group):
        return "rows go straight to experts of the same node only"
    if quantize is not None:
        return "rows are multiplied as they come, and codes are not"
    return None


def _rows_of_expert(routing, experts):
    """About how many rows an expert has: its share of those that come, or of those that there is room for.

    With a bound on the tokens there is room for more than can come to all ranks: then its share of all choices.
    """
    shape = routing.shape
    if shape.max_tokens_per_rank is None:
        return routing.rows // experts
    choices = shape.world_size * shape.max_tokens_per_rank * shape.choices
    return min(choices // shape.num_experts, routing.rows // experts)


def _tiles(config, rows, n, x):
    """The tile of a product of about so many ``rows`` of an expert: that of the config, or the default."""
    if config is not None and config.gemm is not None and config.gemm.tiles is not None:
        return config.gemm.tiles
    return default_tiles(rows, n, x.dtype, x.device)


class _EpMoe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, topk_weights, w_gate_up, w_down, activation, config, routing, keep):
        order, weights = order_of(routing), topk_weights.to(torch.float32).contiguous()
        each = _rows_of_expert(routing, w_gate_up.shape[0])
        up_tiles = _tiles(config, each, w_gate_up.shape[1], x)
        down_tiles = _tiles(config, each, w_down.shape[1], x)
        came = launch_dispatch_gemm.launch(
            routing, order, x, weights, w_gate_up, up_tiles, activation=activation, keep=keep,
            keep_rows=keep and ctx.needs_input_grad[2],
        )
        y, _ = launch_gemm_combine.launch(routing, came.y, w_down, came.origins, down_tiles, weights=weights)
        if keep:
            ctx.save_for_backward(
                w_gate_up, w_down, order, came.kept, came.pre, came.y, came.origins, came.weights
            )
            ctx.routing, ctx.activation, ctx.tiles = routing, activation, (up_tiles, down_tiles)
            ctx.weights_dtype = topk_weights.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        autograd.reject_second_derivatives("ep_moe")
        return *_ep_moe_backward(ctx, dy), None, None, None, None


@whole_call
def _ep_moe_backward(ctx, dy):
    """Return the gradients of x, topk_weights, w_gate_up and w_down, each None if it is not needed."""
    w_gate_up, w_down, order, rows, pre, h, origins, row_weights = ctx.saved_tensors
    need_dx, need_dweights, need_dgate_up, need_ddown = ctx.needs_input_grad[:4]
    routing, (up_tiles, down_tiles) = ctx.routing, ctx.tiles
    experts = w_down.shape[0]
    came = launch_dispatch_gemm.launch(
        routing, order, dy, None, w_down.transpose(1, 2), down_tiles, gradient=(h, row_weights),
        keep_rows=need_ddown,
    )
    dx = dweights = dgate_up = ddown = dpre = None
    if need_dx or need_dweights or need_dgate_up:
        dpre = grouped_gemm_launch.swiglu_backward(came.y, pre, routing.splits, ctx.activation)
    if need_dx or need_dweights:
        dx, dweights = launch_gemm_combine.launch(
            routing, dpre, w_gate_up.transpose(1, 2), origins, up_tiles, dots=came.dots if need_dweights else None
        )
    if need_dgate_up:
        dgate_up = weight_gradient(dpre, rows, routing.splits, experts)
    if need_ddown:
        ddown = weight_gradient(came.kept, came.weighted, routing.splits, experts)
    dweights = dweights.to(ctx.weights_dtype) if need_dweights else None
    return dx if need_dx else None, dweights, dgate_up, ddown


def compile(x, w_gate_up, w_down, choices, world_size, rows, config):
    """Compile what a call without gradients would launch for about so many ``rows`` of a rank; launches nothing."""
    if x.device.type == "cpu":
        return  # interpreted
    experts = w_gate_up.shape[0]
    ep = config.ep or default_config(x.device)
    shape = RoutingShape("ep_moe", x.shape[0], choices, experts * world_size, world_size)
    routing = routing_to_compile(shape, ep, x.device, Reach(rows, x.shape[0] * choices))
    up_tiles, down_tiles = (_tiles(config, rows // experts, w.shape[1], x) for w in (w_gate_up, w_down))
    launch_dispatch_gemm.compile(x, w_gate_up, routing, up_tiles, "swiglu")
    launch_gemm_combine.compile(x.new_empty(1, w_down.shape[2]), w_down, routing, down_tiles)


def ep_moe_fused(request, topk_weights, w_gate_up, w_down, activation, config, counted=None):
    """y of checked operands that ``why_not`` has nothing against.

    Args:
        request: DispatchRequest; its max_tokens_per_rank goes with a max_tokens
        config: EpMoeConfig or None
        counted: the CountedRouting of the tokens, if they have been counted
    """
    x = request.x
    if request.has_too_many_tokens:
        with torch.no_grad():  # the peers wait for these tokens: they get none, and the error
            ep_moe_fused(request.without_tokens(), topk_weights[:0], w_gate_up, w_down, activation, config)
        raise own_too_many("ep_moe", x, "tokens", request.max_tokens_per_rank)
    ep = (config.ep if config else None) or default_config(x.device)
    if counted is None:
        counted = count(RoutePlan(request.shape, ep, config_is_given=True, per_choice=True), request)
    routing = counted.for_operator("ep_moe", ep)
    operands = x, topk_weights, w_gate_up, w_down
    return _EpMoe.apply(*operands, activation, config, routing, autograd.may_be_differentiated(operands))
