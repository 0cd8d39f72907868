"""Page of the report: the counts of the fault campaigns, from the summaries that ``make chaos`` writes."""

import json

from bench.report.cells import markdown, short_revision

_INTRO = """`make chaos` injects seeded faults into calls of all operators.
[Failures](../../docs/concepts/failures.md#tests) explains the faults and what the runs found.

- The tables count calls of healthy ranks. An outcome in capitals is a defect of the library, or the campaign was too
  strict.
- **not reported**: calls of a host that runs ahead, whose error was raised when it synchronized.
- **late**: an error that exceeded twice the timeout plus an allowance for the machine.
"""
_TITLES = {"cpu": "CPU ranks", "shared": "Ranks that share a GPU", "cuda": "A GPU for each rank"}
_HEALTHY = ", healthy ranks"


def read(folder):
    """Return the summaries in a folder of results, as dictionaries with the name of their "file"."""
    paths = sorted((folder / "reliability").glob("chaos-*.json"))
    return [json.loads(path.read_text()) | {"file": path.name} for path in paths]


def text(summaries):
    """Return the page; "" if there are no summaries."""
    if not summaries:
        return ""
    return "\n".join([_INTRO, *map(_section, sorted(summaries, key=_order))])


def _order(summary):
    return list(_TITLES).index(summary["device"]), summary["file"]


def _section(summary):
    where = "".join(f", {gpu}" for gpu in summary.get("gpus", []))
    sizes = summary.get("cases_by_world_size", {})
    cases = ", ".join(f"{sizes[size]} on {size} ranks" for size in sorted(sizes, key=int))
    revisions = "".join(f", revision {short_revision(name)}" for name in summary.get("revisions", []))
    skipped = f" {summary['skipped']} further cases were skipped." if summary.get("skipped") else ""
    return "\n".join([
        f"### {_TITLES[summary['device']]}{where}: `{summary['file']}`\n",
        f"{summary['cases']} cases{f' ({cases})' if cases else ''} in {summary['seconds']} s, seeds {_seeds(summary)}"
        f"{revisions}.{skipped} Wrong results: {summary['wrong']}. Hangs or late errors: {summary['hangs']}. "
        f"Errors were raised at most {summary['longest_error_beyond_the_timeout_s']:.1f} s after the timeout.\n",
        markdown(_table(summary)),
    ])


def _seeds(summary):
    return ", ".join(f"{first} to {end - 1}" for first, end in summary["seeds"])


def _table(summary):
    """Return the lines of the table: a fault per line, an outcome per column."""
    rows = summary["calls_by_fault"].items()
    counts = {key.removesuffix(_HEALTHY): row for key, row in rows if key.endswith(_HEALTHY)}
    outcomes = sorted({name for row in counts.values() for name in row}, key=lambda name: (name.isupper(), name))
    lines = [["fault of one rank", "cases", *outcomes], ["---", *["---:"] * (1 + len(outcomes))]]
    for fault, row in sorted(counts.items()):
        lines.append([fault, *map(str, [summary["cases_by_fault"][fault], *(row.get(name, 0) for name in outcomes)])])
    return lines
