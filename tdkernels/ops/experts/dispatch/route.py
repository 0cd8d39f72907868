"""Which way the tokens of a dispatch go: counted first, or of few tokens all in one launch; or by torch."""

from typing import NamedTuple

import torch

from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.experts.dispatch import launch as launcher
from tdkernels.ops.experts.dispatch import torch_backend
from tdkernels.ops.experts.dispatch.config import EpConfig, default_config
from tdkernels.ops.experts.dispatch.device_errors import own_too_many
from tdkernels.ops.experts.dispatch.low_latency import (
    bounded_routing,
    can_be_direct,
    direct_config,
    leave_uncounted,
    table_words,
)
from tdkernels.ops.experts.dispatch.routing import route, slots_for
from tdkernels.ops.experts.dispatch.token_buckets import choose_config, config_to_route, sure_capacity


class RoutePlan(NamedTuple):
    """How the tokens of a call are routed, as far as their shapes decide it. It holds no tensor and no group.

    config:           the EpConfig of the call: given, or chosen; None: to be chosen when the tokens are counted
    config_is_given:  whether the call has named it, or there is no other
    max_tokens:       the capacity, or None
    is_direct:        whether one launch counts and sends; then
    slots, words:     how many tokens of all ranks there is room for, and the words of the tables
    """

    config: EpConfig | None
    config_is_given: bool
    max_tokens: int | None
    is_direct: bool = False
    slots: int = 0
    words: int = 0


def plan_route(
    operator, x, topk_ids, num_experts, quantize, max_tokens, group, config, max_tokens_per_rank=None, by_source=False
):
    """The RoutePlan of checked tokens; collective at the first call with a problem."""
    choices, ranks = topk_ids.shape[1], group.size()
    if max_tokens_per_rank is not None and max_tokens is None:
        max_tokens = sure_capacity(ranks * max_tokens_per_rank, ranks, num_experts, choices)
    if config is None or config.method != "torch":
        config = config_to_route(config, group, x.device)
    plan = RoutePlan(config, config is not None, max_tokens)
    if max_tokens_per_rank is None or (config is not None and config.method == "torch"):
        return plan
    if config is None:
        like = bounded_routing(operator, topk_ids, num_experts, group, None, max_tokens, max_tokens_per_rank)
        config = choose_config(_tuned(by_source), like, x, quantize is not None)
    if not spans_nodes(group) and can_be_direct(config, max_tokens_per_rank, choices, num_experts, ranks):
        return plan._replace(
            config=direct_config(config), is_direct=True, slots=slots_for(ranks * max_tokens_per_rank),
            words=table_words(topk_ids, num_experts, ranks),
        )
    return plan._replace(config=config)


def route_by(
    plan, operator, x, topk_ids, num_experts, quantize, group, max_tokens_per_rank=None, bad=None, by_source=False,
    given=None,
):
    """The Routing of checked tokens by a plan, to be taken ``as_chosen``.

    ``bad``, ``by_source``, ``given``: as of ``route``; rows are laid out by source in an all_to_all alone
    """
    config, ids = plan.config, (operator, topk_ids, num_experts, group)
    if plan.config_is_given and config.method == "torch":
        return torch_backend.route(
            *ids, config, x, max_tokens=plan.max_tokens, bad=bad, max_tokens_per_rank=max_tokens_per_rank,
            quantize=quantize, by_source=by_source, given=given,
        )
    if plan.is_direct:
        routing = bounded_routing(*ids, config, plan.max_tokens, max_tokens_per_rank, plan.slots)
        routing.config_is_given = plan.config_is_given
        leave_uncounted(routing, topk_ids, bad, by_source, given, plan.words)
        return routing
    options = {"max_tokens": plan.max_tokens, "most_tokens": max_tokens_per_rank, "bad": bad, "by_source": by_source}
    routing = route(*ids, config if plan.config_is_given else None, given=given, **options)
    routing.config = config
    if config is None:
        routing.config = choose_config(_tuned(by_source), routing, x, quantize is not None)
    return routing


def route_tokens(
    operator, x, topk_ids, num_experts, quantize, max_tokens, group, config, max_tokens_per_rank=None, bad=None,
    by_source=False, given=None,
):
    """The Routing of checked tokens, see ``plan_route`` and ``route_by``."""
    ids = operator, x, topk_ids, num_experts, quantize
    plan = plan_route(*ids, max_tokens, group, config, max_tokens_per_rank, by_source)
    return route_by(plan, *ids, group, max_tokens_per_rank, bad, by_source, given)


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
