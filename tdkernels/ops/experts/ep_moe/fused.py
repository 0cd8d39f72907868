"""The "fused" method of ep_moe: GEMMs that overlap dispatch and combine.

    forward     dispatch + gate-up GEMM: tokens are multiplied by w_gate_up as they arrive: ``ep_dispatch_gemm_kernel``
                down GEMM + combine: products with w_down are stored at the tokens' ranks and summed there:
                ``ep_gemm_combine_kernel``
    backward    the same two launches: dy with the transposed w_down, then the gradient of SwiGLU's input with the
                transposed w_gate_up; and the weight gradients, which are local. The gradient of a routing weight is
                the dot product of its row's unweighted gradient with its hidden state. It is sent back with dx

A token is sent once for each of its experts, in both directions. The backward needs the received rows, the input of
SwiGLU, the hidden states, and the origin of each row.

With ``max_tokens`` there is memory for that many received rows and for as many assignments of a rank's own tokens. With
``max_tokens_per_rank`` there is memory for the assignments of that many tokens. Only rows that are received take time.
"""

from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.invariance import is_batch_invariant
from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.tile_config import default_tiles, invariant_tiles
from tdkernels.ops.experts.dispatch.config import default_config
from tdkernels.ops.experts.dispatch.counted import Reach, routing_to_compile
from tdkernels.ops.experts.dispatch.counting import count
from tdkernels.ops.experts.dispatch.request import RoutePlan, RoutingShape
from tdkernels.ops.experts.dispatch.route import raise_too_many
from tdkernels.ops.experts.ep_moe import launch_dispatch_gemm, launch_gemm_combine
from tdkernels.ops.experts.ep_moe.launch_sort import order_of
from tdkernels.ops.experts.grouped_gemm import launch as grouped_gemm_launch
from tdkernels.ops.experts.grouped_gemm.dispatch import weight_gradient
from tdkernels.runtime import autograd
from tdkernels.symm.whole_call import whole_call

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.ops.experts.dispatch.request import DispatchRequest
    from tdkernels.ops.experts.ep_moe.config import EpMoeConfig


def why_not(group: "dist.ProcessGroup", quantize: str | None) -> str | None:
    """Return why the fused kernels do not support a call, or None if they do."""
    if spans_nodes(group):
        return "it needs all ranks on one node"
    if quantize is not None:
        return "it cannot multiply quantized tokens"
    return None


def _rows_of_expert(routing, experts):
    """Estimate the rows per expert: an equal share of the received rows, or of the capacity.

    With max_tokens_per_rank the capacity of all ranks together is more than they can receive. Then it is the share of
    all assignments.
    """
    shape = routing.shape
    if shape.max_tokens_per_rank is None:
        return routing.rows // experts
    choices = shape.world_size * shape.max_tokens_per_rank * shape.choices
    return min(choices // shape.num_experts, routing.rows // experts)


def _tiles(config, rows, n, x):
    """Return the tile of a GEMM with about ``rows`` rows per expert: from the config, or the default."""
    if config is not None and config.gemm is not None and config.gemm.tiles is not None:
        return config.gemm.tiles
    if is_batch_invariant():
        return invariant_tiles(x.dtype, x.device)
    return default_tiles(rows, n, x.dtype, x.device)


class _EpMoe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, topk_weights, w_gate_up, w_down, activation, config, routing, keep):
        order, weights = order_of(routing), topk_weights.to(torch.float32).contiguous()
        each = _rows_of_expert(routing, w_gate_up.shape[0])
        up_tiles = _tiles(config, each, w_gate_up.shape[1], x)
        down_tiles = _tiles(config, each, w_down.shape[1], x)
        received = launch_dispatch_gemm.launch(
            routing, order, x, weights, w_gate_up, up_tiles, activation=activation, keep=keep,
            keep_rows=keep and ctx.needs_input_grad[2],
        )
        y, _ = launch_gemm_combine.launch(routing, received.y, w_down, received.origins, down_tiles, weights=weights)
        if keep:
            ctx.save_for_backward(
                w_gate_up, w_down, order, received.kept, received.pre, received.y, received.origins, received.weights
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
    received = launch_dispatch_gemm.launch(
        routing, order, dy, None, w_down.transpose(1, 2), down_tiles, gradient=(h, row_weights),
        keep_rows=need_ddown,
    )
    dx = dweights = dgate_up = ddown = dpre = None
    if need_dx or need_dweights or need_dgate_up:
        dpre = grouped_gemm_launch.swiglu_backward(received.y, pre, routing.splits, ctx.activation)
    if need_dx or need_dweights:
        dx, dweights = launch_gemm_combine.launch(
            routing, dpre, w_gate_up.transpose(1, 2), origins, up_tiles, dots=received.dots if need_dweights else None
        )
    if need_dgate_up:
        dgate_up = weight_gradient(dpre, rows, routing.splits, experts)
    if need_ddown:
        ddown = weight_gradient(received.kept, received.weighted, routing.splits, experts)
    dweights = dweights.to(ctx.weights_dtype) if need_dweights else None
    return dx if need_dx else None, dweights, dgate_up, ddown


def compile(
    x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, choices: int, world_size: int, rows: int,
    config: "EpMoeConfig",
) -> None:
    """Compile the kernels of a call without gradients that receives about ``rows`` rows on each rank."""
    if x.device.type == "cpu":
        return  # interpreted
    experts = w_gate_up.shape[0]
    ep = config.ep or default_config(x.device)
    shape = RoutingShape("ep_moe", x.shape[0], choices, experts * world_size, world_size)
    routing = routing_to_compile(shape, ep, x.device, Reach(rows, x.shape[0] * choices))
    up_tiles, down_tiles = (_tiles(config, rows // experts, w.shape[1], x) for w in (w_gate_up, w_down))
    launch_dispatch_gemm.compile(x, w_gate_up, routing, up_tiles, "swiglu")
    launch_gemm_combine.compile(x.new_empty(1, w_down.shape[2]), w_down, routing, down_tiles)


def ep_moe_fused(
    request: "DispatchRequest", topk_weights: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    activation: str, config: "EpMoeConfig | None", counted: Any = None,
) -> torch.Tensor:
    """Run ep_moe with the fused kernels, and return y.

    Args:
        request: Valid DispatchRequest for which ``why_not`` is None. If it has a max_tokens_per_rank, it also has a
            max_tokens.
        topk_weights: Routing weights [T, k].
        w_gate_up: First weights of this rank's experts.
        w_down: Second weights of this rank's experts.
        activation: "swiglu" or "swiglu_interleaved".
        config: EpMoeConfig or None.
        counted: CountedRouting of the tokens, or None if they have not been counted yet.

    Raises:
        ValueError: On every rank, if this rank has more tokens than max_tokens_per_rank.
    """
    if request.has_too_many_tokens:
        none = request.without_tokens()  # the peers wait for this rank, so send them no tokens and an error code
        with torch.no_grad():
            routing = _run(none, topk_weights[:0], w_gate_up, w_down, activation, config)[1]
        raise_too_many(request, routing)
    return _run(request, topk_weights, w_gate_up, w_down, activation, config, counted)[0]


def _run(request, topk_weights, w_gate_up, w_down, activation, config, counted=None):
    """Return y and the routing. Arguments are those of ``ep_moe_fused``."""
    ep = (config.ep if config else None) or default_config(request.x.device)
    if counted is None:
        counted = count(RoutePlan(request.shape, ep, config_is_given=True, per_choice=True), request)
    routing = counted.for_operator("ep_moe", ep)
    routing.add_spare_rows()
    operands = request.x, topk_weights, w_gate_up, w_down
    keep = autograd.may_be_differentiated(operands)
    return _EpMoe.apply(*operands, activation, config, routing, keep), routing
