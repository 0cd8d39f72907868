"""Shipped table entries from the rows of solo mode with a modelled link: `python -m bench.dense.modelled`.

Only kernels that one launch starts are shipped: rows are of calls in CUDA graphs, and the copy engine costs an eager
call host time that they do not show. The model does not know how many programs that push are too many for a link: it
prefers 128 for shapes that take 6 to 10 % longer with them on 8 H200 than with 64. So of ``ag_gemm`` only the
warp-specialized kernel with the default number is shipped, and no entry that was measured with that kernel is replaced.
Otherwise a problem with an entry that was measured on all ranks keeps it if that one is faster or not older.
"""

from pathlib import Path

from bench.core.points import read_solo
from bench.report.tables import newest
from tdkernels.autotune import disk_cache, table
from tdkernels.autotune.problem import Problem, slug
from tdkernels.autotune.tunable import tunable, versions
from tdkernels.ops.dense.ag_gemm.config import NUM_COMM_SPECIALIZED

RESULTS = Path(__file__).parents[1] / "results"
OPERATORS = ("ag_gemm", "gemm_rs", "gemm_ar")
_TRANSPORTS = "push", "forward", "direct"


def best_rows(folder=RESULTS):
    """Return {problem: its row with the fastest config} for the newest run of each problem with a modelled link.

    A problem is left out if a kernel that is not shipped was faster, or if the warp-specialized kernel was not timed.
    That one is the default for large M.
    """
    rows = filter(_can_compete, read_solo(folder))
    runs = newest(rows, lambda row: None, lambda row: problem_of(row, row["ranks"]), with_overrides=True).get(None, {})
    complete = {problem: run for problem, run in runs.items() if any(map(_is_specialized, run.values()))}
    best = {problem: min(run.values(), key=lambda row: row["ms"]) for problem, run in complete.items()}
    return {problem: row for problem, row in best.items() if _can_ship(row)}


def _can_compete(row):
    config = row["config"]
    timed = row["op"] in OPERATORS and row["link_gbps"] is not None and config is not None and row["ms"] is not None
    if not timed:
        return False
    if row["op"] == "ag_gemm" and _is_specialized(row) and config["num_comm_sms"] != NUM_COMM_SPECIALIZED:
        return False
    return config["method"] == "parts" or config["method"] == "fused" and config["transport"] in _TRANSPORTS


def _can_ship(row):
    if row["config"]["method"] == "parts":
        return False
    return row["op"] != "ag_gemm" or _is_specialized(row)


def _is_specialized(row):
    return row["config"].get("warp_specialize", False)


def problem_of(row, ranks):
    """Return the problem of a row for a number of ranks on one node."""
    return Problem(row["op"], row["gpu"], ranks, ranks, row["dtype"], "nk", (row["m"], row["n"], row["k"]))


def entry_of(problem, row, **times):
    """Return the table entry of a row, with further fields of ``table.Entry``."""
    tuned = tunable(problem.operator)
    config = tuned.config_to_dict(tuned.config_from_dict(row["config"]))
    measured_with = {**versions(tuned), "torch": row["torch"], "triton": row["triton"]}
    return table.Entry(problem, measured_with, config, row["ms"], when=row["date"][:10], graph=row["graph"], **times)


def modelled_entries(folder=RESULTS):
    """Return {(operator, GPU): modelled entries} without those of problems that keep their measured entry."""
    found = {}
    for problem, row in best_rows(folder).items():
        entry = entry_of(problem, row, local_ms=row["gemm_ms"], wire_ms=row["wire_ms"], modelled=True)
        entries = found.setdefault(table.head(entry), [])
        measured = {each.problem: each for each in measured_entries(*table.head(entry))}.get(problem)
        if measured is None or _replaces(entry, measured):
            entries.append(entry)
    return found


def _replaces(entry, measured):
    """Return whether a modelled entry comes before a measured one."""
    if entry.problem.operator == "ag_gemm" and measured.config.get("warp_specialize"):
        return False  # the two differ in the number of programs that push, or in the size of chunks
    return measured.ms > entry.ms and measured.when < entry.when


def measured_entries(operator, gpu):
    """Return the entries of a shipped table that are not modelled."""
    return [entry for entry in disk_cache.shipped_entries(operator, gpu) if not entry.modelled]


def write_table(operator, gpu, entries):
    """Write a shipped table."""
    file = disk_cache.SHIPPED / slug(gpu) / f"{operator}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(table.to_json(entries), encoding="utf-8")


def main():
    """Replace the modelled entries of the shipped tables."""
    for (operator, gpu), entries in modelled_entries().items():
        write_table(operator, gpu, [*measured_entries(operator, gpu), *entries])
        print(f"{operator} for {gpu}: {len(entries)} modelled entries")


if __name__ == "__main__":
    main()
