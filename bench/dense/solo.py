"""Solo mode: one GPU acts as one of W ranks, to measure the dense kernels for W ranks without the others.

`python -m tdkernels bench ag_gemm gemm_rs gemm_ar --solo 8 [--link 390]`. Rows are written to DIR/<gpu>x1/solo.jsonl,
apart from those of real runs: no byte crosses a link. Times are of calls in CUDA graphs; ``--eager`` adds those of
eager calls. The model of the link is two further launches, so their host time is longer than that of a real call.
"""

import json
import re

import torch
import torch.nn.functional as F

import tdkernels
from bench.core import graphs, harness
from bench.core.each_case import measure_all
from bench.core.measure import default_config, input_sets, overridden
from bench.dense.operators import DTYPE
from tdkernels.autotune.hardware import hardware
from tdkernels.autotune.tunable import tunable
from tdkernels.launch import RankPool, rank_device
from tdkernels.solo import enter_solo_mode

FLOOR_GBPS = 390.0  # of the wire in a row without a link: the most that a pair of H200 reached in each direction
_BEST = 3  # configs of each kind that are timed, by the cost model
# Calls per graph. The relay runs on a second stream, and a replay of a graph with two streams begins about 50 µs after
# the replay before, on an H100.
_CALLS = 40
_PERIOD, _LARGEST_TILE = 32, 256


def main(cases, ranks, link_gbps, plan, keep, common, deadline=None):
    """Measure cases in a process that acts as one of ``ranks`` ranks; return (rows, failures).

    Args:
        cases: list of Case.
        ranks: number of ranks, W.
        link_gbps: GB/s at which this rank receives, or None for a link that is infinitely fast.
        plan: a measure.Plan.
        keep: as for ``measure_all``.
        common: fields of all rows.
        deadline: as for ``measure_all``.
    """
    with RankPool(1, "cuda" if torch.cuda.is_available() else "cpu", timeout_s=300.0) as pool:
        common = {**pool.run(harness.machine)[0], **common}
        pool.run(enter_solo_mode, ranks, link_gbps and link_gbps * 1e9)

        def rows_of(case):
            return rows(case, pool.run(measure, case, plan)[0], link_gbps)

        return measure_all(pool, cases, rows_of, common, keep, _summary, deadline)


@harness.measurement
def measure(case, plan):
    """Check and time the GEMM alone and the configs of a case.

    Returns:
        [(method, whether in a CUDA graph, times or absence, config)].
    """
    sets = _inputs(case)
    references = [_reference(case, inputs) for inputs in sets[:2]]
    configs, absent = {}, {}
    if not case.backward:
        if plan.overrides:
            configs, absent = overridden(default_config(case), plan.overrides)
        else:
            configs = _configs(case)
    calls = {"gemm": case.direction.gemm, "tdkernels": case.direction.ours(case, None)}
    calls |= {name: case.direction.ours(case, config) for name, config in configs.items()}
    absent |= harness.drop_wrong(calls, [name for name in calls if name != "gemm"], references)
    if set(calls) == {"gemm"}:
        raise RuntimeError("; ".join(f"{name}: {reason}" for name, reason in absent.items()))
    methods = {(name, False): call for name, call in calls.items()} if plan.eager else {}
    if rank_device().type == "cuda":
        calls, not_captured = graphs.capture_all(calls, sets, references, ("gemm",), _CALLS)
        absent |= not_captured
    if not case.backward and "tdkernels" in calls:
        configs["tdkernels"] = tdkernels.explain(case.operator, sets[0].x, sets[0].weight).config
    methods |= {(name, True): call for name, call in calls.items()}
    times = harness.time_methods(methods, sets, plan.rounds, plan.burst_ms)
    tdkernels.synchronize()
    found = [(name, graph, measured, configs.get(name)) for (name, graph), measured in times.items()]
    return found + [(name, True, {"absent": reason}, configs.get(name)) for name, reason in absent.items()]


def _inputs(case):
    """Return the inputs of several calls.

    In solo mode gemm_ar adds different tiles of one product, those that the ranks own. So its tiles are equal.
    """
    sets = input_sets(case)
    if case.operator == "gemm_ar":
        for inputs in sets:
            make_tiles_equal(case.shape.m, case.shape.n, (inputs.x, inputs.weight))
    return sets


def has_equal_tiles(m, n):
    """Return whether all tiles of a product [m, n] can be equal: whether it consists of whole tiles."""
    return m % _LARGEST_TILE == 0 and n % _LARGEST_TILE == 0


def make_tiles_equal(m, n, operands):
    """Make the operands of a product [m, n] repeat after _PERIOD rows, which divides the sizes of every tile."""
    if not has_equal_tiles(m, n):
        raise ValueError(
            f"gemm_ar in solo mode: M and N must be multiples of {_LARGEST_TILE}, the product is [{m}, {n}]"
        )
    for operand in operands:
        operand.unflatten(0, (-1, _PERIOD))[1:] = operand[:_PERIOD]


def _configs(case):
    """Return {name: config}: of each kind, the best by the cost model."""
    device = rank_device()
    tuned, problem = tunable(case.operator), case.problem(device)
    rates = hardware(device, DTYPE)
    kinds = {}
    for config in sorted(tuned.space(problem, device), key=lambda config: tuned.estimate_ms(config, problem, rates)):
        kind = _kind(config)
        if config.method != "torch" and tuned.illegal(config, problem, device) is None:
            kinds.setdefault(kind, []).append(config)
    return {f"{kind} {i}": config for kind, found in kinds.items() for i, config in enumerate(found[:_BEST], 1)}


def _kind(config):
    """Return the method, exchange or transport of a config, by which it is grouped."""
    if config.method == "parts":
        return config.method
    return "one_shot" if getattr(config, "exchange", "") == "one_shot" else config.transport


def _reference(case, inputs):
    """Return (inputs, fp32 results, errors of the same in the dtype of the inputs) of the mirrored run.

    The peers are mirror images of this rank: they gather its shard, and send it the partial sums that it sends them.
    """
    names = [name for name in ("x", "weight", "dy", "full") if hasattr(inputs, name)]
    exact = _mirrored(case, type(inputs)(**{name: getattr(inputs, name).float() for name in names}))
    return inputs, exact, harness.errors(_mirrored(case, inputs), exact)


def _mirrored(case, s):
    def scattered(partial):
        return partial.unflatten(0, (case.ranks, -1)).float().sum(0).to(partial.dtype)

    if case.operator == "gemm_ar":
        return (case.ranks * F.linear(s.x, s.weight).float()).to(s.x.dtype)
    if case.operator == "ag_gemm":
        return (scattered(s.dy @ s.weight), s.dy.t() @ s.full) if case.backward else F.linear(s.full, s.weight)
    return (s.full @ s.weight, s.full.t() @ s.x) if case.backward else scattered(F.linear(s.x, s.weight))


# ---- rows ----


def rows(case, found, link_gbps):
    """Return one row per method."""
    gemm_ms = {graph: times["ms"] for name, graph, times, _ in found if name == "gemm"}
    wire_ms = case.wire_bytes / (link_gbps or FLOOR_GBPS) / 1e6
    table = []
    for name, graph, times, config in found:
        ms = times.get("ms")
        table.append({
            "what": "solo", "op": case.operator, "pass": "backward" if case.backward else "forward",
            "shape": str(case.shape), "name": case.shape.name, "m": case.shape.m, "n": case.shape.n, "k": case.shape.k,
            "dtype": str(DTYPE).removeprefix("torch."), "ranks": case.ranks, "link_gbps": link_gbps,
            "method": name, "graph": graph, "absent": times.get("absent"), "ms": ms, "host_ms": times.get("host_ms"),
            "burst": times.get("burst"), "gemm_ms": gemm_ms[graph], "wire_ms": wire_ms,
            "over_floor": ms / max(gemm_ms[graph], wire_ms) if ms is not None else None,
            "config": None if config is None else json.loads(json.dumps(vars(config), default=vars)),
        })
    return table


def _summary(table):
    """Return the times in one line: the GEMM alone, the selected config, and the fastest of each kind."""
    best = {}
    for row in table:
        kind = re.sub(r" \d+$", "", row["method"]) + ("" if row["graph"] else " (eager)")
        if row["ms"] is not None and (kind not in best or row["ms"] < best[kind]["ms"]):
            best[kind] = row
    parts = [f"{kind} {row['ms']:.4f} ({row['over_floor']:.2f})" for kind, row in best.items()]
    return f"{', '.join(parts)} ms (× floor); wire {table[0]['wire_ms']:.4f}"
