"""Report section of all_reduce_rms_norm and all_reduce_layer_norm."""

from bench.collectives.norm import ALONE, BASELINE
from bench.report import tables
from bench.report.cells import factor, us

_INTRO = """## All-reduce with residual addition and norm

Microseconds by rows x hidden of x on each rank, in bf16. **unfused**: NCCL's all-reduce, an addition and torch's norm.
**unfused, compiled**: the addition and the norm in one kernel of torch.compile. **all-reduce alone**: `all_reduce` of
this library, without addition and norm. "Ours" uses the best known config, "ours, heuristic" the heuristic config of
that revision.
"""
_METHODS = {
    "unfused": BASELINE, "unfused, compiled": "sequence-compiled", "all-reduce alone": ALONE, "ours": "tdkernels",
    "ours, heuristic": "tdkernels-default", "ours, one-shot": "tdkernels-one-shot",
    "ours, two-shot": "tdkernels-two-shot",
}


def text(rows):
    """Return the section for rows of ``norm.rows``, or "" if there are none."""
    return tables.sections(_INTRO, rows, _place, lambda row: (row["hidden"], row["rows"]), _table)


def _place(row):
    return row["gpu"], row["num_gpus"], row["op"], row["graph"]


def _table(place, runs):
    gpu, ranks, operator, graph = place
    title = f"{operator}{', in CUDA graphs' * graph}, {ranks} x {gpu}"
    lines = [["rows x hidden", *_METHODS, "x unfused"], ["---"] + ["---:"] * (len(_METHODS) + 1)]
    for hidden, count in sorted(runs):
        run = runs[hidden, count]
        times = [us(tables.ms(run, method)) for method in _METHODS.values()]
        lines.append([f"{count} x {hidden}", *times, factor(run.get("tdkernels", {}).get("speedup"))])
    return tables.captioned(title, runs, "NCCL", lines)
