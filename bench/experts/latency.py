"""Latency of a dispatch followed by a combine: each pair of calls is timed separately, for median and percentiles.

If a method can be captured, a CUDA graph of one pair is replayed; otherwise the pair runs eagerly. Methods are
interleaved in blocks of calls, in a balanced order.
"""

import dataclasses
import time

import torch

import tdkernels
from bench.core import graphs, harness
from tdkernels.autotune import timing
from tdkernels.autotune.order import balanced_orders
from tdkernels.launch import rank_device

CALLS = 1000
_BLOCKS = 4
_WARM_UP = 10
_REHEARSAL_CALLS = 4


def measure(methods, sets, plan, configs, absent):
    """Time {name: dispatch_methods.Method}. Returns the table of ``measure.timed``; "ms" is the median, "p99_ms" the
    99th percentile.
    """
    on_gpu = rank_device().type == "cuda"
    calls = CALLS if on_gpu and plan.burst_ms else _REHEARSAL_CALLS
    chosen, not_captured = {}, {}
    for name, method in methods.items():
        graph = None
        if on_gpu and not method.host_waits:
            graph, reason = graphs.capture(method.call, sets[:1], None, calls=1)
            if reason:
                not_captured[name] = reason
        chosen[name, graph is not None] = graph or method.call
    times = {key: [] for key in chosen}
    for order in balanced_orders(list(chosen), _BLOCKS):
        for key in order:
            times[key] += _one_by_one(chosen[key], sets[0], calls // _BLOCKS)
    tdkernels.synchronize()  # raises if a wait for a peer timed out during the measurement
    table = []
    for (name, graph), found in times.items():
        found.sort()
        median, p99 = harness.slowest([found[len(found) // 2], found[min(len(found) * 99 // 100, len(found) - 1)]])
        config = configs[name]
        entry = {"ms": median, "p99_ms": p99, "burst": 1, "config": config and dataclasses.asdict(config)}
        table.append((name, graph, entry))
    table += [(name, False, {"absent": reason}) for name, reason in absent.items()]
    return table + [(name, True, {"absent": reason}) for name, reason in not_captured.items()]


def _one_by_one(call, inputs, count):
    """Return the device times in ms between the ends of consecutive calls."""
    device = rank_device()
    timing.barrier(device)
    for _ in range(_WARM_UP if device.type == "cuda" else 0):
        call(inputs)
    if device.type != "cuda":
        stamps = [time.perf_counter()]
        for _ in range(count):
            call(inputs)
            stamps.append(time.perf_counter())
        return [(later - earlier) * 1e3 for earlier, later in zip(stamps, stamps[1:])]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call(inputs)
        event.record()
    timing.synchronize(device)
    return [earlier.elapsed_time(later) for earlier, later in zip(events, events[1:])]
