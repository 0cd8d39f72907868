"""Report section of quantization to fp8 and of linear layers in fp8, from the rows of ``bench.dense.quantize``."""

from bench.dense.quantize_methods import BF16, COMPILED, COPY, DWEIGHT, OURS, RECIPES, TORCH
from bench.report import tables
from bench.report.cells import factor, ms, share

_INTRO = """## Quantization to fp8

Milliseconds of `quantize_fp8` for bf16 matrices, e4m3 codes, on one GPU.

- **scales**: one for each row, one for the tensor, or one for 128 elements of a row ("block"), for 128 x 128 elements
  with "weight". "given": the scale is an argument. **of**: the matrix or its transpose, which is not in memory.
- **torch** is the same in plain torch, **torch.compile** the same compiled.
- **copy** reads and writes together as many bytes as one pass: the matrix, its codes and its scales.
- **x compile** is the speedup over torch.compile; **GB/s** counts the bytes of one pass; **share of copy** is the time
  of the copy over ours.

Rows are written by `python -m bench.dense.quantize`.
"""
_LINEAR_INTRO = """## Linear layers in fp8

Milliseconds of `ColumnParallelLinear` without bias on one rank, without communication.

- **torch** is `torch.nn.functional.linear` in bf16, **bf16** the layer with `float8=None`. **dweight**: with
  `float8_dweight`.
- **GEMM** is `torch._scaled_mm` alone, with operands that are quantized already and fast accumulation.
- **x torch** is the speedup of the fastest fp8 layer over torch.
"""


def text(rows):
    """Return both sections, each "" if it has no rows."""
    parts = []
    for what, intro, table in (("quantize", _INTRO, _quantize), ("float8_linear", _LINEAR_INTRO, _linear)):
        found = [row for row in rows if row["what"] == what]
        parts.append(tables.sections(intro, found, _place, _problem, table))
    return "\n".join(filter(None, parts))


def _place(row):
    return row["gpu"], row["graph"]


def _problem(row):
    if row["what"] == "float8_linear":
        return row["tokens"], row["n"], row["k"], row["backward"]
    return row["rows"] * row["k"], row["rows"], row["k"], row["transpose"], row["scaling"], row["weight"], row["given"]


def _title(name, place):
    gpu, graph = place
    return f"{name}{', in CUDA graphs' * graph}, {gpu}"


def _any_row(run):
    return next(iter(run.values()))


def _scales(run):
    row = _any_row(run)
    return row["scaling"] + ", weight" * row["weight"] + ", given" * row["given"]


def _quantize(place, runs):
    """Return the table of quantize_fp8 on one machine."""
    first = {
        "rows x K": lambda run: "{rows}x{k}".format(**_any_row(run)), "scales": _scales,
        "of": lambda run: "transpose" if _any_row(run)["transpose"] else "matrix",
    }
    more = {
        "x compile": lambda run: factor(run.get(OURS, {}).get("speedup")),
        "GB/s": lambda run: _whole(run.get(OURS, {}).get("gbps")),
        "share of copy": lambda run: share(run.get(OURS, {}).get("share")),
    }
    methods = {"torch": TORCH, "torch.compile": COMPILED, "copy": COPY, "ours": OURS}
    return _table(_title("quantize_fp8", place), runs, first, methods, more)


def _linear(place, runs):
    """Return the table of linear layers on one machine."""
    first = {
        "tokens x N x K": lambda run: "{tokens}x{n}x{k}".format(**_any_row(run)),
        "pass": lambda run: "forward and backward" if _any_row(run)["backward"] else "forward",
    }
    methods = {"torch": TORCH, "bf16": BF16}
    for recipe in RECIPES:
        methods |= {f"GEMM {recipe}": f"gemm {recipe}", recipe: recipe, recipe + DWEIGHT: recipe + DWEIGHT}
    return _table(_title("linear", place), runs, first, methods, {"x torch": _over_torch})


def _table(title, runs, first, methods, more):
    runs = {problem: runs[problem] for problem in sorted(runs)}
    shown = {name: method for name, method in methods.items() if any(tables.ms(run, method) for run in runs.values())}
    titles = [*first, *shown, *more]
    lines = [titles, ["---"] * len(first) + ["---:"] * (len(titles) - len(first))]
    for run in runs.values():
        times = [ms(tables.ms(run, method)) for method in shown.values()]
        lines.append([*(cell(run) for cell in first.values()), *times, *(cell(run) for cell in more.values())])
    return tables.captioned(title, runs, "triton", lines)


def _over_torch(run):
    base = tables.ms(run, TORCH)
    ours = [tables.ms(run, name) for recipe in RECIPES for name in (recipe, recipe + DWEIGHT)]
    ours = [one for one in ours if one]
    return factor(base / min(ours) if base and ours else None)


def _whole(value):
    return "–" if value is None else f"{value:.0f}"
