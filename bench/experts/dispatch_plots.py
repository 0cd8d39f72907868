"""Plots of dispatch and combine: microseconds over tokens per rank, one panel per operator and payload."""

from bench.experts.dispatch import PEERS
from bench.report.plots import Figure, short

_STYLES = {
    "sequence": ("unfused (torch + NCCL)", "#e08214", "-"),
    "sequence-known-splits": ("unfused, known splits", "#fdb863", "-"),
    **{name: (name, colour, "--") for name, colour in zip(PEERS, ("#7fbc41", "#8c6bb1"))},
    "tdkernels": ("ours", "#2166ac", "-"),
    "tdkernels-max-tokens": ("ours, max_tokens", "#67a9cf", "-"),
    "tdkernels-direct": ("ours, low-latency", "#1a9850", "-"),
}


def figures(newest):
    """Return one figure per machine, layer, routing and mode; ``newest``: see ``dispatch_report.newest_runs``."""
    chosen = {place: runs for place, runs in newest.items() if place[4] != "ep_latency"}
    found = []
    for gpu, ranks, layer, routing, graph in sorted({(*place[:4], place[6]) for place in chosen}):
        panels = {
            (place[4], place[5]): chosen[place] for place in sorted(chosen)
            if (*place[:4], place[6]) == (gpu, ranks, layer, routing, graph)
        }
        multicast = next(iter(next(iter(next(iter(panels.values())).values())).values()))["multicast"]
        hidden, experts, choices = layer
        usual = layer == (7168, 256, 8)
        caption = (
            f"Expert parallelism, {ranks} x {gpu}, H = {hidden}, {experts} experts, top-{choices}"
            f"{', skewed' if routing == 'skewed' else ''}{', in CUDA graphs' if graph else ''}; multicast {multicast}; "
            "dotted: transfer time at the best link rate"
        )
        name_parts = [f"ep-{short(gpu)}x{ranks}"]
        name_parts += [] if usual else ["x".join(map(str, layer))]
        name_parts += ["skewed"] * (routing == "skewed") + ["graph"] * graph
        found.append(Figure("-".join(name_parts) + ".png", caption, None, panels, _panels))
    return found


def _panels(canvas, panels):
    canvas.set_size_inches(3.6 * len(panels) + 1, 4.0)
    axes = canvas.subplots(1, len(panels), squeeze=False)[0]
    for axis, ((operator, payload), runs) in zip(axes, panels.items(), strict=True):
        counts = sorted(runs)
        for name, (label, colour, line) in _STYLES.items():
            points = [(n, runs[n][name]["ms"] * 1e3) for n in counts if name in runs[n] and runs[n][name]["ms"]]
            if points:
                axis.plot(*zip(*points, strict=True), line, marker="o", markersize=3, color=colour, label=label)
        floors = [(n, next(iter(runs[n].values()))["floor_ms"]) for n in counts]
        floors = [(n, ms * 1e3) for n, ms in floors if ms]
        if floors:
            axis.plot(*zip(*floors, strict=True), ":", color="#777777", label="transfer floor")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(counts, [str(n) for n in counts], rotation=45)
        axis.minorticks_off()
        axis.set_title(f"{operator}, {payload}" if operator == "ep_dispatch" else operator)
        axis.set_xlabel("tokens per rank")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("microseconds")
