"""Shipped table entries from the rows of a run on all ranks: `python -m bench.dense.measured FILE ...`.

For machines on which there is no time for the tuner. The rows are those of `tdkernels bench --cuda-graph --config ...`.
The entry of a problem becomes the config with the smallest geometric mean of eager calls and CUDA graphs, of those that
are not slower than the default or the torch baseline in eager calls. It replaces the measured one; if there is no such
config, the entry stays as it is. The rows must have been measured with the current kernels: the entries say so.
"""

import argparse
import json
import math
from pathlib import Path

from bench.dense.modelled import entry_of, problem_of, write_table
from bench.report.tables import newest
from tdkernels.autotune import disk_cache, table
from tdkernels.autotune.tunable import tunable


def entries_of(rows):
    """Return one entry for each problem in ``rows`` with a config that is fast enough, from its newest run."""
    forward = [row for row in rows if row["pass"] == "forward" and not row["absent"]]
    runs = {graph: _runs(forward, graph) for graph in (False, True)}
    both = {problem: (run, runs[True][problem]) for problem, run in runs[False].items() if problem in runs[True]}
    entries = [_entry(problem, *of_problem) for problem, of_problem in both.items()]
    return [entry for entry in entries if entry is not None]


def _runs(rows, graph):
    """Return {problem: {method: row}} of the newest runs, eager or in CUDA graphs."""
    chosen = [row for row in rows if row["graph"] == graph]
    runs = newest(chosen, lambda row: None, lambda row: problem_of(row, row["num_gpus"]), with_overrides=True)
    return runs.get(None, {})


def _entry(problem, eager, captured):
    """Return the entry of a problem from its rows, {method: row}, of eager calls and of CUDA graphs, or None."""
    limit = min(eager[name]["ms"] for name in ("tdkernels-default", "sequence"))  # an entry must not be slower
    known = [name for name, row in eager.items() if row["config"] and name in captured and row["ms"] <= limit]
    if not known:
        return None
    best = min(known, key=lambda method: math.sqrt(eager[method]["ms"] * captured[method]["ms"]))
    wire_bytes = tunable(problem.operator).floors(problem).wire_bytes
    return entry_of(
        problem, eager[best], plain_ms=eager["sequence"]["ms"], default_ms=eager["tdkernels-default"]["ms"],
        local_ms=eager["gemm"]["ms"], wire_ms=wire_bytes / eager[best]["link_gbps"] / 1e6,
    )


def main(arguments=None):
    """Replace the measured entries of the problems in the given files."""
    parser = argparse.ArgumentParser(prog="python -m bench.dense.measured", description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="files of rows")
    parser.add_argument("--since", required=True, help="leave out rows before this date")
    options = parser.parse_args(arguments)
    for path in options.files:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        entries = entries_of([row for row in rows if row["date"] >= options.since])
        for operator, gpu in dict.fromkeys(map(table.head, entries)):
            new = [entry for entry in entries if table.head(entry) == (operator, gpu)]
            merged = table.newest([*disk_cache.shipped_entries(operator, gpu), *new])
            write_table(operator, gpu, merged)
            print(f"{path}: {len(new)} entries of {operator} for {gpu}")


if __name__ == "__main__":
    main()
