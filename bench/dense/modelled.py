"""Shipped table entries from the rows of solo mode with a modelled link: `python -m bench.dense.modelled`.

Only kernels that one launch starts are shipped: rows are of calls in CUDA graphs, and the copy engine costs an eager
call host time that they do not show. Of ``ag_gemm`` only the warp-specialized kernel is shipped: the model does not
know how many programs that push are too many for a link, and only the default number of that kernel was compared on a
real one. A problem with an entry that was measured on all ranks keeps it if that one is faster or not older.
"""

import re
from pathlib import Path

from bench.core.points import read_solo
from bench.report.tables import newest
from tdkernels.autotune import disk_cache, table
from tdkernels.autotune.problem import Problem, slug
from tdkernels.autotune.tunable import tunable, versions

RESULTS = Path(__file__).parents[1] / "results"
OPERATORS = ("ag_gemm", "gemm_rs")
_TRANSPORTS = "push", "forward", "direct"


def best_rows(folder=RESULTS):
    """Return {problem: its row with the fastest config} for the newest run of each problem with a modelled link.

    A problem is left out if a kernel that is not shipped was faster.
    """
    rows = filter(_can_compete, read_solo(folder))
    runs = newest(rows, lambda row: None, _problem, with_overrides=True).get(None, {})
    best = {problem: min(run.values(), key=lambda row: row["ms"]) for problem, run in runs.items()}
    return {problem: row for problem, row in best.items() if _can_ship(row)}


def _can_compete(row):
    config = row["config"]
    timed = row["op"] in OPERATORS and row["link_gbps"] is not None and config is not None and row["ms"] is not None
    if not timed:
        return False
    return config["method"] == "parts" or config["method"] == "fused" and config["transport"] in _TRANSPORTS


def _can_ship(row):
    if row["config"]["method"] == "parts":
        return False
    return row["op"] != "ag_gemm" or row["config"].get("warp_specialize", False)


def _problem(row):
    sizes = row["m"], row["n"], row["k"]
    return Problem(row["op"], row["gpu"], row["ranks"], row["ranks"], row["dtype"], "nk", sizes)


def entry_of(problem, row):
    """Return the table entry of a row."""
    tuned = tunable(problem.operator)
    config = tuned.config_to_dict(tuned.config_from_dict(row["config"]))
    measured_with = {**versions(tuned), "torch": row["torch"], "triton": row["triton"]}
    return table.Entry(
        problem, measured_with, config, row["ms"], local_ms=row["gemm_ms"], wire_ms=row["wire_ms"],
        when=row["date"][:10], graph=row["graph"], modelled=True,
    )


def modelled_entries(folder=RESULTS):
    """Return {(operator, GPU): modelled entries} without those of problems that keep their measured entry."""
    found = {}
    for problem, row in best_rows(folder).items():
        entry = entry_of(problem, row)
        measured = {each.problem: each for each in measured_entries(*table.head(entry))}.get(problem)
        if measured is None or measured.ms > entry.ms and measured.when < entry.when:
            found.setdefault(table.head(entry), []).append(entry)
    return found


def measured_entries(operator, gpu):
    """Return the entries of a shipped table that are not modelled."""
    return [entry for entry in disk_cache.shipped_entries(operator, gpu) if not entry.modelled]


def main():
    """Replace the modelled entries of the shipped tables."""
    found = modelled_entries()
    heads = {table.head(entry_of(problem, row)) for problem, row in best_rows().items()}
    for operator, gpu in sorted(heads):
        entries = found.get((operator, gpu), [])
        file = disk_cache.SHIPPED / slug(gpu) / f"{operator}.json"
        measured = measured_entries(operator, gpu)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(table.to_json([*measured, *entries]), encoding="utf-8")
        print(re.sub(r"^.*/tdkernels/", "tdkernels/", str(file)), f"{len(entries)} modelled entries")


if __name__ == "__main__":
    main()
