"""Report section of the MoE layers, tp_moe and ep_moe."""

from bench.report import tables as run_tables
from bench.report.cells import factor
from bench.report.tables import of

_INTRO = """## MoE layers

- Times are milliseconds. **grouped GEMM**: torch's grouped GEMM alone. **NCCL**: the collectives alone; for tp_moe the
  all-gather, the reduce-scatter or both, for ep_moe all_to_all_single for dispatch and combine.
- **unfused**: both without overlap, with permutes in plain torch and all sizes known to the host. For the backward of
  tp_moe this baseline saves gathered rows; ours saves only shards.
- **separate ops**: ep_dispatch, group_gemm and ep_combine without overlap.
- **ours**: one call with the heuristic config. **max_tokens**: ep_moe with this capacity, so that the host never waits,
  as in the baseline; wire, speedups and efficiency refer to this variant. **fused**: the same with method "fused".
- **efficiency**: floor / ours. The floor is the larger of the grouped GEMM and **wire**, the transferred bytes over the
  best rate of a link, where each token counts once per destination rank.
- All methods use the same routing, with balanced experts unless marked skewed. Outputs, and for forward+backward all
  gradients, were checked before timing.
"""
_ORDER = ("ag_gemm", "gemm_rs", "forward", "forward+backward")  # of parts
_TITLES = {"ag_gemm": "gate-up stage (moe_ag_gemm)", "gemm_rs": "down stage (moe_gemm_rs)"}


def text(rows):
    """Return the section for rows of ``tp_moe.rows`` and ``ep_moe.rows``, or "" if there are none."""
    tp, ep = ([row for row in rows if row["what"] == what] for what in ("tp_moe", "ep_moe"))
    tables = _tables(tp, _tp_place, _tp_problem, _tp_table) + _tables(ep, _ep_place, _ep_problem, _ep_table)
    return "\n".join([_INTRO, *tables]) if tables else ""


def _tables(rows, place_of, problem_of, show):
    found = run_tables.newest(rows, place_of, problem_of)
    return [show([found[place][problem] for problem in sorted(found[place])]) for place in sorted(found)]


def _part(row):
    return _ORDER.index(row["pass"])


def _title(row):
    return f"{row['op']}, {_TITLES.get(row['pass'], row['pass'])}{', in CUDA graphs' * row['graph']}"


def _any_row(run):
    return next(iter(run.values()))


def _wire(run):
    value = _any_row(run)["wire_ms"]
    return "–" if value is None else f"{value:.3f}"


# ---- tp_moe ----


def _tp_place(row):
    return row["gpu"], row["num_gpus"], row["graph"], _part(row)


def _tp_problem(row):
    """Return the sort key of a problem: by FLOP, then by sizes."""
    sizes = row["tokens"], row["inner"], row["hidden"], row["experts"], row["choices"]
    return row["tokens"] * row["choices"] * row["inner"] * row["hidden"], *sizes, row["routing"]


def _tp_table(runs):
    first = {
        "tokens x I x H x E x k": lambda run: _any_row(run)["shape"],
        "layer": lambda run: _any_row(run)["name"].removesuffix(" balanced"),
    }
    methods = {"grouped GEMM": "grouped", "NCCL": "collective", "unfused": "sequence", "ours": "tdkernels"}
    more = {
        "wire": _wire, "x unfused": of("tdkernels", "speedup"), "efficiency": of("tdkernels", "efficiency"),
    }
    what = "I and the tokens are sharded across the ranks"
    return run_tables.table(_title(_any_row(runs[0])), what, runs, first, methods, more)


# ---- ep_moe ----


def _ep_place(row):
    sizes = row["hidden"], row["inner"], row["experts"], row["choices"]
    return row["gpu"], row["num_gpus"], row["graph"], *sizes, row["routing"], _part(row)


def _ep_problem(row):
    return row["tokens"]


def _ep_table(runs):
    row = _any_row(runs[0])
    methods = {
        "grouped GEMM": "grouped", "NCCL": "collective", "unfused": "sequence", "separate ops": "parts",
        "ours": "tdkernels", "ours, max_tokens": "tdkernels-max-tokens", "ours, fused": "tdkernels-overlapped",
    }
    ours = "tdkernels-max-tokens"
    more = {
        "wire": _wire, "x unfused": of(ours, "speedup"),
        "x separate ops": lambda run: _over(run, "parts", ours), "efficiency": of(ours, "efficiency"),
    }
    fewer = f" (of {row['experts_of_model']}, limited by memory)" * (row["experts"] < row["experts_of_model"])
    skewed = ", skewed routing" * (row["routing"] == "skewed")
    what = (
        f"By tokens per rank; H = {row['hidden']}, I = {row['inner']}, {row['experts']} experts{fewer}, "
        f"top-{row['choices']}{skewed}"
    )
    tokens = {"tokens": lambda run: str(_any_row(run)["tokens"])}
    return run_tables.table(_title(row), what, runs, tokens, methods, more)


def _over(run, other, ours):
    other, ours = run_tables.ms(run, other), run_tables.ms(run, ours)
    return factor(other / ours if other and ours else None)
