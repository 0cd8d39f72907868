"""Tables of products by expert, a part of the report."""

from bench.report import tables as run_tables
from bench.report.config_text import config_in_short
from bench.report.tables import of

_INTRO = """## Products by expert

Milliseconds of group_gemm on one GPU, beside cuBLAS for each expert, the splits known to the host (**loop**), and
torch's grouped product (**torch**). Ours is a call as it comes, in the config that is known for about its size, or the
default ("the sequence" is torch's). SwiGLU is inside ours; that of the other two is torch's. The passes dx and dw are
the gradients of the product alone.
"""
_PASSES = ("forward", "dx", "dw")


def text(rows):
    """The section of all rows, which are those of ``group_gemm.rows`` and others; nothing if there are none."""
    found = run_tables.newest((row for row in rows if row["what"] == "group_gemm"), _place, _problem)
    tables = [_table([found[place][problem] for problem in sorted(found[place])]) for place in sorted(found)]
    return "\n".join([_INTRO, *tables]) if tables else ""


def _place(row):
    return row["gpu"], row["graph"], _PASSES.index(row["pass"])


def _problem(row):
    sizes = row["rows"], row["n"], row["k"], row["experts"]
    return row["rows"] * row["n"] * row["k"], *sizes, row["activation"] or "", row["routing"]


def _some(run):
    return next(iter(run.values()))


def _table(runs):
    row = _some(runs[0])
    title = f"group_gemm, {row['pass']}{', in CUDA graphs' * row['graph']}"
    first = {
        "rows x N x K x E": lambda run: _some(run)["shape"],
        "layer": lambda run: _some(run)["name"].removesuffix(" balanced"),
        "activation": lambda run: _some(run)["activation"] or "–",
    }
    methods = {"loop": "cublas-loop", "torch": "torch-grouped", "ours": "tdkernels"}
    more = {"TFLOP/s": _tflops, "x best": of("tdkernels", "speedup"), "config": _config}
    return run_tables.table(title, "Best is the faster of the other two", runs, first, methods, more)


def _tflops(run):
    value = run.get("tdkernels", {}).get("tflops")
    return f"{value:.0f}" if value else "–"


def _config(run):
    return config_in_short(run.get("tdkernels", {}).get("config")) or "–"
