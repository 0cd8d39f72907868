"""Time the forward of tp_moe and ep_moe with weights in fp8: ``python -m bench.experts.fp8_layers``.

All methods of a case (``fp8_layer_methods``) run in turns, eager and in CUDA graphs. Every result is compared with the
layer in fp32 first. Prints one line per case; rows are appended to a file in ``--out``, if it is given.
"""

import argparse
import sys
from pathlib import Path

import torch

import tdkernels
from bench.core import graphs, harness
from bench.core.rank_program import measure_on_ranks
from bench.experts import ep_moe, fp8_layer_methods, tp_moe
from bench.experts.fp8_layer_methods import BF16, SCALINGS, SEQUENCE
from bench.experts.moe_shapes import EP_REHEARSAL, EP_TOKENS, TP_REHEARSAL, parse
from bench.experts.tp_moe_methods import in_fp32, loop_over_experts
from tdkernels.launch import pick_device, rank_device

FILE = WHAT = "fp8_moe"
OPERATORS = ("tp_moe", "ep_moe")
_BURST_MS = 10.0
# Relative Frobenius errors, with weights in fp8 and in bf16. Rounding all operands of both GEMMs to e4m3, each with an
# error of 0.026, gives about 0.06, because the product of gate and up has the error of both.
_LIMIT, _PLAIN = 0.09, 1e-2


# ---- on the ranks ----


@harness.measurement
def measure(case, rounds):
    """Check and time all methods of a case.

    Returns:
        [(method, whether in a CUDA graph, times)]. times is the entry of ``harness.time_methods`` plus "error", or
        {"absent": reason}.
    """
    sets = [case.inputs(seed, weights) for seed, weights in enumerate(_weights(case))]
    calls, unfused = fp8_layer_methods.of(case, sets)
    found, errors = _checked(calls, unfused(loop_over_experts)(in_fp32(sets[0])), sets[0])
    timed = {(name, False): call for name, call in calls.items()}
    if rank_device().type == "cuda":
        captured, reasons = graphs.capture_all(calls, sets, None, calls)
        timed |= {(name, True): graph for name, graph in captured.items()}
        found += [(name, True, {"absent": reason}) for name, reason in reasons.items()]
    times = harness.time_methods(timed, sets, rounds, _BURST_MS if rank_device().type == "cuda" else 0)
    tdkernels.synchronize()
    return found + [(*key, {**one, "error": errors[key[0]]}) for key, one in times.items()]


def _weights(case):
    """Return the weights of two sets of operands. Those of ep_moe are larger than any cache, so both have the same."""
    return [case.weights(seed) for seed in range(2)] if case.operator == "tp_moe" else [case.weights()] * 2


def _checked(calls, exact, s):
    """Compare the methods with the layer in fp32. A baseline that fails is removed from ``calls``.

    Returns:
        ([(method, False, why it is absent)], {method: error}).

    Raises:
        RuntimeError: If a method of this library fails or is wrong.
    """
    found, errors = [], {}
    for name in list(calls):
        reason = harness.failure_reason(calls[name], s)
        if reason is None:
            errors[name] = harness.errors(calls[name](s), exact)[0]
            limit = _LIMIT if name.startswith(SCALINGS) else _PLAIN
            reason = f"wrong: relative error {errors[name]:.4f}, the limit is {limit}" if errors[name] > limit else None
        if reason is not None and name != SEQUENCE:
            raise RuntimeError(f"{name}: {reason}")
        if reason is not None:
            found.append((name, False, {"absent": reason}))
            del calls[name]
    return found, errors


# ---- in the calling process ----


def rows(case, found):
    """Return one row per method. "speedup" is over the operator with weights in bf16."""
    ms_of = {(name, graph): times.get("ms") for name, graph, times in found}
    shape, table = case.shape, []
    tokens = case.tokens if case.operator == "ep_moe" else shape.tokens
    common = {
        "what": WHAT, "op": case.operator, "shape": str(shape), "name": shape.name, "tokens": tokens,
        "inner": shape.inner, "hidden": shape.hidden, "experts": shape.experts, "choices": shape.choices,
        "link_gbps": None,
    }
    for name, graph, times in found:
        ms, base = times.get("ms"), ms_of.get((BF16, graph))
        table.append({
            **common, "method": name, "graph": graph, "absent": times.get("absent"), "ms": ms,
            "host_ms": times.get("host_ms"), "burst": times.get("burst"), "error": times.get("error"),
            "speedup": base / ms if ms and base else None,
        })
    return table


def line(table):
    """Return the times in ms as text: in CUDA graphs, or of eager calls if there are no graphs."""
    graph = any(row["graph"] and row["ms"] for row in table)
    times = [f"{row['method']} {row['ms']:.4f}" for row in table if row["ms"] and row["graph"] == graph]
    return f"{', '.join(times)} ms{', in CUDA graphs' * graph}"


def cases(operators, shapes, tokens, ranks, device):
    """Return the cases of a run."""
    if device != "cuda":
        of_tp, of_ep, tokens = TP_REHEARSAL, EP_REHEARSAL, [8]
    else:
        of_tp, of_ep = parse(shapes, operators)
    found = []
    if "tp_moe" in operators:
        found += tp_moe.cases(["tp_moe"], of_tp, ranks, "balanced", False)
    if "ep_moe" in operators:
        found += ep_moe.cases(["ep_moe"], of_ep, tokens or EP_TOKENS, ranks, "balanced", False)
    return found


def main(arguments=None):
    """Measure and print. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", default=list(OPERATORS), choices=OPERATORS, help="what is measured")
    parser.add_argument("--shapes", help="names or sizes, see `tdkernels bench tp_moe`")
    parser.add_argument("--tokens", nargs="+", type=int, help="numbers of tokens of a rank, for ep_moe")
    parser.add_argument("--nproc", type=int, help="number of ranks; default: the number of GPUs, at least 2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, help="start no further case after this time")
    parser.add_argument("--out", type=Path, help="folder for the rows")
    options = parser.parse_args(arguments)
    ranks = options.nproc or max(2, torch.cuda.device_count())
    device = pick_device("auto", ranks)
    chosen = cases(options.ops, options.shapes, options.tokens, ranks, device)

    def rows_of(pool, case, rounds):
        return rows(case, pool.run(measure, case, rounds)[0])

    return measure_on_ranks(ranks, device, chosen, rows_of, line, options, FILE)


if __name__ == "__main__":
    sys.exit(main())
