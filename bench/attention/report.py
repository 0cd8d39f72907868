"""Tables of what is divided along the sequence, a part of the report: attention, and the projections of Ulysses."""

from bench.attention.flash_decode_report import in_words
from bench.core.multi_method import kind_of
from bench.report import tables as run_tables
from bench.report.tables import of

_INTRO = """## Sequences divided between the ranks

- Times are milliseconds, of one sequence; those of the backward have no forward in them. **NCCL** is the collectives
  alone: of ag_attention the all-gathers of keys and values, of its backward the reduce-scatters of their gradients; of
  ulysses_qkv and ulysses_out all_to_all_single.
- **Attention** is the fastest of torch's (flash, cuDNN) on a rank's queries and gathered keys, **GEMM** cuBLAS alone.
- **Sequence** is both, one after the other, with the copies that a user would write; of attention the fastest one,
  which is named. For its backward that of ag_attention saves gathered keys and values, ours only shards.
- **Ours** is a call as it comes. **TFLOP/s** are those of the mean rank, of the scores that the mask leaves.
- **Efficiency** is floor / ours. The floor is the larger of attention or GEMM alone, of its slowest rank, and of
  **wire**, which is bytes over the best rate of a link.
- Outputs and gradients were checked before the clock started; of long sequences those of some heads.
"""
_ORDER = ("forward", "backward")
_SHARDINGS = ("zigzag", "contiguous")


def text(rows):
    """The section of the rows that are of ``ag_attention.rows`` and ``ulysses.rows``; nothing if there are none."""
    attention, products = ([row for row in rows if row["what"] == what] for what in ("ag_attention", "ulysses"))
    tables = _tables(attention, _attention_place, lambda row: row["tokens"], _attention_table)
    tables += _tables(products, _product_place, lambda row: (row["k"], row["n"], row["m"]), _product_table)
    return "\n".join([_INTRO, *tables]) if tables else ""


def _tables(rows, place_of, problem_of, show):
    found = run_tables.newest(rows, place_of, problem_of)
    return [show([found[place][problem] for problem in sorted(found[place])]) for place in sorted(found)]


def _some(run):
    return next(iter(run.values()))


def _best(run, kind):
    """{kind: the row of its fastest method}, empty if there is none."""
    rows = [row for method, row in run.items() if kind_of(method) == kind and row["ms"]]
    return {kind: min(rows, key=lambda row: row["ms"])} if rows else {}


def _wire(run):
    value = _some(run)["wire_ms"]
    return "–" if value is None else f"{value:.3f}"


def _rate(run):
    value = run.get("tdkernels", {}).get("tflops")
    return "–" if value is None else f"{value:.0f}"


_MORE = {
    "TFLOP/s": _rate, "wire": _wire, "x sequence": of("tdkernels", "speedup"),
    "efficiency": of("tdkernels", "efficiency"),
}


# ---- ag_attention ----


def _attention_place(row):
    heads = row["heads"], row["kv_heads"], row["dim"]
    which = _SHARDINGS.index(row["sharding"]), _ORDER.index(row["pass"])
    return row["gpu"], row["num_gpus"], row["graph"], heads, *which


def _attention_table(runs):
    row = _some(runs[0])
    runs = [run | _best(run, "attention") | _best(run, "sequence") for run in runs]
    methods = {"attention": "attention", "NCCL": "collective", "sequence": "sequence", "ours": "tdkernels"}
    title = f"ag_attention, {row['sharding']}, {row['pass']}{', in CUDA graphs' * row['graph']}"
    what = f"By the tokens of all ranks; {row['heads']} / {row['kv_heads']} heads of {row['dim']}, causal"
    first = {"tokens": lambda run: in_words(_some(run)["tokens"])}
    return run_tables.table(title, what, runs, first, methods, _MORE | {"sequence of": _which})


def _which(run):
    return run["sequence"]["method"].removeprefix("sequence ") if "sequence" in run else "–"


# ---- ulysses ----


def _product_place(row):
    return row["gpu"], row["num_gpus"], row["graph"], row["op"] != "ulysses_qkv", _ORDER.index(row["pass"])


def _product_table(runs):
    row = _some(runs[0])
    methods = {"GEMM": "gemm", "NCCL": "collective", "sequence": "sequence", "ours": "tdkernels"}
    title = f"{row['op']}, {row['pass']}{', in CUDA graphs' * row['graph']}"
    what = "M positions of all ranks, which they share; the N x K weight is whole on each"
    return run_tables.table(title, what, runs, {"M x N x K": lambda run: _some(run)["shape"]}, methods, _MORE)
