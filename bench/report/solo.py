"""Report page of solo mode: one GPU acted as one of W ranks."""

from bench.core.points import geometric_mean
from bench.report.cells import markdown, ms, share, short_revision
from bench.report.config_text import config_in_short, transport_in_short
from bench.report.tables import newest

_INTRO = """## Solo mode

**No byte crossed a link.** One GPU acted as one of W ranks (`tdkernels.solo`), in CUDA graphs. The peers were mirror
images of this rank: what a kernel stored at a peer arrived in its own memory. So kernels did the work of a real run,
with its memory traffic. Outputs were checked before the clock started, and all methods of a line ran in turns.

The floor is the longer of the GEMM alone (cuBLAS) and the bytes on the wire at the given rate. A link of the model
transfers one chunk at a time: of `gemm_rs` and `gemm_ar` from its signal on, of `ag_gemm` from the beginning of the
call on. The model has no back pressure: programs that push are as fast as the memory. Copies of the copy engine take
memory bandwidth and an SM here, so its times are too long for large shards. Times also include what the model's own
kernels add: 4 µs between two calls (profiled), and the delay of each signal. Transport "forward" of `gemm_ar` and
"one_shot" of `gemm_rs` are not supported.
[Compared with two real GPUs](../../docs/performance/notes/solo.md#model-and-real-runs).
"""
_TITLE = "{level} {gpu}, one of {ranks} ranks, {link}\n\n{when}, revision {git}; torch {torch}, triton {triton}.\n"
_MANY_ROWS = 8192  # fewer rows are a few waves of tiles, which cannot hide the exchange of the first or last wave
_EAGER_INTRO = """### Eager calls in solo mode

Host time of a call, device time of an eager call, and device time of the same call in a CUDA graph, in the same run.
The host time includes the launches of the model's own kernels, which a real call does not have. The ratio to the floor
is that of the eager call.
"""
_EAGER_HEAD = [
    "operator", "M × N × K", "GEMM alone: host", "eager", "graph", "selected config: host", "eager", "graph", "× floor",
]
_HEAD = [
    "operator", "M × N × K", "GEMM alone", "wire", "selected config", "fastest", "× floor", "fastest config", "others",
]


def text(rows):
    """Return the section, or "" if there are no rows."""
    return section(_INTRO, rows, _problem_of, _table)


def eager_text(graph_rows, eager_rows):
    """Return the section of eager calls, or "" if there are no rows."""
    captured = {_call_of(row): row["ms"] for row in graph_rows}
    parts = [
        f"{_title(place, runs, '####')}\n{markdown(_eager_table(runs, captured))}"
        for place, runs in sorted(newest(eager_rows, _place_of, _problem_of).items(), key=str)
    ]
    return "\n".join([_EAGER_INTRO, *parts]) if parts else ""


def _place_of(row):
    return row["gpu"], row["ranks"], row["link_gbps"]


def _problem_of(row):
    return row["op"], row["pass"], row["m"], row["n"], row["k"]


def _call_of(row):
    return row["date"], _place_of(row), _problem_of(row), row["method"]


def _name(operator, direction):
    return operator if direction == "forward" else f"{operator} backward"


def _eager_table(runs, captured):
    lines = [_EAGER_HEAD, ["---"] * 2 + ["---:"] * (len(_EAGER_HEAD) - 2)]
    for (operator, direction, m, n, k), run in sorted(runs.items()):
        selected = run.get("tdkernels")
        cells = [*_eager_cells(run["gemm"], captured), *_eager_cells(selected, captured)]
        factor = share(None if selected is None else selected["over_floor"])
        lines.append([_name(operator, direction), f"{m} × {n} × {k}", *cells, factor])
    return lines


def _eager_cells(row, captured):
    """Return the cells of a method, whose row is None if it does not run in solo mode."""
    times = (None,) * 3 if row is None else (row["host_ms"], row["ms"], captured[_call_of(row)])
    return map(ms, times)


def section(intro, rows, problem_of, table):
    """Return a section with a table for each GPU, number of ranks and link, or "" if there are no rows.

    Args:
        problem_of: function of a row: the problem, of which the newest run is shown.
        table: function of {problem: {method: row}}: the lines of the table, and {name: ratios to the floor}.
    """
    places = newest(rows, _place_of, problem_of, with_overrides=True)
    parts = [intro]
    for place, runs in sorted(places.items(), key=lambda item: str(item[0])):
        lines, factors = table(runs)
        means = [f"{name} {geometric_mean(values):.2f} ({len(values)} shapes)" for name, values in factors.items()]
        parts.append(
            f"{_title(place, runs)}\n{markdown(lines)}\nFastest over floor, geometric mean: {', '.join(means)}.\n"
        )
    return "\n".join(parts) if places else ""


def _title(place, runs, level="###"):
    gpu, ranks, link = place
    some = [next(iter(run.values())) for run in runs.values()]
    return _TITLE.format(
        level=level, gpu=gpu, ranks=ranks, when=max(row["date"][:10] for row in some),
        link="data arrives at once" if link is None else f"data arrives at {link:.0f} GB/s (model)",
        git=", ".join(sorted({short_revision(row["git"]) for row in some})), torch=some[0]["torch"],
        triton=some[0]["triton"],
    )


def _table(runs):
    lines = [_HEAD, ["---"] * 2 + ["---:"] * 5 + ["---"] * 2]
    factors = {}
    for (operator, direction, m, n, k), run in sorted(runs.items()):
        name, best = _name(operator, direction), _fastest(run)
        few = "" if m >= _MANY_ROWS else f" with M < {_MANY_ROWS}"
        factors.setdefault(name + few, []).append(best["over_floor"])
        gemm, selected = run["gemm"], run.get("tdkernels", {"ms": None})
        lines.append([
            name, f"{m} × {n} × {k}", ms(gemm["ms"]), ms(gemm["wire_ms"]), ms(selected["ms"]), ms(best["ms"]),
            share(best["over_floor"]), config_in_short(best["config"]), _others(run, best),
        ])
    return lines, factors


def _fastest(run):
    timed = [row for name, row in run.items() if name != "gemm" and row["ms"] is not None]
    return min(timed, key=lambda row: row["ms"])


def _others(run, best):
    """Return the fastest time of each other way to send data."""
    fastest = {}
    for name, row in run.items():
        kind = _kind(row)
        if name != "gemm" and row["ms"] is not None and kind is not None and kind != _kind(best):
            fastest[kind] = min(row["ms"], fastest.get(kind, row["ms"]))
    return ", ".join(f"{kind} {ms(time)}" for kind, time in sorted(fastest.items()))


def _kind(row):
    """Return how a config sends data, or None for a backward, which selects its own configs."""
    return None if row["config"] is None else transport_in_short(row["config"])
