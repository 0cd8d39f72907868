"""Several parts of one layer, such as its halves and its gradients, of which all methods take turns in one run.

A method of a part is known by (part, name). The first word of a name says what it is: products alone are "grouped",
"gemm" or "attention", "collective" is without them, "sequence" is one after the other. Where there are several of a
kind, by kernels of torch's that may be missing, a second word tells them apart, and the fastest is compared with.
"""

import json

from bench.core import graphs, harness
from bench.core.measure import timed

PRODUCTS = ("grouped", "gemm", "attention")
ALONE = (*PRODUCTS, "collective")


def measure(parts, sets, plan, methods_of, alone_of, references_of, config_of):
    """As ``measure.measure``, of methods (part, name).

    Args:     methods_of: ({name: Method}, {name: why it is absent}) of a part
              alone_of: {name: call} of a part
              references_of: what ``harness.why_it_is_wrong`` wants, of a part
              config_of: the config that a row of the part shows where a call as it comes has none
    """
    calls, configs, absent, captured, not_captured = {}, {}, {}, {}, {}
    for part in parts:  # the references of one part at a time: those of the weights' gradients are large
        methods, missing = methods_of(part)
        references = references_of(part)
        for name in list(methods):
            if reason := why_absent(name, methods[name], references):
                missing[name] = reason
                del methods[name]
        if plan.cuda_graph:
            graphs_, reasons = _in_graphs(part, methods, alone_of(part), sets, references)
            captured, not_captured = captured | graphs_, not_captured | reasons
        calls |= _of_part(part, alone_of(part) | {name: method.call for name, method in methods.items()})
        configs |= _of_part(part, {
            name: method.config or config_of(part) for name, method in methods.items() if name.startswith("tdkernels")
        })
        absent |= _of_part(part, missing)
        del references
    return timed(calls, captured, sets, plan, configs, absent, not_captured)


def _of_part(part, found):
    return {(part, name): value for name, value in found.items()}


def overridden(plan, default, override, method):
    """({name: Method}, {name: why it is absent}) of tries of other configs.

    Args:     default: the config of which fields are changed, by ``override`` (config, fields)
              method: the Method of a config
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


def why_absent(name, method, references):
    """None if a method can be timed; raises where one is wrong, or fails in its default config.

    One of several kernels of torch's is only left out.
    """
    reason = harness.why_it_fails(method.call, references[0][0])
    wrong = None if reason else harness.why_it_is_wrong(lambda s: method.plain(method.call(s)), references)
    one_of_several = " " in name
    if (wrong and not (one_of_several and "{" not in name)) or (reason and not one_of_several):
        raise RuntimeError(f"{name}: {wrong or reason}")
    return reason or wrong


def _in_graphs(part, methods, alone, sets, references):
    """As ``graphs.capture_all``, of (part, name)."""
    if "backward" in part:
        return {}, {(part, name): "a backward is not captured" for name in [*methods, *alone]}
    calls = {name: method.call for name, method in methods.items() if not method.host_waits} | alone
    captured, reasons = graphs.capture_all(calls, sets, None, unchecked=calls)
    for name in [name for name in captured if name in methods]:
        outputs = captured[name].outputs
        wrong = harness.why_it_is_wrong(lambda _, o=outputs, m=methods[name]: m.plain(o), references[:1])
        if wrong:
            reasons[name] = wrong
            del captured[name]
    reasons |= {name: "the host waits for how many rows there are" for name in methods if name not in calls}
    return _of_part(part, captured), _of_part(part, reasons)


# ---- In the calling process ----


def derived(found, flops, wire_bytes, link_gbps):
    """Per entry of ``measure``'s the fields of its row that follow from its times; floor: the products or the wire.

    Args:     flops, wire_bytes: of a part
    """
    ms_of = {(*key, graph): times["ms"] for key, graph, times in found if times.get("ms")}

    def fastest(part, graph, kinds):
        some = [ms for (of, name, how), ms in ms_of.items() if (of, how) == (part, graph) and kind_of(name) in kinds]
        return min(some, default=None)

    table = []
    for (part, method), graph, times in found:
        ms, wire = times.get("ms"), wire_bytes(part)
        wire_ms = wire / link_gbps / 1e6 if link_gbps else None
        products_ms = fastest(part, graph, PRODUCTS) or fastest(part, False, PRODUCTS) or 0.0
        base_ms = fastest(part, graph, ("sequence",))
        floor_ms = max(products_ms, wire_ms or 0.0)
        kind = kind_of(method)
        both = ms is not None and kind not in ALONE
        table.append({
            "pass": part, "method": method, "graph": graph, "absent": times.get("absent"),
            "ms": ms, "host_ms": times.get("host_ms"), "burst": times.get("burst"),
            "tflops": flops(part) / ms / 1e9 if both or (ms and kind in PRODUCTS) else None,
            "wire_bytes": wire, "wire_gbps": wire / ms / 1e6 if both or (ms and kind == "collective") else None,
            "speedup": base_ms / ms if both and base_ms else None, "floor_ms": floor_ms, "wire_ms": wire_ms,
            "efficiency": floor_ms / ms if both else None, "link_gbps": link_gbps, "config": times.get("config"),
        })
    return table


def kind_of(method):
    """The first word of its name."""
    return method.partition(" ")[0]
