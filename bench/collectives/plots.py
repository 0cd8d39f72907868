"""Plots of the collectives: microseconds over message size, one panel per operator."""

from bench.collectives.cases import PEERS, format_size
from bench.report.plots import Figure, short

_STYLES = {"nccl": ("NCCL", "#e08214", "-"), "tdkernels": ("ours", "#2166ac", "-")}
_PEER_COLOURS = ("#7fbc41", "#8c6bb1", "#b35806")


def figures(newest):
    """Return one figure per machine and mode (eager or CUDA graph); ``newest``: see ``report.newest_runs``."""
    found = []
    for gpu, ranks, graph in sorted({(gpu, ranks, graph) for gpu, ranks, _, graph in newest}):
        operators = sorted({place[2] for place in newest if (*place[:2], place[3]) == (gpu, ranks, graph)})
        runs = {operator: newest[gpu, ranks, operator, graph] for operator in operators}
        name = short(gpu)
        multicast = next(iter(next(iter(runs.values())).values()))["nccl"]["multicast"]
        caption = (
            f"Collectives, {ranks} x {gpu}{', in CUDA graphs' if graph else ''}; multicast {multicast}; "
            "dotted: transfer time at the best link rate"
        )
        file = f"collectives-{name}x{ranks}{'-graph' if graph else ''}.png"
        found.append(Figure(file, caption, None, runs, _panels))
    return found


def _panels(canvas, runs):
    canvas.set_size_inches(4.2 * len(runs), 4.0)
    axes = canvas.subplots(1, len(runs), squeeze=False)[0]
    for axis, (operator, by_bytes) in zip(axes, runs.items(), strict=True):
        sizes = sorted(by_bytes)
        for name, (label, colour, line) in _methods().items():
            points = [(size, by_bytes[size][name]["ms"] * 1e3) for size in sizes if _measured(by_bytes[size], name)]
            if points:
                axis.plot(*zip(*points, strict=True), line, marker="o", markersize=3, color=colour, label=label)
        lowest = min(row["ms"] for run in by_bytes.values() for row in _rows(run))
        floors = [(size, by_bytes[size]["nccl"]["floor_ms"]) for size in sizes]
        reached = [(size, ms * 1e3) for size, ms in floors if ms and ms > lowest / 3]  # omitted far below the times
        if reached:
            axis.plot(*zip(*reached, strict=True), ":", color="#777777", label="transfer floor")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sizes, [format_size(size) for size in sizes], rotation=45)
        axis.minorticks_off()
        axis.set_title(operator)
        axis.set_xlabel("message size (bytes of the full tensor)")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("microseconds")


def _methods():
    peers = {name: (name, colour, "--") for name, colour in zip(PEERS, _PEER_COLOURS, strict=False)}
    return {"nccl": _STYLES["nccl"], **peers, "tdkernels": _STYLES["tdkernels"]}


def _rows(run):
    return [row for name, row in run.items() if name != "date" and row["ms"]]


def _measured(run, name):
    return name in run and run[name]["ms"]
