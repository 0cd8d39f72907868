"""Report section of gemm_ar_rms_norm."""

from bench.report import tables
from bench.report.cells import factor, us

_INTRO = """## GEMM, all-reduce, residual addition and norm

Microseconds of `gemm_ar_rms_norm` in bf16. **torch**: torch's GEMM, NCCL's all-reduce, an addition and torch's norm.
**compiled**: the addition and the norm in one kernel of torch.compile. **fused** is one kernel with the heuristic
config of that revision, or with 8 warps; later the heuristic has 8 warps for 4096 < N <= 8192. **separate**: torch's
GEMM, then the kernel of `all_reduce_rms_norm`. "Alone" is without the addition and the norm. **x torch** divides the
faster of both torch columns by "fused". Rows are written by `python -m bench.dense.norm`.
"""
_TORCH, _COMPILED, _FUSED = "torch", "torch compiled", "fused"  # names of bench.dense.norm, which imports the report
_METHODS = {
    "torch": _TORCH, "torch, compiled": _COMPILED, "gemm_ar + norm": "gemm_ar",
    "gemm_ar + norm, compiled": "gemm_ar compiled", "fused": _FUSED, "fused, 8 warps": "fused, 8 warps",
    "separate": "separate", "GEMM alone": "gemm alone", "gemm_ar alone": "gemm_ar alone",
}


def text(rows):
    """Return the section for rows of ``bench.dense.norm.rows``, or "" if there are none."""
    return tables.sections(_INTRO, rows, _place, lambda row: (row["n"], row["k"], row["m"]), _table)


def _place(row):
    return row["gpu"], row["num_gpus"], row["op"], row["graph"]


def _table(place, runs):
    gpu, ranks, operator, graph = place
    title = f"{operator}{', in CUDA graphs' * graph}, {ranks} x {gpu}"
    lines = [["M x N x K", "layer", *_METHODS, "x torch"], ["---"] * 2 + ["---:"] * (len(_METHODS) + 1)]
    for n, k, m in sorted(runs):
        run = runs[n, k, m]
        layer = next(iter(run.values()))["name"] or "–"
        times = [us(tables.ms(run, method)) for method in _METHODS.values()]
        lines.append([f"{m}x{n}x{k}", layer, *times, factor(_ratio(run))])
    return tables.captioned(title, runs, "NCCL", lines)


def _ratio(run):
    """Return the time of the faster torch method over that of "fused", or None."""
    by_torch = [ms for method in (_TORCH, _COMPILED) if (ms := tables.ms(run, method))]
    fused = tables.ms(run, _FUSED)
    return min(by_torch) / fused if by_torch and fused else None
