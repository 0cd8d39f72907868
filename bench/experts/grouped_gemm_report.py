"""Report section of the grouped GEMM."""

from bench.report import tables as run_tables
from bench.report.config_text import config_in_short
from bench.report.tables import of

_INTRO = """## Grouped GEMM

Milliseconds of group_gemm on one GPU, against a loop of cuBLAS GEMMs with splits known to the host (**cuBLAS loop**)
and torch's grouped GEMM (**torch grouped**). **Ours** uses the tuned config of the nearest size, or the heuristic;
config "torch" runs torch's grouped GEMM. SwiGLU is fused in ours, and a separate torch operation in the others. The
passes dx and dw are the gradients of the GEMM alone. **x best** is the speedup over the faster of the other two.
"""
_PASSES = ("forward", "dx", "dw")


def text(rows):
    """Return the section for the rows of ``grouped_gemm.rows`` among ``rows``, or "" if there are none."""
    found = run_tables.newest((row for row in rows if row["what"] == "group_gemm"), _place, _problem)
    tables = [_table([found[place][problem] for problem in sorted(found[place])]) for place in sorted(found)]
    return "\n".join([_INTRO, *tables]) if tables else ""


def _place(row):
    return row["gpu"], row["graph"], _PASSES.index(row["pass"])


def _problem(row):
    sizes = row["rows"], row["n"], row["k"], row["experts"]
    return row["rows"] * row["n"] * row["k"], *sizes, row["activation"] or "", row["routing"]


def _any_row(run):
    return next(iter(run.values()))


def _table(runs):
    row = _any_row(runs[0])
    title = f"group_gemm, {row['pass']}{', in CUDA graphs' * row['graph']}"
    first = {
        "rows x N x K x E": lambda run: _any_row(run)["shape"],
        "layer": lambda run: _any_row(run)["name"].removesuffix(" balanced"),
        "activation": lambda run: _any_row(run)["activation"] or "–",
    }
    methods = {"cuBLAS loop": "cublas-loop", "torch grouped": "torch-grouped", "ours": "tdkernels"}
    more = {"TFLOP/s": _tflops, "x best": of("tdkernels", "speedup"), "config": _config}
    return run_tables.table(title, "Milliseconds on one GPU", runs, first, methods, more)


def _tflops(run):
    value = run.get("tdkernels", {}).get("tflops")
    return f"{value:.0f}" if value else "–"


def _config(run):
    return config_in_short(run.get("tdkernels", {}).get("config")) or "–"
