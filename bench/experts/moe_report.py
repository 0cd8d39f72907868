"""Tables of layers of experts, a part of the report."""

from bench.report import tables as run_tables
from bench.report.tables import of

_INTRO = """## Layers of experts

- Times are milliseconds. **Grouped** is torch's grouped product alone, **NCCL** the collectives alone: of tp_moe the
  all-gather, the reduce-scatter or both, of ep_moe all_to_all_single there and back.
- **Sequence** is both, one after the other, with the permutes that a user would write, told all sizes beforehand. For
  its backward that of tp_moe saves gathered rows, ours only shards. **Parts** is ep_dispatch, group_gemm, ep_combine.
- **Ours** is a call as it comes, in the default config; **max_tokens** one of ep_moe with a capacity, for which the
  host never waits, as it does not in the sequence: what stands right of it is about that one, but for **overlapped**,
  which is the same with method "fused".
- **Efficiency** is floor / ours. The floor is the larger of grouped and **wire**, which is bytes over the best rate of
  a link, each token once for a rank.
- Routing is the same for all methods: experts of equal chances, unless it says skewed. Outputs, and in
  forward+backward all gradients, were checked before the clock started.
"""
_ORDER = ("ag_gemm", "gemm_rs", "forward", "forward+backward")  # of parts
_TITLES = {"ag_gemm": "first half (moe_ag_gemm)", "gemm_rs": "second half (moe_gemm_rs)"}


def text(rows):
    """The section of the rows that are of ``tp_moe.rows`` and ``ep_moe.rows``; nothing if there are none."""
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


def _some(run):
    return next(iter(run.values()))


def _wire(run):
    value = _some(run)["wire_ms"]
    return "–" if value is None else f"{value:.3f}"


# ---- tp_moe ----


def _tp_place(row):
    return row["gpu"], row["num_gpus"], row["graph"], _part(row)


def _tp_problem(row):
    """Few rows of an expert first."""
    sizes = row["tokens"], row["inner"], row["hidden"], row["experts"], row["choices"]
    return row["tokens"] * row["choices"] * row["inner"] * row["hidden"], *sizes, row["routing"]


def _tp_table(runs):
    first = {
        "tokens x I x H x E x k": lambda run: _some(run)["shape"],
        "layer": lambda run: _some(run)["name"].removesuffix(" balanced"),
    }
    methods = {"grouped": "grouped", "NCCL": "collective", "sequence": "sequence", "ours": "tdkernels"}
    more = {
        "wire": _wire, "x sequence": of("tdkernels", "speedup"), "efficiency": of("tdkernels", "efficiency"),
    }
    what = "I is divided between the ranks, and so are the tokens of x"
    return run_tables.table(_title(_some(runs[0])), what, runs, first, methods, more)


# ---- ep_moe ----


def _ep_place(row):
    sizes = row["hidden"], row["inner"], row["experts"], row["choices"]
    return row["gpu"], row["num_gpus"], row["graph"], *sizes, row["routing"], _part(row)


def _ep_problem(row):
    return row["tokens"]


def _ep_table(runs):
    row = _some(runs[0])
    methods = {
        "grouped": "grouped", "NCCL": "collective", "sequence": "sequence", "parts": "parts", "ours": "tdkernels",
        "max_tokens": "tdkernels-max-tokens", "overlapped": "tdkernels-overlapped",
    }
    ours = "tdkernels-max-tokens"
    more = {
        "wire": _wire, "x sequence": of(ours, "speedup"), "x parts": lambda run: _over(run, "parts", ours),
        "efficiency": of(ours, "efficiency"),
    }
    fewer = f" (of {row['experts_of_model']}, for want of memory)" * (row["experts"] < row["experts_of_model"])
    skewed = ", skewed routing" * (row["routing"] == "skewed")
    what = (
        f"By the tokens of a rank; H = {row['hidden']}, I = {row['inner']}, {row['experts']} experts{fewer}, "
        f"{row['choices']} a token{skewed}"
    )
    tokens = {"tokens": lambda run: str(_some(run)["tokens"])}
    return run_tables.table(_title(row), what, runs, tokens, methods, more)


def _over(run, other, ours):
    other, ours = run_tables.ms(run, other), run_tables.ms(run, ours)
    return run_tables.factor(other / ours if other and ours else None)
