"""Page of the report: the cost of the batch-invariant mode."""

from bench.reliability.invariance_cases import BASELINE, DEFAULT, INVARIANT, OPERATORS, RANKS
from bench.report import tables
from bench.report.cells import us

_INTRO = """## Batch-invariant mode

Microseconds of calls outside and inside the [batch-invariant mode](../../docs/guides/batch-invariance.md), in bf16.

- **default**: the call outside the mode, with its tuned or heuristic config. **invariant**: the same call in the mode.
- **ratio**: invariant / default, so 2.00 means that the mode doubles the time.
- **max_ranks=8**: the same call in the mode with `max_ranks=8`, for operators that add parts of ranks. On one rank it
  is the product of `gemm_ar`.
- **unfused**: NCCL and torch's GEMM, for the dense operators only.
- **shape**: M x N x K of the full GEMM; rows x hidden of x on each rank; rows x N x K x experts of `group_gemm`;
  sequences x heads x kv heads x head size x keys per rank of `flash_decode`; tokens x heads x kv heads x head size of
  `ag_attention`.

Both methods ran in turns on the same inputs, and their results were compared first. Rows are written by
`python -m bench.reliability.invariance`.
"""


def text(rows):
    """Return the page for rows of ``bench.reliability.invariance.rows``, or "" if there are none."""
    problem = lambda row: (OPERATORS.index(row["op"]), row["op"], row["shape"], row["name"])  # noqa: E731
    # Times in CUDA graphs come first, because decoding runs in graphs.
    return tables.sections(_INTRO, rows, _place, problem, _table, order=lambda place: (*place[:2], not place[2]))


def _place(row):
    return row["gpu"], row["num_gpus"], row["graph"]


def _table(place, runs):
    """Return the table of runs {problem: {method: row}} on one machine."""
    gpu, ranks, graph = place
    title = f"{'In CUDA graphs' if graph else 'Eager'}, {ranks} x {gpu}"
    columns = {"default": DEFAULT, "invariant": INVARIANT}
    most = {run[RANKS].get("max_ranks") for run in runs.values() if tables.ms(run, RANKS)}  # rows before it have none
    by_ranks = {f"max_ranks={', '.join(map(str, sorted(most)))}": RANKS} if most else {}
    unfused = {"unfused": BASELINE} if any(tables.ms(run, BASELINE) for run in runs.values()) else {}
    lines = [["operator", "shape", "", *columns, "ratio", *by_ranks, *unfused]]
    lines.append(["---"] * 3 + ["---:"] * (len(lines[0]) - 3))
    for problem in sorted(runs, key=lambda problem: problem[0]):  # cases of an operator stay in their order
        (_, operator, shape, name), run = problem, runs[problem]
        others = {**by_ranks, **unfused}
        times, others = ([us(tables.ms(run, method)) for method in group.values()] for group in (columns, others))
        lines.append([f"`{operator}`", shape, name, *times, _ratio(run), *others])
    return tables.captioned(title, runs, "triton", lines)



def _ratio(run):
    ratio = run.get(INVARIANT, {}).get("ratio")
    return f"{ratio:.2f}" if ratio else "–"
