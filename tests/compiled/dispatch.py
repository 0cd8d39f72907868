"""Launches of dispatch, combine and their routing."""

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

TRANSFERS = [
    "dispatch", "dispatch again, with scales", "dispatch, quantized", "gradient of a combine", "combine per rank",
    "gradient of a dispatch", "combine per expert",
]
LOW_LATENCY = ["low-latency dispatch", "low-latency dispatch, quantized", "low-latency, by source"]  # one node only
ROUTES = ["route", "route of many tokens", "route by source"]
# Together these use every function of the kernels. The others are compiled for one target only, to save time.
ALL_TARGETS = ["route of many tokens", "dispatch, quantized", "combine per rank", "low-latency dispatch, quantized"]


@functools.cache
def dispatch_launches(tokens=128, k=8, experts=256, ranks=8, width=7168, dtype=BF16, local=None):
    """Return {name: [(kernel, args, kwargs), ...]} of dispatch, combine and their gradients.

    ``local`` is the number of ranks per node; None means a single node.
    """
    group, capacity, recorded = SimpleNamespace(size=lambda: ranks), 2 * tokens, {}
    per_rank, per_expert = EpConfig(), EpConfig(combine="per_expert")
    modules = counting, counted, multinode_routing, ep_launch, low_latency
    with recorded_launches(modules, ranks, ranks // (local or ranks)) as launches:

        def record(name):
            recorded[name] = list(launches)
            launches.clear()

        def route(tokens, k, **options):
            ids = torch.zeros(tokens, k, dtype=torch.int64)
            return counting.count(*planned(group, ids, experts, per_rank, max_tokens=capacity, **options))

        routing = route(tokens, k)
        record("route")
        route(64 * tokens, k)
        record("route of many tokens")
        route(tokens, 1, by_source=True, error_code=torch.zeros((), dtype=torch.int32))
        record("route by source")
        x, weights, row_weights = torch.zeros(tokens, width, dtype=dtype), torch.ones(tokens, k), torch.ones(capacity)
        rows, _, _ = routing.dispatch(x, weights=weights)
        record("dispatch")
        routing.dispatch(x.to(torch.float8_e4m3fn), weights=weights, scales=torch.ones(tokens, 56))
        record("dispatch again, with scales")
        routing.dispatch(x, weights=weights, quantize=True)
        record("dispatch, quantized")
        routing.dispatch_gradient(x, rows, weights, True)
        record("gradient of a combine")
        routing.combine(rows, weights=weights, row_weights=row_weights)
        record("combine per rank")
        routing.combine(rows, row_numbers=row_weights)
        record("gradient of a dispatch")
        routing.combine(rows, weights=weights, row_weights=row_weights, config=per_expert)
        record("combine per expert")
        for name in LOW_LATENCY if local is None else []:
            by_source = name.endswith("source")  # an all_to_all: one assignment per token, no weights
            ids = torch.zeros(tokens, 1 if by_source else k, dtype=torch.int64)
            code = torch.zeros((), dtype=torch.int32) if by_source else None
            plan, request = planned(
                group, ids, experts, per_rank, max_tokens=capacity, max_tokens_per_rank=tokens, by_source=by_source,
                error_code=code,
            )
            routing = low_latency.route_low_latency(low_latency.plan_low_latency(plan), request)
            quantize = name.endswith("quantized")
            routing.dispatch(x, weights=None if by_source else weights, quantize=quantize)
            record(name)
    assert list(recorded) == ROUTES + TRANSFERS + (LOW_LATENCY if local is None else []) and all(recorded.values())
    return recorded
