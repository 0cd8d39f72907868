"""Page of the report: the cost of the batch-invariant mode."""

from bench.reliability.invariance_cases import BASELINE, DEFAULT, INVARIANT, OPERATORS
from bench.report import tables
from bench.report.cells import markdown, short_revision

_INTRO = """## Batch-invariant mode

Microseconds of calls outside and inside the [batch-invariant mode](../../docs/guides/batch-invariance.md), in bf16.

- **default**: the call outside the mode, with its tuned or heuristic config. **invariant**: the same call in the mode.
- **ratio**: invariant / default, so 2.00 means that the mode doubles the time.
- **unfused**: NCCL and torch's GEMM, for the dense operators only.
- **shape**: M x N x K of the full GEMM; rows x hidden of x on each rank; rows x N x K x experts of `group_gemm`;
  sequences x heads x kv heads x head size x keys per rank of `flash_decode`; tokens x heads x kv heads x head size of
  `ag_attention`.

Both methods ran in turns on the same inputs, and their results were compared first. Rows are written by
`python -m bench.reliability.invariance`.
"""


def text(rows):
    """Return the page for rows of ``bench.reliability.invariance.rows``, or "" if there are none."""
    found = tables.newest(rows, _place, lambda row: (OPERATORS.index(row["op"]), row["op"], row["shape"], row["name"]))
    # Times in CUDA graphs come first, because decoding runs in graphs.
    parts = [_table(place, found[place]) for place in sorted(found, key=lambda place: (*place[:2], not place[2]))]
    return "\n".join([_INTRO, *parts]) if parts else ""


def _place(row):
    return row["gpu"], row["num_gpus"], row["graph"]


def _table(place, runs):
    """Return the table of runs {problem: {method: row}} on one machine."""
    gpu, ranks, graph = place
    some = [next(iter(run.values())) for run in runs.values()]
    revisions = ", ".join(sorted({short_revision(row["git"]) for row in some}))
    newest = max(some, key=lambda row: row["date"])
    title = f"### {'In CUDA graphs' if graph else 'Eager'}, {ranks} x {gpu}"
    head = f"{newest['date'][:10]}, revision {revisions}; torch {newest['torch']}, triton {newest['triton']}."
    columns = {"default": DEFAULT, "invariant": INVARIANT}
    unfused = {"unfused": BASELINE} if any(tables.ms(run, BASELINE) for run in runs.values()) else {}
    lines = [["operator", "shape", "", *columns, "ratio", *unfused]]
    lines.append(["---"] * 3 + ["---:"] * (len(lines[0]) - 3))
    for problem in sorted(runs, key=lambda problem: problem[0]):  # cases of an operator stay in their order
        (_, operator, shape, name), run = problem, runs[problem]
        times, others = ([_us(tables.ms(run, method)) for method in group.values()] for group in (columns, unfused))
        lines.append([f"`{operator}`", shape, name, *times, _ratio(run), *others])
    return f"{title}\n\n{head}\n\n{markdown(lines)}"


def _us(ms):
    return f"{ms * 1e3:.1f}" if ms else "–"


def _ratio(run):
    ratio = run.get(INVARIANT, {}).get("ratio")
    return f"{ratio:.2f}" if ratio else "–"
