"""Measure several parts of a layer, such as its stages and its backward, with all methods interleaved in one run.

A method of a part is identified by (part, name). The first word of the name is its kind: "grouped", "gemm" or
"attention" is the compute alone, "collective" the communication alone, "sequence" the unfused baseline. If torch has
several kernels for one kind, some of which may be unavailable, a second word names the kernel, and comparisons use the
fastest one.
"""

import json

from bench.core import graphs, harness
from bench.core.measure import timed

COMPUTE = ("grouped", "gemm", "attention")
ALONE = (*COMPUTE, "collective")


def measure(parts, sets, plan, methods_of, alone_of, references_of, config_of):
    """Check and time all methods of all parts. Returns the same as ``measure.measure``, for methods (part, name).

    Args:
        methods_of: function of a part: ({name: Method}, {name: reason for absence}).
        alone_of: function of a part: {name: call}, the compute or the communication alone.
        references_of: function of a part: the references for ``harness.mismatch_reason``.
        config_of: function of a part: the config stored in its rows if the method has no explicit config.
    """
    calls, configs, absent, captured, not_captured = {}, {}, {}, {}, {}
    for part in parts:  # one part at a time, because the references of weight gradients are large
        methods, missing = methods_of(part)
        references = references_of(part)
        for name in list(methods):
            if reason := absent_reason(name, methods[name], references):
                missing[name] = reason
                del methods[name]
        if plan.cuda_graph:
            graphs_, reasons = _in_graphs(part, methods, alone_of(part), sets, references)
            captured, not_captured = captured | graphs_, not_captured | reasons
        calls |= _keyed_by_part(part, alone_of(part) | {name: method.call for name, method in methods.items()})
        configs |= _keyed_by_part(part, {
            name: method.config or config_of(part) for name, method in methods.items() if name.startswith("tdkernels")
        })
        absent |= _keyed_by_part(part, missing)
        del references
    return timed(calls, captured, sets, plan, configs, absent, not_captured)


def _keyed_by_part(part, found):
    return {(part, name): value for name, value in found.items()}


def overridden(plan, default, override, method):
    """Return ({name: Method}, {name: reason for absence}) for the config overrides of the plan.

    Args:
        default: config to change.
        override: function (config, fields) that returns the changed config.
        method: function that returns the Method of a config.
    """
    methods, absent = {}, {}
    for number, fields in enumerate(plan.overrides, 1):
        name = f"tdkernels c{number} {json.dumps(fields)}"
        try:
            config = override(default, fields)
        except TypeError as err:  # a field of another operator
            absent[name] = str(err)
        else:
            methods[name] = method(config)
    return methods, absent


def absent_reason(name, method, references):
    """Return None if a method can be timed, else the reason.

    Raises:
        RuntimeError: if a method is wrong, or fails with its default config. If torch has several kernels of the kind,
            the kernel is left out instead.
    """
    reason = harness.failure_reason(method.call, references[0][0])
    wrong = None if reason else harness.mismatch_reason(lambda s: method.plain(method.call(s)), references)
    optional = " " in name
    if (wrong and not (optional and "{" not in name)) or (reason and not optional):
        raise RuntimeError(f"{name}: {wrong or reason}")
    return reason or wrong


def _in_graphs(part, methods, alone, sets, references):
    """Capture the methods of a part. Returns the same as ``graphs.capture_all``, keyed by (part, name)."""
    if "backward" in part:
        return {}, {(part, name): "a backward is not captured" for name in [*methods, *alone]}
    calls = {name: method.call for name, method in methods.items() if not method.host_waits} | alone
    captured, reasons = graphs.capture_all(calls, sets, None, unchecked=calls)
    for name in [name for name in captured if name in methods]:
        outputs = captured[name].outputs
        wrong = harness.mismatch_reason(lambda _, o=outputs, m=methods[name]: m.plain(o), references[:1])
        if wrong:
            reasons[name] = wrong
            del captured[name]
    reasons |= {name: "the host waits for the number of rows" for name in methods if name not in calls}
    return _keyed_by_part(part, captured), _keyed_by_part(part, reasons)


# ---- in the calling process ----


def derived(found, flops, wire_bytes, link_gbps):
    """Return one row per entry of ``measure``. The floor is the larger of the compute alone and the transfer time.

    Args:
        flops, wire_bytes: functions of a part.
    """
    ms_of = {(*key, graph): times["ms"] for key, graph, times in found if times.get("ms")}

    def fastest(part, graph, kinds):
        times = [ms for (of, name, how), ms in ms_of.items() if (of, how) == (part, graph) and kind_of(name) in kinds]
        return min(times, default=None)

    table = []
    for (part, method), graph, times in found:
        ms, wire = times.get("ms"), wire_bytes(part)
        wire_ms = wire / link_gbps / 1e6 if link_gbps else None
        compute_ms = fastest(part, graph, COMPUTE) or fastest(part, False, COMPUTE) or 0.0
        base_ms = fastest(part, graph, ("sequence",))
        floor_ms = max(compute_ms, wire_ms or 0.0)
        kind = kind_of(method)
        both = ms is not None and kind not in ALONE
        table.append({
            "pass": part, "method": method, "graph": graph, "absent": times.get("absent"),
            "ms": ms, "host_ms": times.get("host_ms"), "burst": times.get("burst"),
            "tflops": flops(part) / ms / 1e9 if both or (ms and kind in COMPUTE) else None,
            "wire_bytes": wire, "wire_gbps": wire / ms / 1e6 if both or (ms and kind == "collective") else None,
            "speedup": base_ms / ms if both and base_ms else None, "floor_ms": floor_ms, "wire_ms": wire_ms,
            "efficiency": floor_ms / ms if both else None, "link_gbps": link_gbps, "config": times.get("config"),
        })
    return table


def kind_of(method):
    """Return the kind of a method, the first word of its name."""
    return method.partition(" ")[0]
