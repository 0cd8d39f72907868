"""Plots of flash_decode: microseconds over the total number of keys, one curve per number of GPUs."""

from bench.attention.flash_decode import LOCAL, SEQUENCE
from bench.report.plots import _GREY, _SHADES, Figure, short

_LINES = {"ours": "-", "unfused (torch + NCCL)": "--", "memory floor": ":"}
_MIN_POINTS = 4  # of a curve


def figures(newest):
    """Return one figure per GPU model and mode; ``newest``: see ``flash_decode_report.newest_runs``."""
    panels = {}
    for gpu, ranks, graph, heads, batch in sorted(newest):
        runs = newest[gpu, ranks, graph, heads, batch]
        if len(runs) >= _MIN_POINTS:
            panels.setdefault((gpu, graph), {}).setdefault((heads, batch), {})[ranks] = runs
    found = []
    for (gpu, graph), of_gpu in panels.items():
        row = next(_rows(of_gpu))
        where = f"{gpu}{', in CUDA graphs' * graph} (multicast {row['multicast']})"
        caption = f"flash_decode by total number of keys, {where}"
        file = f"flash-decode-{short(gpu)}{'-graph' * graph}.png"
        found.append(Figure(file, caption, None, of_gpu, _panels))
    return found


def _rows(panels):
    for by_ranks in panels.values():
        for runs in by_ranks.values():
            for run in runs.values():
                yield from run.values()


def _panels(canvas, panels):
    canvas.set_size_inches(max(4.2 * len(panels), 8.5), 4.2)
    axes = canvas.subplots(1, len(panels), squeeze=False)[0]
    for axis, (((heads, kv_heads, dim), batch), by_ranks) in zip(axes, panels.items(), strict=True):
        totals = sorted({ranks * keys for ranks, runs in by_ranks.items() for keys in runs})
        for (ranks, runs), colour in zip(sorted(by_ranks.items()), _SHADES, strict=False):
            _curves(axis, ranks, runs, colour)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(totals, [f"{keys // 1024}K" if keys >= 1024 else str(keys) for keys in totals], rotation=45)
        axis.minorticks_off()
        axis.set_title(f"{heads} / {kv_heads} heads of {dim}, batch {batch}", fontsize=10)
        axis.set_xlabel("keys (all ranks)")
        axis.grid(alpha=0.3)
        for label, line in _LINES.items():
            axis.plot([], [], line, color=_GREY, label=label)
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("microseconds")


def _curves(axis, ranks, runs, colour):
    label = f"{ranks} GPU{'s' * (ranks > 1)}"
    for line, ms_of in zip(_LINES.values(), (_ours, _sequence, _floor), strict=True):
        points = [(ranks * keys, ms_of(runs[keys]) * 1e3) for keys in sorted(runs) if ms_of(runs[keys])]
        if points:
            axis.plot(*zip(*points, strict=True), line, color=colour, label=label, linewidth=1.2)
            label = None  # one legend entry for the three lines


def _ours(run):
    """Return ms of flash_decode on all ranks; with one GPU, of local."""
    return run.get("tdkernels", run.get("local", {})).get("ms")


def _sequence(run):
    """Return ms of the fastest unfused baseline; with one GPU, of torch's fastest attention."""
    prefix = SEQUENCE if any(method.startswith(SEQUENCE) for method in run) else LOCAL
    return min((row["ms"] for method, row in run.items() if method.startswith(prefix) and row["ms"]), default=None)


def _floor(run):
    return next(iter(run.values()))["floor_ms"]
