"""The page of test runs on GPUs, and which operator was measured on which hardware."""

import itertools

from bench.report.cells import markdown, short_revision

_INTRO = """Runs of the tests on GPUs, newest first, and measurements by operator and hardware. A run says nothing about
kernels that changed after it. "Passes" counts repetitions. Ranks that share a GPU test compiled kernels, not a link.
[The notes](../../docs/performance/notes/testing-on-gpus.md#test-runs) say what the larger runs found.
"""
_RUNS = ("date", "GPUs", "revision", "tests", "passes", "failures", "ranks", "what ran")
_FAMILIES = (
    ("collectives", "collective"), ("all-reduce and norm", "norm"), ("GEMM, all-reduce and norm", "gemm_ar_norm"),
    ("dispatch and combine", "ep"), ("layers of experts", "tp_moe"), ("layers of experts", "ep_moe"),
    ("grouped GEMM", "group_gemm"), ("flash_decode", "flash_decode"), ("flash_decode, latent caches", "latent"),
    ("ag_attention", "ag_attention"), ("ulysses", "ulysses"),
    ("batch-invariant mode", "invariance"),
)


def text(rows):
    """Return both tables; "" if no tests were recorded.

    Args:
        rows: ``bench.report.rows.Rows``.
    """
    if not rows.tests:
        return ""
    runs = sorted(_runs(rows.tests).items(), key=lambda item: item[0], reverse=True)
    return "\n".join([
        _INTRO, "## Test runs\n", _table(_RUNS, [_run(key, found) for key, found in runs]),
        "## Measured operators\n",
        "B: benchmark, with outputs checked before they are timed. T: autotuned. Numbers are the GPUs of one host.\n",
        _matrix(rows),
    ])


def _runs(rows):
    """Return {(date, GPU, number of GPUs, revision): rows}: one entry for each run of the tests."""
    found = {}
    for row in rows:
        found.setdefault((row["date"], row["gpu"], row["num_gpus"], row["git"]), []).append(row)
    return found


def _run(key, rows):
    date, gpu, num_gpus, revision = key
    ranks = sorted({int(rank) for row in rows for rank in row["passes_by_ranks"]} - {0})
    return [
        date, f"{num_gpus} x {gpu}", short_revision(revision), _total(rows, "tests"), _total(rows, "passes"),
        _total(rows, "failures"), ", ".join(map(str, ranks)) or "–", _what(rows),
    ]


def _total(rows, name):
    return str(sum(row[name] for row in rows))


def _what(rows):
    notes = list(dict.fromkeys(row["note"] for row in rows if row.get("note")))
    modules = [row["module"] for row in rows]
    if len(modules) > 3:
        modules = [f"{len(modules)} modules"]
    return "; ".join([*modules, *notes]).replace("|", "/")


def _matrix(rows):
    """Return a table with a line for each operator or family and a column for each machine."""
    cells = {}
    for point in rows.dense:
        _mark(cells, point.operator, point.settings, "T" if point.tuner else "B")
    names = dict((what, name) for name, what in _FAMILIES)
    kinds = rows.collectives, rows.norms, rows.gemm_ar_norms, rows.dispatch, rows.layers
    kinds += rows.decode, rows.latent, rows.sequences, rows.invariance
    for row in itertools.chain(*kinds):
        _mark(cells, names[row["what"]], row, "B")
    for row in rows.tuner:
        _mark(cells, row["op"], row, "T")
    machines = sorted({machine for _, machine in cells})
    operators = sorted({operator for operator, _ in cells})
    lines = [[operator, *("".join(sorted(cells.get((operator, machine), "–"))) for machine in machines)]
             for operator in operators]
    return _table(("operator", *(f"{num_gpus} x {gpu}" for gpu, num_gpus in machines)), lines)


def _mark(cells, operator, settings, mark):
    cells.setdefault((operator, (settings["gpu"], settings["num_gpus"])), set()).add(mark)


def _table(titles, lines):
    return markdown([titles, ["---"] * len(titles), *lines])
