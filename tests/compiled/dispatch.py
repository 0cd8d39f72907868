"""What dispatches and combines launch, and the routing before them."""

import functools
from types import SimpleNamespace

import torch

from tdkernels.ops.experts.dispatch import launch as ep_launch
from tdkernels.ops.experts.dispatch import low_latency
from tdkernels.ops.experts.dispatch import routing as ep_routing
from tdkernels.ops.experts.dispatch.config import EpConfig
from tests.compiled.targets import BF16
from tests.support.aot import recorded_launches

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
    with recorded_launches((ep_routing, ep_launch, low_latency), ranks, ranks // (local or ranks)) as launches:

        def keep(name):
            found[name] = list(launches)
            launches.clear()

        def route(tokens, k, **options):
            ids = torch.zeros(tokens, k, dtype=torch.int64)
            return ep_routing.route("op", ids, experts, group, per_rank, max_tokens=capacity, **options)

        routing = route(tokens, k)
        keep("route")
        route(64 * tokens, k)
        keep("route of many tokens")
        route(tokens, 1, by_source=True, bad=torch.zeros((), dtype=torch.int32))
        keep("route by source")
        x, weights, of_rows = torch.zeros(tokens, width, dtype=dtype), torch.ones(tokens, k), torch.ones(capacity)
        rows, _, _ = ep_launch.dispatch(routing, x, weights=weights)
        keep("dispatch")
        ep_launch.dispatch(routing, x.to(torch.float8_e4m3fn), weights=weights, scales=torch.ones(tokens, 56))
        keep("dispatch again, with scales")
        ep_launch.dispatch(routing, x, weights=weights, quantize=True)
        keep("dispatch, quantized")
        ep_launch.dispatch_gradient(routing, x, rows, weights, True)
        keep("gradient of a combine")
        ep_launch.combine(routing, rows, weights=weights, row_weights=of_rows)
        keep("combine per rank")
        ep_launch.combine(routing, rows, row_numbers=of_rows)
        keep("gradient of a dispatch")
        ep_launch.combine(routing, rows, weights=weights, row_weights=of_rows, config=per_expert)
        keep("combine per expert")
        for name in DIRECT if local is None else []:
            by_source = name.endswith("source")  # an all_to_all, of a choice a token and without weights
            ids, bad = torch.zeros(tokens, 1 if by_source else k, dtype=torch.int64), torch.zeros((), dtype=torch.int32)
            routing = low_latency.bounded_routing("op", ids, experts, group, per_rank, capacity, tokens)
            low_latency.leave_uncounted(routing, ids, bad if by_source else None, by_source)
            quantize = name.endswith("quantized")
            ep_launch.dispatch(routing, x, weights=None if by_source else weights, quantize=quantize)
            keep(name)
    assert list(found) == ROUTES + MOVES + (DIRECT if local is None else []) and all(found.values())
    return found
