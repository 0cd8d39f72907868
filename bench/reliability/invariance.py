"""Time calls inside and outside the batch-invariant mode: ``python -m bench.reliability.invariance``.

Calls that represent decoding and prefill, bf16, eager and in CUDA graphs. Methods:

    default     the call outside the mode, with the config that it selects: tuned, or the heuristic
    invariant   the same call within ``tdkernels.batch_invariant()``, also during the capture of a graph
    torch       the unfused baseline, NCCL and torch's GEMM; for ag_gemm, gemm_rs and gemm_ar only

"ratio" is the time of a method over that of "default". All results are first compared with those of "default". Calls
cycle through operands that do not fit in the L2 cache together, if eight sets of operands suffice for that. On one rank
``column_linear`` replaces the dense operators. Prints one line per case; rows are appended to a file in ``--out``, if
it is given. Without GPUs the command is a rehearsal with small sizes that writes nothing.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import torch

import tdkernels
from bench.core import graphs, harness
from bench.core.rank_program import measure_on_ranks
from bench.reliability import invariance_cases
from bench.reliability.invariance_cases import DEFAULT, INVARIANT, OPERATORS, RANKS
from tdkernels.launch import pick_device, rank_device

FILE = "invariance"
_MAX_ERROR = 2e-2  # relative difference between results: several roundings to bf16
_COLD_BYTES, _MAX_SETS = 256 << 20, 8  # of the operands that calls cycle through: several times any L2 cache
_BURST_MS = 15.0


# ---- on the ranks ----


@harness.measurement
def measure(case, rounds):
    """Check and time all methods.

    Returns:
        [(method, whether in a CUDA graph, times)]. times is the entry of ``harness.time_methods`` plus "config", or
        {"absent": reason, "config"} if a call cannot be captured.
    """
    on_gpu = rank_device().type == "cuda"
    sets = [case.inputs(0)]
    count = max(2, min(_MAX_SETS, -(-_COLD_BYTES // case.nbytes(sets[0])))) if on_gpu else 2
    sets += [case.inputs(seed) for seed in range(1, count)]
    calls = case.methods()
    references = _references(calls[DEFAULT], sets[:2])  # two, because workspaces are double-buffered
    for name, call in calls.items():
        if reason := harness.mismatch_reason(call, references):
            raise RuntimeError(f"{name}: {reason}")
    configs = _configs(case, sets[0])
    captured, absent = graphs.capture_all(calls, sets, references, ()) if on_gpu else ({}, {})
    timed = {(name, False): call for name, call in calls.items()}
    timed |= {(name, True): call for name, call in captured.items()}
    found = harness.time_methods(timed, sets, rounds, _BURST_MS if on_gpu else 0)
    tdkernels.synchronize()
    found |= {(name, True): {"absent": reason} for name, reason in absent.items()}
    return [(*key, {**times, "config": configs.get(key[0])}) for key, times in found.items()]


def _references(call, sets):
    """Return references for ``harness.mismatch_reason``, which accepts twice the errors of a reference."""
    found = []
    for s in sets:
        exact = call(s)
        number = len(exact) if isinstance(exact, tuple) else 1
        found.append((s, exact, [_MAX_ERROR / 2] * number))
    return found


def _configs(case, s):
    """Return {method: config as a dictionary}, without operators that have no config."""
    found = {}
    modes = {DEFAULT: (False,), INVARIANT: (True,)} | ({RANKS: (True, case.max_ranks)} if case.max_ranks else {})
    for name, mode in modes.items():
        with tdkernels.batch_invariant(*mode):
            config = case.config(s)
        if config is not None:
            found[name] = dataclasses.asdict(config)
    return found


# ---- in the calling process ----


def rows(case, found):
    """Return one row per method."""
    base = {graph: times.get("ms") for method, graph, times in found if method == DEFAULT}
    fields = {"what": "invariance", "op": case.operator, "shape": case.shape, "name": case.name, "dtype": "bfloat16"}
    table = []
    for method, graph, times in found:
        ms = times.get("ms")
        table.append({
            **fields, "method": method, "max_ranks": case.max_ranks if method == RANKS else None,
            "graph": graph, "absent": times.get("absent"), "ms": ms,
            "us": ms * 1e3 if ms else None, "host_ms": times.get("host_ms"),
            "ratio": ms / base[graph] if ms and base.get(graph) else None, "config": times.get("config"),
        })
    return table


def line(table):
    """Return the times of a case as text: in CUDA graphs, or of eager calls if there are no graphs."""
    graph = any(row["graph"] and row["ms"] for row in table)
    shown = {row["method"]: row for row in table if row["graph"] == graph}
    times = [f"{name} {row['us']:.1f}" if row["us"] else f"{name} – ({row['absent']})" for name, row in shown.items()]
    ratio = shown.get(INVARIANT, {}).get("ratio")
    return f"{', '.join(times)} us{', in CUDA graphs' * graph}" + (f"; ratio {ratio:.2f}" if ratio else "")


def _options(arguments):
    """Return (options, number of ranks, device, cases)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, help="number of ranks; default: all GPUs, 2 without GPUs")
    parser.add_argument("--ops", nargs="+", choices=OPERATORS, metavar="OP", help=", ".join(OPERATORS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, help="start no further case after this time")
    parser.add_argument("--out", type=Path, help="folder for the rows")
    options = parser.parse_args(arguments)
    ranks = options.nproc or torch.cuda.device_count() or 2
    device = pick_device("auto", ranks)
    found = (invariance_cases.rehearsal if device == "cpu" else invariance_cases.cases)(ranks)
    chosen = [case for case in found if options.ops is None or case.operator in options.ops]
    if not chosen:
        parser.error(f"--ops: {', '.join(options.ops)} cannot be measured on {ranks} rank{'s' * (ranks > 1)}")
    return options, ranks, device, chosen


def main(arguments=None):
    """Measure and print. Return the exit code."""
    options, ranks, device, cases = _options(arguments)
    rows_of = lambda pool, case, rounds: rows(case, pool.run(measure, case, rounds)[0])  # noqa: E731
    return measure_on_ranks(ranks, device, cases, rows_of, line, options, FILE)


if __name__ == "__main__":
    sys.exit(main())
