"""Report section of the sequence-parallel operators: ag_attention and the Ulysses projections."""

from bench.attention.flash_decode_report import format_count
from bench.core.multi_method import kind_of
from bench.report import tables as run_tables
from bench.report.tables import of

_INTRO = """## Sequence parallelism

ag_attention and the Ulysses projections, for one sequence that is sharded across the ranks. Times are milliseconds;
times of the backward do not include the forward.

- **NCCL**: the collectives alone. For ag_attention the all-gathers of keys and values, in the backward the
  reduce-scatters of their gradients; for ulysses_qkv and ulysses_out all_to_all_single.
- **attention**: torch's fastest kernel (flash or cuDNN) on a rank's queries and already gathered keys. **GEMM**: cuBLAS
  alone.
- **unfused**: torch and NCCL without overlap, with the copies that they need. For attention, the last column names the
  fastest kernel. This baseline saves gathered keys and values for the backward; ag_attention saves only shards.
- **ours**: a call with default arguments. **TFLOP/s** count unmasked scores, averaged over the ranks.
- **efficiency**: floor / ours. The floor is the larger of the attention or GEMM alone, on the slowest rank, and
  **wire**, the transferred bytes over the best rate of a link.
- Outputs and gradients were checked before timing; for long sequences only some heads.
"""
_ORDER = ("forward", "backward")
_SHARDINGS = ("zigzag", "contiguous")


def text(rows):
    """Return the section for rows of ``ag_attention.rows`` and ``ulysses.rows``, or "" if there are none."""
    attention, ulysses = ([row for row in rows if row["what"] == what] for what in ("ag_attention", "ulysses"))
    tables = _tables(attention, _attention_place, lambda row: row["tokens"], _attention_table)
    tables += _tables(ulysses, _ulysses_place, lambda row: (row["k"], row["n"], row["m"]), _ulysses_table)
    return "\n".join([_INTRO, *tables]) if tables else ""


def _tables(rows, place_of, problem_of, show):
    found = run_tables.newest(rows, place_of, problem_of)
    return [show([found[place][problem] for problem in sorted(found[place])]) for place in sorted(found)]


def _any_row(run):
    return next(iter(run.values()))


def _best(run, kind):
    """Return {kind: row of its fastest method}, empty if there is none."""
    rows = [row for method, row in run.items() if kind_of(method) == kind and row["ms"]]
    return {kind: min(rows, key=lambda row: row["ms"])} if rows else {}


def _wire(run):
    value = _any_row(run)["wire_ms"]
    return "–" if value is None else f"{value:.3f}"


def _rate(run):
    value = run.get("tdkernels", {}).get("tflops")
    return "–" if value is None else f"{value:.0f}"


_MORE = {
    "TFLOP/s": _rate, "wire": _wire, "x unfused": of("tdkernels", "speedup"),
    "efficiency": of("tdkernels", "efficiency"),
}


# ---- ag_attention ----


def _attention_place(row):
    heads = row["heads"], row["kv_heads"], row["dim"]
    which = _SHARDINGS.index(row["sharding"]), _ORDER.index(row["pass"])
    return row["gpu"], row["num_gpus"], row["graph"], heads, *which


def _attention_table(runs):
    row = _any_row(runs[0])
    runs = [run | _best(run, "attention") | _best(run, "sequence") for run in runs]
    methods = {"attention": "attention", "NCCL": "collective", "unfused": "sequence", "ours": "tdkernels"}
    title = f"ag_attention, {row['sharding']}, {row['pass']}{', in CUDA graphs' * row['graph']}"
    what = f"By total number of tokens; {row['heads']} / {row['kv_heads']} heads of {row['dim']}, causal"
    first = {"tokens": lambda run: format_count(_any_row(run)["tokens"])}
    return run_tables.table(title, what, runs, first, methods, _MORE | {"unfused kernel": _which})


def _which(run):
    return run["sequence"]["method"].removeprefix("sequence ") if "sequence" in run else "–"


# ---- ulysses ----


def _ulysses_place(row):
    return row["gpu"], row["num_gpus"], row["graph"], row["op"] != "ulysses_qkv", _ORDER.index(row["pass"])


def _ulysses_table(runs):
    row = _any_row(runs[0])
    methods = {"GEMM": "gemm", "NCCL": "collective", "unfused": "sequence", "ours": "tdkernels"}
    title = f"{row['op']}, {row['pass']}{', in CUDA graphs' * row['graph']}"
    what = "M is the total number of positions, sharded across the ranks; the N x K weight is replicated"
    return run_tables.table(title, what, runs, {"M x N x K": lambda run: _any_row(run)["shape"]}, methods, _MORE)
