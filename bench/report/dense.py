"""The page of the dense operators: a table for each machine, operator, pass and launch mode."""

from bench.core.points import at_full_size, geometric_mean, groups, swept
from bench.dense.shapes import TOKENS
from bench.report import plots
from bench.report.cells import factor, is_loss, markdown, ms, share, short_revision
from bench.report.config_text import config_in_short

SMALL_M = 1024  # shapes below have a mean of their own, because host time and latency dominate them
_INTRO = """AG-GEMM, GEMM-RS and GEMM-AR. Sizes are M x N x K of the whole problem, before ranks divide it.

- **GEMM** is cuBLAS alone, **collective** NCCL alone, **unfused** one after the other. **Best peer** is the fastest of
  the other libraries in the run: torch-fused is PyTorch's `torch.ops.symm_mem`, nccl-async is NCCL concurrent with
  cuBLAS in the backward pass, as in Megatron-LM.
- **Ours** is a call with the best known config, **heuristic** a call on a shape that was never tuned. A config that
  starts with "heuristic:" is from a run in which ours was not tuned.
- **Efficiency** is floor / ours. The floor is the larger of the GEMM alone and the wire time, which is the bytes over
  the best rate that copy engines reach on that machine. Efficiency can exceed 1 if our GEMM is faster than cuBLAS.
- A **+** after a revision marks a tree with uncommitted changes.
"""
_COLUMNS = ("M x N x K", "layer", "GEMM", "collective", "unfused", "best peer", "ours", "heuristic",
            "x unfused", "x torch-fused", "efficiency", "config")
_TEXT_COLUMNS = ("M x N x K", "layer", "config", "best peer", "GPUs", "operator", "pass", "source",
                 "strategy", "problem")
_SUMMARY = ("GPUs", "operator", "pass", "source", "shapes", "x unfused", "worst", "x torch-fused", "worst",
            "efficiency")


def text(points, link):
    """Return the tables and plots of every machine; "" without points.

    Args:
        points: Points of ``bench.core.points.read``.
        link: function that shows a ``plots.Figure`` in Markdown.
    """
    if not points:
        return ""
    figures = plots.figures(points)
    parts = [_INTRO]
    for (machine,), chosen in groups(points, "machine").items():
        parts.append(f"## {_machine(chosen[0].settings)}\n")
        parts += [link(figure) for figure in figures if figure.machine == machine]
        measured = groups([p for p in chosen if not p.tuner], "operator", "direction", "graph", "dtype", "layout")
        parts += [_benchmarked(place, found) for place, found in measured.items()]
        tuned = [point for point in chosen if point.tuner]
        if tuned:
            parts.append(_tuned(tuned))
    return "\n".join(parts)


def _machine(settings):
    return f"{settings['num_gpus']} x {settings['gpu']}"


# ---- geometric means ----


def summary(points):
    """Return tables of geometric means and worst shapes: one for large M, one for small M."""
    large, small = [], []
    for place, found in groups(points, "machine", "operator", "direction", "graph", "tuner", "dtype", "layout").items():
        full = at_full_size(found, TOKENS) if place[4] else found
        large += _summary_line(place, [p for p in full if p.shape.m >= SMALL_M])
        small += _summary_line(place, [p for p in found if p.shape.m < SMALL_M])
    parts = []
    if large:
        parts += [f"Geometric mean and worst shape, M >= {SMALL_M}.\n", table(_SUMMARY, large)]
    if small:
        parts += [f"The same for M < {SMALL_M}, where an eager call takes longer on the host than on the GPU.\n",
                  table(_SUMMARY, small)]
    return "\n".join(parts)


def _summary_line(place, points):
    """Return [line], or [] if no point has a baseline."""
    _, operator, direction, graph, tuner, *how = place
    points = [point for point in points if point.speedup]
    if not points:
        return []
    untuned = ", heuristic" if all(point.untuned for point in points) else ""
    source = "tuner" if tuner else f"benchmark{untuned}"
    return [[
        _machine(points[0].settings), operator + _unusual(*how), direction,
        f"{source}{', CUDA graph' if graph else ''}", str(len(points)), *_mean_and_worst(points, "speedup"),
        *_mean_and_worst(points, "over_fused"), _mean_and_worst(points, "efficiency")[0],
    ]]


def _mean_and_worst(points, name):
    values = [getattr(point, name) for point in points if getattr(point, name)]
    show = share if name == "efficiency" else factor
    return (show(geometric_mean(values)), show(min(values))) if values else ("", "")


# ---- benchmarks ----


def _benchmarked(place, points):
    operator, direction, graph, *how = place
    title = f"### {operator}, {direction}{', in a CUDA graph' if graph else ''}{_unusual(*how)}\n"
    return "\n".join([title, _provenance(points), table(_COLUMNS, map(_line, points)), *_means(points)])


def _unusual(dtype, layout):
    return "".join(f", {word}" for word, usual in ((dtype, "bfloat16"), (layout, "nk")) if word != usual)


def _provenance(points):
    """Return dates, revisions and versions of the points of a table."""
    versions = [
        f"{name} {_all(points, key)}"
        for name, key in (("torch", "torch"), ("triton", "triton"), ("NCCL", "nccl"), ("driver", "driver"))
        if _all(points, key)
    ]
    dates = sorted({point.settings["date"][:10] for point in points})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    revisions = ", ".join(sorted({short_revision(point.settings["git"]) for point in points}))
    rates = {point.settings["link_gbps"] for point in points if point.settings.get("link_gbps")}
    link = f"; best link rate {max(rates):.0f} GB/s each way" if rates else ""
    multicast = _all(points, "multicast")
    return f"{when}, revision {revisions}; {', '.join(versions)}; NVLink multicast {multicast}{link}.\n"


def _all(points, key):
    return " and ".join(sorted({str(point.settings[key]) for point in points if point.settings.get(key)}))


def _line(point):
    peer = point.best_peer
    return (
        str(point.shape), point.shape.name, ms(point.gemm), ms(point.collective), ms(point.sequence),
        f"{ms(peer[1])} ({peer[0]})" if peer else "", ms(point.ours), ms(point.default),
        factor(point.speedup), factor(point.over_fused), share(point.efficiency), _config_of(point),
    )


def _config_of(point):
    return ("heuristic: " if point.untuned else "") + config_in_short(point.config)


def _means(points):
    """Return the lines under a table: means for small and large M."""
    small, large = ([p for p in points if (p.shape.m < SMALL_M) == is_small] for is_small in (True, False))
    both = small and large
    lines = [_mean(f"M < {SMALL_M}: " if both else "", small), _mean(f"M >= {SMALL_M}: " if both else "", large)]
    return [line for line in lines if line]


def _mean(title, points):
    if not any(point.speedup for point in points):
        return ""
    means = []
    for name, what in (("speedup", "the unfused baseline"), ("over_fused", "torch-fused")):
        factors = {point.shape: getattr(point, name) for point in points if getattr(point, name)}
        if factors:
            worst = min(factors, key=factors.get)
            slower = sum(map(is_loss, factors.values()))
            means.append(
                f"**{geometric_mean(factors.values()):.2f} x** {what} (worst {factors[worst]:.2f} x, {worst}; "
                f"slower in {slower} of {len(factors)})"
            )
    efficiencies = [point.efficiency for point in points if point.efficiency]
    if efficiencies:
        means.append(f"efficiency **{geometric_mean(efficiencies):.2f}**")
    return f"{title}{'g' if title else 'G'}eometric means of {_count(points)}: {', '.join(means)}.\n"


def _count(points):
    return f"{len(points)} shape{'s' * (len(points) > 1)}"


# ---- the tuner's last round ----


def _tuned(points):
    parts = [
        "### From the tuner's last round\n",
        "These are the times by which `python -m tdkernels tune` selected a config. They are no benchmark: other\n"
        "libraries did not run beside them. The factor is 1.00 if the tuner selected the unfused baseline.\n"
        "Calls that take about as long on the host as on the GPU are timed in a CUDA graph.\n",
    ]
    for (operator, graph, *how), found in groups(points, "operator", "graph", "dtype", "layout").items():
        full = at_full_size(found, TOKENS)
        in_graph = ", in a CUDA graph" if graph else ""
        parts += [f"#### {operator}{in_graph}{_unusual(*how)}, from the tuner\n", _provenance(found)]
        parts += [table(_COLUMNS, map(_line, full)), *_means(full)] if full else []
        parts += [_sweep(swept(found))] if swept(found) else []
    return "\n".join(parts)


def _sweep(layers):
    """Return a table with a line for each M and a column for each layer."""
    cells = {(layer, p.shape.m): f"{ms(p.ours)} ({factor(p.speedup)})" for layer in layers for p in layers[layer]}
    rows = sorted({m for _, m in cells})
    title = ["M", *(f"{found[0].shape.name} {layer[1]} x {layer[2]}".strip() for layer, found in layers.items())]
    note = "By M, for each layer N x K: milliseconds of ours, and x the unfused baseline.\n"
    return "\n".join([note, table(title, [[str(m), *(cells.get((layer, m), "") for layer in layers)] for m in rows])])


def table(titles, lines):
    """Return a Markdown table without its empty columns."""
    lines = [list(line) for line in lines]
    kept = [i for i in range(len(titles)) if any(line[i] not in ("", "–") for line in lines)]
    rule = ["---" if titles[i] in _TEXT_COLUMNS else "---:" for i in kept]
    return markdown([[titles[i] for i in kept], rule, *([line[i] or "–" for i in kept] for line in lines)])
