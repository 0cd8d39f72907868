"""What dispatches and combines launch, and the routing before them."""

import functools
from types import SimpleNamespace

import torch

from tdkernels.ops.experts.dispatch import counted, counting, low_latency
from tdkernels.ops.experts.dispatch import launch as ep_launch
from tdkernels.ops.experts.dispatch.config import EpConfig
from tdkernels.ops.experts.dispatch.multinode import routing as multinode_routing
from tests.compiled.targets import BF16
from tests.support.aot import recorded_launches
from tests.support.routing import planned

MOVES = [
    "dispatch", "dispatch again, with scales", "dispatch, quantized", "gradient of a combine", "combine per rank",
    "gradient of a dispatch", "combine per expert",
]
DIRECT = ["direct dispatch", "direct dispatch, quantized", "direct, by source"]  # in a group on one node
ROUTES = ["route", "route of many tokens", "route by source"]
# Between them they hold every function of the kernels; the others are for one target, to save time.
EVERYWHERE = ["route of many tokens", "dispatch, quantized", "combine per rank", "direct dispatch, quantized"]


@functools.cache
def expert_launches(tokens=128, k=8, experts=256, ranks=8, width=7168, dtype=BF16, local=None):
    """What dispatches, combines and their gradients launch, by name: lists of (kernel, args, kwargs).

    ``local``: ranks of a node, of several; None for one node.
    """
    group, capacity, found = SimpleNamespace(size=lambda: ranks), 2 * tokens, {}
    per_rank, per_expert = EpConfig(), EpConfig(combine="per_expert")
    modules = counting, counted, multinode_routing, ep_launch, low_latency
    with recorded_launches(modules, ranks, ranks // (local or ranks)) as launches:

        def keep(name):
            found[name] = list(launches)
            launches.clear()

        def route(tokens, k, **options):
            ids = torch.zeros(tokens, k, dtype=torch.int64)
            return counting.count(*planned(group, ids, experts, per_rank, max_tokens=capacity, **options))

        routing = route(tokens, k)
        keep("route")
        route(64 * tokens, k)
        keep("route of many tokens")
        route(tokens, 1, by_source=True, error_code=torch.zeros((), dtype=torch.int32))
        keep("route by source")
        x, weights, of_rows = torch.zeros(tokens, width, dtype=dtype), torch.ones(tokens, k), torch.ones(capacity)
        rows, _, _ = routing.dispatch(x, weights=weights)
        keep("dispatch")
        routing.dispatch(x.to(torch.float8_e4m3fn), weights=weights, scales=torch.ones(tokens, 56))
        keep("dispatch again, with scales")
        routing.dispatch(x, weights=weights, quantize=True)
        keep("dispatch, quantized")
        routing.dispatch_gradient(x, rows, weights, True)
        keep("gradient of a combine")
        routing.combine(rows, weights=weights, row_weights=of_rows)
        keep("combine per rank")
        routing.combine(rows, row_numbers=of_rows)
        keep("gradient of a dispatch")
        routing.combine(rows, weights=weights, row_weights=of_rows, config=per_expert)
        keep("combine per expert")
        for name in DIRECT if local is None else []:
            by_source = name.endswith("source")  # an all_to_all, of a choice a token and without weights
            ids = torch.zeros(tokens, 1 if by_source else k, dtype=torch.int64)
            code = torch.zeros((), dtype=torch.int32) if by_source else None
            plan, request = planned(
                group, ids, experts, per_rank, max_tokens=capacity, max_tokens_per_rank=tokens, by_source=by_source,
                error_code=code,
            )
            routing = low_latency.route_low_latency(low_latency.plan_low_latency(plan), request)
            quantize = name.endswith("quantized")
            routing.dispatch(x, weights=None if by_source else weights, quantize=quantize)
            keep(name)
    assert list(found) == ROUTES + MOVES + (DIRECT if local is None else []) and all(found.values())
    return found
