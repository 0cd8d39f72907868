"""Plots of the dense operators: speed-up by shape, sweeps of M, and a roofline. Drawn by matplotlib.

The list of figures depends on the points alone, so the report can name the figures without matplotlib.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass

from bench.core.points import at_full_size, groups, swept
from bench.dense.shapes import TOKENS, layer_names

_GREY, _ORANGE, _BLUE = "#777777", "#e08214", "#2166ac"
_PEERS = (_ORANGE, "#7fbc41", "#8c6bb1", "#b35806")
_SHADES = ("#92c5de", "#4393c3", "#2166ac", "#053061")  # machines, by number of GPUs
_BAR_ROWS = 1024  # smaller M appears in the sweeps, not in bars and roofline
_DPI = 110
_TUNER = "tuner's last round"
_COLUMNS = 4  # of the sweeps
_M_TICKS = [8**i for i in range(6)]


@dataclass(frozen=True)
class Figure:
    """A PNG file. ``machine`` is the heading that it belongs to, or None if it compares machines."""

    file: str
    caption: str
    machine: str | None
    points: list
    draw: Callable


def figures(points):
    """Return the Figure of every plot that has points."""
    forward = [point for point in points if point.direction == "forward"]
    eager = [point for point in forward if not point.graph]
    found = []
    tuned = at_full_size([p for p in eager if p.tuner and p.speedup], TOKENS)
    if tuned:
        where = f"from the {_TUNER}; {_multicast(tuned)}"
        caption = f"Speed-up over NCCL + cuBLAS, forward, M = {TOKENS} unless named ({where})"
        found.append(Figure("speedup-tuner.png", caption, None, tuned, _bars_of_machines))
    if long := [point for point in eager if point.shape.m >= _BAR_ROWS and point.gemm and point.wire]:
        caption = f"GEMM time against wire time, forward, and efficiency = floor / ours ({_multicast(long)})"
        chosen = at_full_size(_one_source(long, "machine"), TOKENS)
        found.append(Figure("roofline.png", caption, None, chosen, _roofline))
    for (machine,), chosen in groups(eager, "machine").items():
        found += _of_machine(machine, chosen, "")
    for (machine,), chosen in groups([p for p in forward if p.graph], "machine").items():
        found += _of_machine(machine, chosen, "-graph")
    return found


def _of_machine(machine, points, suffix):
    place = f"{_title(points[0])}{', in CUDA graphs' if suffix else ''}"
    found = []
    compared = [point for point in at_full_size(points, TOKENS) if not point.tuner and point.speedup]
    if long := [point for point in compared if point.shape.m >= _BAR_ROWS]:
        caption = f"Speed-up over NCCL + cuBLAS, forward, {place} ({_multicast(long)})"
        found.append(Figure(f"speedup-{machine}{suffix}.png", caption, machine, long, _bars))
    if sweeps := [point for layer in swept(_one_source(points, "layer")).values() for point in layer]:
        sources = {point.tuner for point in sweeps}
        source = f"; {'partly ' if len(sources) == 2 else ''}from the {_TUNER}" if True in sources else ""
        caption = f"Sweep of M, forward, {place} ({_multicast(sweeps)}{source})"
        found.append(Figure(f"sweep-{machine}{suffix}.png", caption, machine, sweeps, _sweeps))
    return found


def _one_source(points, *names):
    """Return, for each group, the benchmark's points or the tuner's, whichever are more; the two are never mixed."""
    found = []
    for chosen in groups(points, *names).values():
        tuner, bench = ([point for point in chosen if point.tuner == which] for which in (True, False))
        found += tuner if len(tuner) > len(bench) else bench
    return found


def _multicast(points):
    return "multicast " + " or ".join(sorted({str(point.settings.get("multicast")) for point in points}))


def short(gpu):
    """Return the name of a GPU for use in a file name."""
    return gpu.removeprefix("NVIDIA ").lower().replace(" ", "-")


def _title(point):
    return f"{point.settings['num_gpus']} x {point.settings['gpu'].removeprefix('NVIDIA ')}"


def draw(figures, folder):
    """Write the PNGs and yield their paths. With one version of matplotlib the same points give the same bytes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    folder.mkdir(parents=True, exist_ok=True)
    style = {"font.family": "DejaVu Sans", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    for figure in figures:
        with rc_context(style):
            canvas = Canvas(layout="constrained")
            figure.draw(canvas, figure.points)
            canvas.suptitle(figure.caption, fontsize=11)
            path = folder / figure.file
            _save(canvas, path)
            yield path


def _save(canvas, path):
    """Save as a PNG with 256 colours (a third of the size) and without date or version."""
    from PIL import Image  # matplotlib needs it, too

    buffer = io.BytesIO()
    canvas.savefig(buffer, dpi=_DPI)
    Image.open(buffer).convert("RGB").quantize(256).save(path, optimize=True)


# ---- bars ----


def _panels(canvas, points, row_inches):
    """Yield (axes, points) of each operator, side by side; the height follows the longest list of shapes."""
    by_operator = groups(points, "operator")
    rows = max(len({point.shape for point in chosen}) for chosen in by_operator.values())
    canvas.set_size_inches(5.2 * len(by_operator), 1.3 + row_inches * rows)
    axes = canvas.subplots(1, len(by_operator), squeeze=False)[0]
    for axis, ((operator,), chosen) in zip(axes, by_operator.items()):
        axis.set_title(operator, fontsize=10)
        axis.set_ylim(rows - 0.4, -0.6)  # first shape on top; equal bar height in all panels
        yield axis, chosen


def _draw_bars(axis, shapes, series):
    """Draw grouped horizontal bars. ``series`` is [(label, colour, {shape: factor})], from top to bottom."""
    height = 0.8 / len(series)
    for number, (label, colour, factors) in enumerate(series):
        places = [y + (number - (len(series) - 1) / 2) * height for y, shape in enumerate(shapes) if shape in factors]
        widths = [factors[shape] for shape in shapes if shape in factors]
        bars = axis.barh(places, widths, height * 0.92, color=colour, label=label)
        axis.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
    axis.axvline(1, color=_GREY, linewidth=1, zorder=0, label="NCCL + cuBLAS = 1")
    axis.set_yticks(range(len(shapes)), [_shape_label(shape) for shape in shapes], fontsize=8)
    axis.set_xlim(0, 1.12 * max(1, *(max(factors.values()) for *_, factors in series if factors)))
    axis.set_xlabel("speed-up over NCCL, then cuBLAS")


def _shape_label(shape):
    return f"{shape.name}\n{shape}" if shape.name else str(shape)


def _shapes_of(points):
    return sorted({point.shape for point in points}, key=lambda shape: (shape.n * shape.k, shape.n, shape.m))


def _bars(canvas, points):
    """Draw ours and the other libraries for each shape of a machine."""
    ours = "ours (heuristic config)" if all(point.untuned for point in points) else "ours"
    colours = dict(zip(sorted({name for point in points for name in point.peers}), _PEERS))
    for axis, chosen in _panels(canvas, points, 0.48):
        series = [(ours, _BLUE, {p.shape: p.speedup for p in chosen})]
        for name, colour in colours.items():
            factors = {p.shape: p.sequence / p.peers[name] for p in chosen if name in p.peers}
            series += [(name, colour, factors)] if factors else []
        _draw_bars(axis, _shapes_of(chosen), series)
    _legend(canvas)


def _bars_of_machines(canvas, points):
    machines = list(groups(points, "machine").values())
    colours = {chosen[0].machine: colour for chosen, colour in zip(machines, _SHADES)}
    titles = {chosen[0].machine: _title(chosen[0]) for chosen in machines}
    for axis, chosen in _panels(canvas, points, 0.46):
        series = [
            (titles[machine], colours[machine], {p.shape: p.speedup for p in chosen if p.machine == machine})
            for machine in colours
        ]
        _draw_bars(axis, _shapes_of(chosen), series)
    _legend(canvas)


def _legend(canvas):
    """Draw one legend for all panels, below them."""
    found = {}
    for axis in canvas.axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            found.setdefault(label, handle)
    canvas.legend(found.values(), found.keys(), loc="outside lower center", ncols=len(found), frameon=False)


# ---- sweep of M ----


def _sweeps(canvas, points):
    """Draw a panel for each layer: ms against M, with the floor. Each operator starts a row."""
    rows = []
    for chosen in groups(points, "operator").values():
        layers = _in_order(groups(chosen, "layer").values())
        rows += [layers[i : i + _COLUMNS] for i in range(0, len(layers), _COLUMNS)]
    columns = max(map(len, rows))
    canvas.set_size_inches(max(2.9 * columns, 6), 0.9 + 2.5 * len(rows))
    panels = canvas.subplots(len(rows), columns, squeeze=False, sharex=True, sharey=True)
    for row, layers in zip(panels, rows):
        row[0].set_ylabel("ms")
        for axis in row[len(layers) :]:
            axis.set_visible(False)
        for axis, chosen in zip(row, layers):
            _draw_sweep(axis, sorted(chosen, key=lambda point: point.shape.m))
    for axis in panels[-1]:
        axis.set_xlabel("M (rows)")
    _legend(canvas)


def _in_order(layers):
    """Sort layers in the order in which the models list them."""
    known = list(layer_names())
    return sorted(layers, key=lambda found: known.index(found[0].layer) if found[0].layer in known else len(known))


def _draw_sweep(axis, points):
    for label, attribute, style in (
        ("NCCL, then cuBLAS", "sequence", {"color": _ORANGE, "marker": "s", "markersize": 3.5}),
        ("ours", "ours", {"color": _BLUE, "marker": "o", "markersize": 3}),
        ("floor: max(GEMM, wire)", "floor", {"color": _GREY, "linestyle": "--"}),
    ):
        curve = [(p.shape.m, getattr(p, attribute)) for p in points if getattr(p, attribute)]
        if curve:
            axis.plot(*zip(*curve), label=label, linewidth=1.2, **style)
    shape = points[0].shape
    axis.set_title(f"{points[0].operator}, {shape.name}\nN x K = {shape.n} x {shape.k}", fontsize=8)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks([m for m in _M_TICKS if axis.get_xlim()[0] <= m <= axis.get_xlim()[1]])
    _plain_numbers(axis)
    axis.grid(alpha=0.25, linewidth=0.5)


def _plain_numbers(axis):
    """Label ticks as 0.1 and 4096 instead of powers."""
    from matplotlib.ticker import FuncFormatter

    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


# ---- roofline ----


def _roofline(canvas, points):
    """Draw a panel for each machine. Above the diagonal a shape is bound by the wire, below it by the GEMM."""
    from matplotlib.lines import Line2D

    machines = list(groups(points, "machine").values())
    canvas.set_size_inches(4.1 * len(machines) + 0.8, 4.4)
    axes = list(canvas.subplots(1, len(machines), squeeze=False, sharex=True, sharey=True)[0])
    gemms, wires = [point.gemm for point in points], [point.wire for point in points]
    right, top = (min(gemms) / 1.5, max(gemms) * 1.5), (min(wires) / 1.5, max(wires) * 2)
    diagonal = min(right[0], top[0]), max(right[1], top[1])
    markers = dict(zip(sorted({point.operator for point in points}), "o^sDv"))
    for axis, chosen in zip(axes, machines):
        axis.plot(diagonal, diagonal, color=_GREY, linewidth=0.8, zorder=0)
        for operator, marker in markers.items():
            some = [point for point in chosen if point.operator == operator and point.efficiency]
            drawn = axis.scatter(
                [point.gemm for point in some], [point.wire for point in some], c=[p.efficiency for p in some],
                marker=marker, s=48, cmap="viridis", vmin=0.4, vmax=1, edgecolors="black", linewidths=0.4,
            )
        axis.set(xscale="log", yscale="log", xlim=right, ylim=top, xlabel="GEMM time, ms (cuBLAS alone)")
        axis.set_title(f"{_title(chosen[0])}{f' ({_TUNER})' if chosen[0].tuner else ''}", fontsize=10)
        axis.text(0.04, 0.96, "bound by the wire", transform=axis.transAxes, va="top", color=_GREY)
        axis.text(0.96, 0.04, "bound by the GEMM", transform=axis.transAxes, ha="right", color=_GREY)
        axis.grid(alpha=0.25, linewidth=0.5)
        _plain_numbers(axis)
    axes[0].set_ylabel("wire time, ms (bytes / best link rate)")
    canvas.colorbar(drawn, ax=axes, label="efficiency of ours: floor / ours", extend="both", shrink=0.8)
    handles = [
        Line2D([], [], linestyle="", marker=marker, markerfacecolor="white", markeredgecolor="black", label=operator)
        for operator, marker in markers.items()
    ]
    canvas.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
