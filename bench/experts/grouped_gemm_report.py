"""Report sections of the grouped GEMM: without scales, and with scaled fp8 operands."""

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
_SCALED_INTRO = """## Grouped GEMM with scaled fp8 operands

Milliseconds of group_gemm with operands in e4m3 on one GPU, bf16 outputs. Rows are written by
`python -m tdkernels bench group_gemm --shapes fp8`. All methods of a shape ran in turns. Every output was checked
first, against the dequantized operands in fp32.

- **scales**: "row" is one for each row of x and of the weights, "row fast" the same with `use_fast_accum=True`, "block"
  one for 1 x 128 elements of x and for 128 x 128 of the weights.
- **bf16** is group_gemm with bf16 operands. **torch grouped** is `torch._scaled_grouped_mm`, which has row-wise scales
  only. SwiGLU is fused in ours, and a further torch operation in torch grouped.
- **dense** is one `torch._scaled_mm` with as many rows and the weight of one expert, without SwiGLU. For few rows it
  is no bound, because it reads one weight instead of all.
- **x torch** and **x bf16** are the speedups over these; **x dense** is the time of the dense GEMM over ours.
"""
_LAYOUTS = ("row", "row fast", "block")
# The first columns of all tables, as functions of a run {method: row}.
_SHAPE = {
    "rows x N x K x E": lambda run: _any_row(run)["shape"],
    "layer": lambda run: _any_row(run)["name"].removesuffix(" balanced"),
    "activation": lambda run: _any_row(run)["activation"] or "–",
}


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
    methods = {"cuBLAS loop": "cublas-loop", "torch grouped": "torch-grouped", "ours": "tdkernels"}
    more = {"TFLOP/s": _tflops, "x best": of("tdkernels", "speedup"), "config": _config}
    return run_tables.table(title, "Milliseconds on one GPU", runs, _SHAPE, methods, more)


def _tflops(run):
    value = run.get("tdkernels", {}).get("tflops")
    return f"{value:.0f}" if value else "–"


def _config(run):
    return config_in_short(run.get("tdkernels", {}).get("config")) or "–"


def scaled_text(rows):
    """Return the section for the rows of ``scaled_grouped_gemm.rows``, or "" if there are none."""
    found = run_tables.newest(rows, lambda row: (row["gpu"], row["graph"]), _problem)
    tables = [_scaled_table(found[place]) for place in sorted(found)]
    return "\n".join([_SCALED_INTRO, *tables]) if tables else ""


def _scaled_table(found):
    """Return the table of runs {problem: {method: row}}, with a line for each problem and kind of scales."""
    runs = [_of_layout(found[problem], layout) for problem in sorted(found) for layout in _LAYOUTS]
    row = _any_row(runs[0])
    title = f"group_gemm, fp8{', in CUDA graphs' * row['graph']}"
    first = {**_SHAPE, "scales": lambda run: run["tdkernels"]["layout"] if "tdkernels" in run else "–"}
    methods = {"bf16": "bf16", "torch grouped": "torch", "dense": "dense", "ours": "tdkernels"}
    more = {
        "TFLOP/s": _tflops, "x torch": of("tdkernels", "speedup"), "x bf16": of("tdkernels", "over_bf16"),
        "x dense": of("tdkernels", "efficiency"), "config": _config,
    }
    return run_tables.table(title, "Milliseconds on one GPU", runs, first, methods, more)


def _of_layout(run, layout):
    """Return the methods of a kind of scales, without its name: {"bf16", "torch", "dense", "tdkernels": row}."""
    return {name.removesuffix(f" {layout}"): row for name, row in run.items() if row["layout"] in (None, layout)}
