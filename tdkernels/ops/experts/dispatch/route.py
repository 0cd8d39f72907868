"""Selection of the dispatch strategy, a subclass of ``Routing``, by the config, the shapes and the bounds of a call."""

from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.experts.dispatch.config import default_config
from tdkernels.ops.experts.dispatch.counting import count
from tdkernels.ops.experts.dispatch.device_errors import own_too_many
from tdkernels.ops.experts.dispatch.low_latency import can_be_low_latency, plan_low_latency, route_low_latency
from tdkernels.ops.experts.dispatch.request import RoutePlan
from tdkernels.ops.experts.dispatch.token_buckets import choose_config, config_to_route, with_capacity
from tdkernels.ops.experts.dispatch.torch_backend import route_by_torch, routing_by_torch

if TYPE_CHECKING:
    import torch

    from tdkernels.ops.experts.dispatch.counted import CountedRouting
    from tdkernels.ops.experts.dispatch.request import DispatchRequest
    from tdkernels.ops.experts.dispatch.routing import Routing


def plan_route(request: "DispatchRequest") -> RoutePlan:
    """Return the RoutePlan of a request whose arguments were checked. The first call with a problem is collective."""
    shape, config, x = with_capacity(request.shape), request.config, request.x
    if config is None or config.method != "torch":
        config = config_to_route(config, request.group, x.device)
    plan = RoutePlan(shape, config, config is not None)
    if shape.max_tokens is None or (config is not None and config.method == "torch"):
        return plan
    if config is None:
        plan = plan._replace(config=_without_torch(_choose(request, shape, shape.max_tokens), x.device))
    is_bounded = shape.max_tokens_per_rank is not None and not spans_nodes(request.group)
    if is_bounded and can_be_low_latency(plan.config, shape):  # type: ignore[arg-type]  # selected above
        return plan_low_latency(plan)
    return plan


def route(plan: RoutePlan, request: "DispatchRequest", allow_torch: bool = True) -> "Routing":
    """Return the Routing of a request. Unless the strategy is low-latency, this counts the tokens (collective).

    Args:
        plan: The plan of the request.
        request: The request.
        allow_torch: Whether torch's collectives may be selected if the call has named no config.
    """
    if plan.is_low_latency:
        return route_low_latency(plan, request)
    if plan.config_is_given and plan.config.method == "torch":  # type: ignore[union-attr]  # given, so not None
        return route_by_torch(plan, request)
    counted = count(plan, request)
    return counted if plan.config is not None else settle(counted, request, allow_torch)


def settle(counted: "CountedRouting", request: "DispatchRequest", allow_torch: bool = True) -> "Routing":
    """Select the config of tokens that were counted without one, by their number, and return the final Routing."""
    config = _choose(request, counted.shape, counted.staged)
    if config.method == "torch" and allow_torch:
        return routing_by_torch(counted, request.ids, config)
    return replace(counted, config=_without_torch(config, request.x.device))


def refuse_too_many(
    request: "DispatchRequest", weights: "torch.Tensor | None", scales: "torch.Tensor | None"
) -> NoReturn:
    """Raise ValueError for a request that ``has_too_many_tokens``.

    The peers wait for this rank's tokens. So it first takes part in the dispatch without tokens and with an error code,
    by which the peers raise the error too.
    """
    none = request.without_tokens()
    weights, scales = (None if one is None else one[:0] for one in (weights, scales))
    routing = route(plan_route(none), none)
    routing.dispatch(none.x, weights=weights, scales=scales, quantize=request.quantize is not None)
    raise_too_many(request, routing)


def raise_too_many(request: "DispatchRequest", routing: "Routing") -> NoReturn:
    """Raise ValueError on the rank with too many tokens, after it has sent its error code with ``routing``."""
    routing.dismiss_error()
    what = "rows" if request.by_source else "tokens"
    raise own_too_many(request.operator, request.x, what, request.max_tokens_per_rank)


def _choose(request, shape, staged):
    """Return the EpConfig that the group selects for a call without a config."""
    operator = "all_to_all" if shape.by_source else "ep_dispatch"
    return choose_config(operator, shape, staged, request.group, request.x, request.quantize is not None)


def _without_torch(config, device):
    """Return a selected config, or the default if it names torch's collectives, where the host must not wait."""
    return default_config(device) if config.method == "torch" else config
