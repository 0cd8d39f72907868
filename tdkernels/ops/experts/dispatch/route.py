"""Which way the tokens of a dispatch go: counted first, or of few tokens all in one launch; or by torch."""

import torch

from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.experts.dispatch import launch as launcher
from tdkernels.ops.experts.dispatch import torch_backend
from tdkernels.ops.experts.dispatch.config import default_config
from tdkernels.ops.experts.dispatch.device_errors import own_too_many
from tdkernels.ops.experts.dispatch.low_latency import bounded_routing, can_be_direct, leave_uncounted
from tdkernels.ops.experts.dispatch.routing import route
from tdkernels.ops.experts.dispatch.token_buckets import choose_config, config_to_route, sure_capacity


def route_tokens(
    operator, x, topk_ids, num_experts, quantize, max_tokens, group, config, max_tokens_per_rank=None, bad=None,
    by_source=False, given=None,
):
    """The Routing of checked tokens, with the config of their dispatch: to be taken ``as_chosen``, if none was given.

    ``bad``, ``by_source``, ``given``: as of ``route``; rows are laid out by source in an all_to_all alone
    """
    ids = operator, topk_ids, num_experts, group
    if max_tokens_per_rank is not None and max_tokens is None:
        max_tokens = sure_capacity(group.size() * max_tokens_per_rank, group.size(), num_experts, topk_ids.shape[1])
    if config is not None and config.method == "torch":
        return torch_backend.route(
            *ids, config, x, max_tokens=max_tokens, bad=bad, max_tokens_per_rank=max_tokens_per_rank, quantize=quantize,
            by_source=by_source, given=given,
        )
    config = config_to_route(config, group, x.device)
    bounded = None
    if max_tokens_per_rank is not None:
        bounded = _bounded_routing(
            operator, x, topk_ids, num_experts, quantize, max_tokens, group, config, max_tokens_per_rank, bad,
            by_source, given,
        )
        if bounded.uncounted is not None:
            return bounded
    options = {"max_tokens": max_tokens, "most_tokens": max_tokens_per_rank, "bad": bad, "by_source": by_source}
    routing = route(*ids, config, given=given, **options)
    if bounded is not None:
        routing.config = bounded.config
    elif config is None:
        routing.config = choose_config(_tuned(by_source), routing, x, quantize is not None)
    return routing


def refuse_too_many(
    operator, x, topk_ids, topk_weights, scales, num_experts, quantize, max_tokens, max_tokens_per_rank, group, config,
    by_source=False,
):
    """Raise for an x with more rows than max_tokens_per_rank. The peers wait for them: they hear of it and get none."""
    none, ids, weights, scales = (None if one is None else one[:0] for one in (x, topk_ids, topk_weights, scales))
    bad = torch.full((), -len(x), dtype=torch.int32, device=x.device)
    routing = route_tokens(
        operator, none, ids, num_experts, quantize, max_tokens, group, config, max_tokens_per_rank, bad, by_source
    )
    launcher.dispatch(routing, none, weights=weights, scales=scales, quantize=quantize is not None)
    raise own_too_many(operator, x, "rows" if by_source else "tokens", max_tokens_per_rank)


def as_chosen(routing, ids, by_torch=True, by_source=False):
    """A Routing of ids that our kernels have found, as the way that has been chosen for it needs it.

    ``by_torch``: whether torch's way is possible
    """
    if routing.by_torch is not None or routing.config.method != "torch":
        return routing
    if by_torch and routing.max_tokens is None:
        return torch_backend.routed(routing, ids, by_source)
    routing.config = default_config(ids.device)
    return routing


def _tuned(by_source):
    """By whose name the config is looked up."""
    return "all_to_all" if by_source else "ep_dispatch"


def _bounded_routing(
    operator, x, topk_ids, num_experts, quantize, max_tokens, group, config, most, bad, by_source, given
):
    """A Routing that its dispatch finds, of tokens of which a rank has at most so many; or what one is to be like."""
    routing = bounded_routing(operator, topk_ids, num_experts, group, config, max_tokens, most)
    if config is None:
        routing.config = choose_config(_tuned(by_source), routing, x, quantize is not None)
    sizes = most, topk_ids.shape[1], num_experts, group.size()
    if not spans_nodes(group) and can_be_direct(routing.config, *sizes):
        leave_uncounted(routing, topk_ids, bad, by_source, given)
    return routing
