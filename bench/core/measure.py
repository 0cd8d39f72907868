"""Measure one case of a dense operator on the ranks: build its methods, check them, time them, and make the rows."""

import dataclasses
import json

import tdkernels
from bench.core import graphs, harness
from bench.dense import peers
from bench.dense.operators import DTYPE
from tdkernels.autotune.tunable import tunable
from tdkernels.launch import rank_device

PLAIN = ("gemm", "collective", "sequence")  # cuBLAS alone, NCCL alone, both without overlap
_COLD_BYTES = 256 << 20  # total size of the input sets that calls cycle through: several times any L2 cache
_MAX_SETS = 8


@dataclasses.dataclass(frozen=True)
class Plan:
    """Measurement options.

    peers:          names of other libraries' implementations to measure
    overrides:      changes of the default config, each measured as a further method
    cuda_graph:     also measure each method in a CUDA graph
    eager:          in solo mode: also measure each method without a CUDA graph
    """

    rounds: int
    burst_ms: float
    peers: tuple = ()
    overrides: tuple = ()
    cuda_graph: bool = False
    eager: bool = False


# ---- on the ranks ----


@harness.measurement
def measure(case, plan):
    """Check and time all methods of a case.

    Returns:
        [(method, whether in a CUDA graph, times)]. times is the entry of ``harness.time_methods`` plus "config", or
        {"absent": reason}.
    """
    sets = input_sets(case)
    calls, configs, absent = _methods(case, plan)
    references = _references(case, sets[:2])  # two, because workspaces are double-buffered
    for name in [name for name in calls if name not in PLAIN]:
        if reason := _absent_reason(name, calls[name], references):
            absent[name] = reason
            del calls[name]
    _add_selected_config(configs, case, sets[0])
    captured, not_captured = {}, {}
    if plan.cuda_graph:
        # The GEMM alone and the collective alone do not compute the reference result.
        captured, not_captured = graphs.capture_all(calls, sets, references, unchecked=("gemm", "collective"))
    del references
    return timed(calls, captured, sets, plan, configs, absent, not_captured)


def timed(calls, captured, sets, plan, configs, absent, not_captured):
    """Time eager and captured methods in one run. Return the table of ``measure``.

    Args:
        calls, captured, configs: {method: call}, {method: Captured}, {method: config}.
        absent, not_captured: {method: reason}.
    """
    methods = {(name, False): call for name, call in calls.items()}
    methods |= {(name, True): graph for name, graph in captured.items()}
    found = harness.time_methods(methods, sets, plan.rounds, plan.burst_ms)
    tdkernels.synchronize()  # raises if a wait for a peer timed out during the measurement
    table = [(*key, {**times, "config": _as_dict(configs.get(key[0]))}) for key, times in found.items()]
    table += [(name, False, {"absent": reason}) for name, reason in absent.items()]
    return table + [(name, True, {"absent": reason}) for name, reason in not_captured.items()]


def input_sets(case):
    """Return inputs of several calls, more than fit in the L2 cache."""
    sets = [case.inputs(0)]
    nbytes = sets[0].x.nbytes + sets[0].weight.nbytes
    count = max(2, min(_MAX_SETS, -(-_COLD_BYTES // nbytes)))
    return sets + [case.inputs(seed) for seed in range(1, count)]


def _methods(case, plan):
    """Return ({name: call}, {name: config}, {name: reason for absence}). "tdkernels" uses the selected config."""
    direction = case.direction
    calls, absent = peers.calls(case, plan.peers)
    calls = {name: getattr(direction, name) for name in PLAIN} | calls | {"tdkernels": direction.ours(case, None)}
    if case.backward:  # the backward selects its own configs
        return calls, {}, absent
    default = default_config(case)
    configs, not_applicable = overridden(default, plan.overrides)
    configs = {"tdkernels-default": default} | configs
    absent |= not_applicable
    return calls | {name: direction.ours(case, config) for name, config in configs.items()}, configs, absent


def default_config(case):
    """Return the heuristic config of the forward with overlap, used without tuning."""
    return tunable(case.operator).default(case.problem(rank_device()), rank_device())


def overridden(default, overrides):
    """Return ({name: config}, {name: reason for absence}) of changes of the default config."""
    configs, absent = {}, {}
    for number, override in enumerate(overrides, 1):
        name = f"c{number} {json.dumps(override)}"
        try:
            configs[name] = _override(default, override)
        except TypeError as err:  # a field of another operator
            absent[name] = str(err)
    return configs, absent


def _override(config, overrides):
    if "tiles" in overrides:
        overrides = {**overrides, "tiles": dataclasses.replace(config.tiles, **overrides["tiles"])}
    return dataclasses.replace(config, **overrides)


def _add_selected_config(configs, case, inputs):
    """Add the config that a call without an explicit config selects."""
    if not case.backward:
        configs["tdkernels"] = tdkernels.explain(case.operator, inputs.x, inputs.weight).config


def _as_dict(config):
    return None if config is None else dataclasses.asdict(config)


def _references(case, sets):
    """Return [(operands, fp32 results, errors of torch + NCCL in the operands' dtype)], one entry per input set."""
    sequence = case.direction.sequence
    found = []
    for s in sets:
        operands = {name: getattr(s, name).float() for name in ("x", "weight", "dy") if hasattr(s, name)}
        exact = sequence(type(s)(**operands))
        found.append((s, exact, harness.errors(sequence(s), exact)))
    return found


def _absent_reason(name, call, references):
    """Return None if a method can be timed, else the reason.

    Raises:
        RuntimeError: if tdkernels is wrong, or fails with its default config.
    """
    reason = harness.failure_reason(call, references[0][0])
    wrong = None if reason else harness.mismatch_reason(call, references)
    if (wrong and name not in peers.PEERS) or (reason and name.startswith("tdkernels")):
        raise RuntimeError(f"{name}: {wrong or reason}")
    return reason or wrong


# ---- in the calling process ----


def rows(case, found, link_gbps):
    """Return one row per method, with the measured times and the derived values."""
    eager = {method: times for method, graph, times in found if not graph}
    gemm_ms, sequence_ms = eager["gemm"]["ms"], eager["sequence"]["ms"]
    in_graph = {method: times.get("ms") for method, graph, times in found if graph}
    wire_ms = case.wire_bytes / link_gbps / 1e6 if link_gbps else 0.0
    table = []
    for method, graph, times in found:
        ms = times.get("ms")
        both = ms is not None and method not in ("gemm", "collective")
        # Methods in a graph are compared with baselines in a graph, if those could be captured.
        base_ms = in_graph.get("sequence") if graph else sequence_ms
        floor_ms = max((in_graph.get("gemm") or gemm_ms) if graph else gemm_ms, wire_ms)
        table.append({
            "op": case.operator,
            "pass": "backward" if case.backward else "forward",
            "shape": str(case.shape), "name": case.shape.name,
            "m": case.shape.m, "n": case.shape.n, "k": case.shape.k, "dtype": str(DTYPE).removeprefix("torch."),
            "method": method,
            "graph": graph,
            "absent": times.get("absent"),
            "ms": ms, "host_ms": times.get("host_ms"), "burst": times.get("burst"),
            "tflops": case.flops / ms / 1e9 if both or (ms and method == "gemm") else None,
            "wire_gbps": case.wire_bytes / ms / 1e6 if both or (ms and method == "collective") else None,
            "speedup": base_ms / ms if both and base_ms else None,
            "floor_ms": floor_ms,
            "efficiency": floor_ms / ms if both else None,
            "link_gbps": link_gbps,
            "config": times.get("config"),
        })
    return table
