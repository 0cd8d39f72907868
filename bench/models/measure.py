"""Measure a case on the ranks: build its methods, check them, capture and time them, and make the rows."""

import contextlib
import importlib
import importlib.metadata
import traceback
from dataclasses import dataclass

import torch

import tdkernels
from bench.core import graphs, harness
from bench.models.cases import COMPILED
from bench.models.method import OUTPUTS, own
from tdkernels import autotune
from tdkernels.launch import rank_device

_PACKAGES = {"torch": "torch", "transformers": "transformers", "megatron": "megatron-core"}
# Largest relative Frobenius error against the complete model. bf16: models that round in another order differ by 1.2 %
# after two layers, gradients included.
_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
_FACTOR = 3  # a CUDA graph may differ from the eager call by this times the error
_FAILED_ELSEWHERE = "failed on another rank"  # as in harness.failure_reason


@dataclass(frozen=True)
class Plan:
    """Measurement options: rounds, and the length of a burst in ms, where 0 means one call."""

    rounds: int
    burst_ms: float


# ---- on the ranks ----


@harness.measurement
def measure(case, plan):
    """Build, check and time all methods of a case. Collective.

    Returns:
        One dict per method and per way to run it: "method", "graph", and "ms", "host_ms", "burst", "error",
        "peak_bytes", "note" and "absent", which are None if they do not apply.
    """
    on_gpu = rank_device().type == "cuda"
    with contextlib.nullcontext() if on_gpu else autotune.mode("off"):
        methods, found, absent = _methods(case)
        notes = {name: method.note() or None for name, method in methods.items()}
        peaks = {name: _peak_bytes(method) for name, method in methods.items()}
        calls = {(name, False): method.call for name, method in methods.items()}
        if case.phase != "prefill" and on_gpu:  # both are limited by the host in eager mode
            plain = {name: method for name, method in methods.items() if name not in COMPILED}
            captured, not_captured = _in_graphs(plain, found)
            calls |= captured
            absent |= not_captured
        times = harness.time_methods(calls, [None], plan.rounds, plan.burst_ms)
        tdkernels.synchronize()  # raises if a wait for a peer timed out during the measurement
    rows = [
        _row(name, graph, **entry, error=found[name], note=notes[name], peak_bytes=None if graph else peaks[name])
        for (name, graph), entry in times.items()
    ]
    return rows + [_row(*key, absent=reason) for key, reason in absent.items()]


def _row(method, graph, **fields):
    empty = dict.fromkeys(("ms", "host_ms", "burst", "error", "peak_bytes", "note", "absent"))
    return {"method": method, "graph": graph, **empty, **fields}


def _methods(case):
    """Return ({name: Method}, {name: error}, {(name, False): reason for absence}).

    The methods of a framework are in a module with two functions. ``prepare(case)`` returns an object with the complete
    ``outputs``, and ``build(name, prepared)`` returns a Method.
    """
    found, reason = _attempt(lambda: _prepared(case))
    if reason is not None:
        return {}, {}, {(name, False): reason for name in case.methods}
    module, prepared = found
    methods, errors, absent = {}, {}, {}
    for name in case.methods:
        method, reason = _attempt(lambda name=name: module.build(name, prepared))
        if reason is None:
            error, reason = _checked(case, method, prepared.outputs)
        if reason is None:
            methods[name], errors[name] = method, error
        else:
            absent[name, False] = reason
    return methods, errors, absent


def _prepared(case):
    module = importlib.import_module(f"bench.models.{case.framework}_methods")
    return module, module.prepare(case)


def _attempt(make):
    """Return (result of ``make``, None), or (None, reason) on all ranks if it fails on one."""
    made = []

    def logged(_):
        try:
            made.append(make())
        except Exception:
            traceback.print_exc()  # the row has one line of it
            raise

    reason = harness.failure_reason(logged, None)
    return (None, reason) if reason is not None else (made[0], None)


def _checked(case, method, expected):
    """Run a method once. Return (error, reason why it is left out); the error is None if it cannot be checked."""
    outputs, reason = _attempt(lambda: method.call(None))
    if reason is not None or not method.checked:
        return None, reason
    outputs, reason = _attempt(lambda: method.complete(outputs))
    if reason is not None:
        return None, reason
    error, text = _error(case, method, outputs, expected)
    limit = _LIMITS[case.dtype]
    return error, None if error <= limit else f"wrong: relative errors {text}, the limit is {limit:.2g}"


def _error(case, method, outputs, expected):
    """Return the largest error of a method's outputs, and the text of all of them."""
    exact = tuple(own(one, dim).float() for one, dim in zip(expected, method.dims))
    errors = harness.errors(tuple(one.float() for one in outputs), exact)
    names = OUTPUTS[case.phase]
    return max(errors), ", ".join(f"{name} {error:.2g}" for name, error in zip(names, errors, strict=True))


def _peak_bytes(method):
    """Return the peak memory of one call, which begins without gradients."""
    method.model.zero_grad(set_to_none=True)
    return harness.peak_bytes(lambda: method.call(None))


def _in_graphs(methods, errors):
    """Capture one call of each method in a CUDA graph. Return ({(name, True): Captured}, {(name, True): reason})."""
    captured, reasons = {}, {}
    for name, method in methods.items():
        graph, reason = graphs.capture(method.call, [None], None, calls=1)
        if reason is None and method.checked:
            eager = method.complete(method.call(None))
            graph(None)
            again = harness.errors(method.complete(graph.outputs), eager)
            if max(again) > max(_FACTOR * errors[name], 1e-3):
                reason = f"wrong: relative error {max(again):.2g} against the eager call"
        if reason is None:
            captured[name, True] = graph
        else:
            reasons[name, True] = reason
    return captured, reasons


# ---- in the calling process ----


def first_reasons(found):
    """Return the result of ``measure`` on rank 0, with the reasons for absence of the rank that failed.

    Args:
        found: the results of all ranks. Their entries have the same order.
    """
    merged = []
    for entries in zip(*found, strict=True):
        reasons = [entry["absent"] for entry in entries if entry["absent"] not in (None, _FAILED_ELSEWHERE)]
        merged.append({**entries[0], "absent": next(iter(reasons), entries[0]["absent"])})
    return merged


def rows(case, found, link_gbps):
    """Return the rows of a case for the result of ``measure`` on a rank."""
    common = {**case.fields(), "version": _version(case.framework), "link_gbps": link_gbps}
    return [{**common, **fields} for fields in found]


def absent_rows(case, reason, link_gbps=None):
    """Return the rows of a case whose measurement failed."""
    return rows(case, [_row(name, False, absent=reason) for name in case.methods], link_gbps)


def _version(framework):
    """Return the version of a framework, or None if it is not installed."""
    try:
        return importlib.metadata.version(_PACKAGES[framework])
    except importlib.metadata.PackageNotFoundError:
        return None
