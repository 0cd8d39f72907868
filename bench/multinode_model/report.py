"""Report section of the multi-node cost model: `python -m bench.multinode_model.report` prints it.

All times are predicted. Published results of another library, on other machines, are shown for comparison.
"""

import sys
from pathlib import Path

from bench.core.points import BadRow, geometric_mean, read, read_collectives, read_decode, read_ep
from bench.multinode_model import measured_inputs, model, token_model
from bench.multinode_model import published as nodes_published
from bench.multinode_model.model import World
from bench.report.cells import factor, markdown, share

WORLDS = tuple(World(count) for count in (1, 2, 4, 8))
_HEAD = """## Predicted multi-node performance

**Nothing in this section was run.** The cost model in `bench/multinode_model/model.py` and
`bench/multinode_model/token_model.py` predicts 1 to 8 nodes of 8 GPUs, each GPU with 400 Gb/s of network, from
single-node measurements; its formulas are in the docstrings. The section shows the validation of the model on one node,
its inputs, a comparison with published results (from `bench/multinode_model/published.py`), and the predictions.
`python -m bench.multinode_model.report` prints it.

- **GEMM**: cuBLAS alone. **network**, **NVLink**: transfer time of a rank at the rates of the model. **bound**: the
  largest of the three. **unfused**: NCCL's collective, then cuBLAS. NCCL is assumed to use the network equally well,
  and to overlap network and NVLink. **ours**: the tuned hierarchical operator.
- **efficiency**: floor / ours. The floor is the largest of the GEMM, the network at its full 50 GB/s, and NVLink at its
  best rate.
- **hidden**: GEMM / ours. A value well below 1 means that the communication cannot be hidden: the GEMM gets smaller
  with the number of ranks, while the bytes received per rank do not.
- **~** after a size: no measured GEMM is within an octave, so the GEMM time is extrapolated.
"""


def text(points, alone, ep, decode):
    """Return the section, or "" if rows that the model needs are missing.

    Args: as for ``measured_inputs.machine``.
    """
    try:
        machine = measured_inputs.machine(points, alone, ep, decode)
    except measured_inputs.Missing:
        return ""
    parts = [_HEAD, _checked(machine, points), _known(machine), _beside_published(machine), _dense(machine),
             _experts(machine), _decoding(machine)]
    return "\n".join(parts)


def main(results):
    """Print the section. Return the exit code."""
    try:
        points = read(results)
        machine_rows = read_collectives(results), read_ep(results), read_decode(results)
        measured_inputs.machine(points, *machine_rows)
    except (BadRow, measured_inputs.Missing) as error:
        print(f"bench.multinode_model.report: {error}", file=sys.stderr)
        return 1
    print(text(points, *machine_rows))
    return 0


def _table(titles, lines, text_columns=1):
    """Return a Markdown table whose first columns are left-aligned."""
    rule = ["---"] * text_columns + ["---:"] * (len(titles) - text_columns)
    return markdown([titles, rule, *lines])


def _time(value):
    """Return ms as text, or a dash if nothing is sent."""
    return "–" if not value else f"{value:.{3 if value >= 0.1 else 4}f}"


def _us(value):
    return "–" if not value else f"{1e3 * value:.0f}"


# ---- validation and inputs ----


def _checked(machine, points):
    """Compare the model with single-node measurements."""
    lines = []
    for operator in ("ag_gemm", "gemm_rs", "gemm_ar"):
        found = measured_inputs.widest(measured_inputs.usable(points), operator)
        ours, sequence = zip(*(_predicted_over_measured(machine, point) for point in found))
        gpus = str(found[0].settings["num_gpus"])
        lines.append([operator, gpus, str(len(found)), *_spread(ours), *_spread(sequence)])
    titles = ("operator", "GPUs", "shapes", "ours", "min", "max", "unfused", "min", "max")
    cross_validated = [machine.gemms.without(sizes).ms(*sizes) / time for sizes, time in machine.gemms.known.items()
                       if sizes[0] >= measured_inputs.ROWS]
    mean, least, most = _spread(cross_validated)
    note = (
        "Predicted over measured times (the tuner's final rounds, M at least 8192): geometric mean, minimum and\n"
        "maximum. The rates of the model are medians of the same rows, so means near 1 are expected; the minima and\n"
        f"maxima show the error of single shapes. GEMMs, each predicted from all others: {mean} (min {least}, max "
        f"{most}, {len(cross_validated)} GEMMs).\n"
    )
    return "\n".join(["### Validation on one node\n", note, _table(titles, lines)])


def _predicted_over_measured(machine, point):
    shape, world = point.shape, World(1, point.settings["num_gpus"])
    cost = getattr(model, point.operator)(machine, shape.m, shape.n, shape.k, world)
    return cost.ours / point.ours, cost.sequence / point.sequence


def _spread(ratios):
    return [f"{value:.2f}" for value in (geometric_mean(ratios), min(ratios), max(ratios))]


def _known(machine):
    """List all fields of the machine with their sources."""
    lines = [[name, _value(getattr(machine, name)), kind, source] for name, kind, source in model.provenance()]
    return "\n".join(["### Model inputs\n", _table(("input", "value", "kind", "source"), lines, 4)])


def _value(value):
    if isinstance(value, model.GemmTimes):
        return f"{len(value.known)} GEMMs"
    if isinstance(value, tuple) and isinstance(value[0], tuple):
        return ", ".join(f"{keys // 1024}K: {1e3 * time:.0f} µs" for keys, time in value)
    if isinstance(value, tuple):
        return " x ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return str(value)


# ---- comparison with published results ----


def _beside_published(machine):
    slow, two = model.with_links(machine, nodes_published.H800_LINK_GBPS), World(2)
    lines, ratios = [], {}
    for operator, bars in nodes_published.TWO_NODES.items():
        for sizes, bar in bars.items():
            here, there = (getattr(model, operator)(rates, *sizes, two) for rates in (machine, slow))
            ratios.setdefault(operator, []).append(there.speedup / bar)
            lines.append([
                operator, _sizes(sizes, here), factor(here.speedup), share(here.hidden), factor(there.speedup),
                share(there.hidden), f"{bar:.2f}",
            ])
    titles = ("operator", "M x N x K", "x unfused", "hidden", "H800 links: x unfused", "hidden", "published")
    means = (
        f"{operator} {mean} (min {least}, max {most})"
        for operator, (mean, least, most) in ((name, _spread(found)) for name, found in ratios.items())
    )
    summary = (
        "Ratio of predicted (H800 links) to published speedups on 2 nodes, where values above 1 are too optimistic: "
        f"{', '.join(means)}.\n"
    )
    return "\n".join(
        ["### Predicted and published results\n", nodes_published.NOTE,
         _table(titles, lines, 2), summary, _published_all_to_all(machine), _published_decode(machine)]
    )


def _sizes(sizes, cost):
    return "x".join(map(str, sizes)) + (" ~" if cost.far else "")


def _published_all_to_all(machine):
    """Compare the published 32-GPU all-to-all with all_to_all (one row per expert) and ep_dispatch."""
    tokens, hidden, choices, experts = nodes_published.ALL_TO_ALL
    world, row_bytes = World(4), measured_inputs.row_bytes(hidden, "fp8")
    straight = token_model.all_to_all(machine, tokens, hidden, choices, row_bytes, world)
    once = token_model.ep_dispatch(machine, tokens, hidden, experts, choices, row_bytes, world)
    lines = [
        [name, f"{cost.sent.network / 1e6:.2f}", _us(cost.network), _us(cost.ours), share(cost.efficiency)]
        for name, cost in (("all_to_all, one row per expert", straight), ("ep_dispatch, one row per node", once))
    ]
    lines += [[name, "", "", str(us), ""] for name, us in nodes_published.ALL_TO_ALL_US.items()]
    note = (
        f"Dispatch of {tokens} tokens per rank on {world.ranks} GPUs, H = {hidden}, top-{choices} of {experts} "
        "experts, fp8; µs.\n"
    )
    return "\n".join([note, _table(("method", "MB over network", "network", "total", "efficiency"), lines)])


def _published_decode(machine):
    lines = []
    for keys, published in nodes_published.DECODE_US.items():
        costs = [token_model.flash_decode(machine, keys, *nodes_published.DECODE_HEADS, world) for world in WORLDS[:3]]
        cells = (f"{_us(cost.ours)} ({us})" for cost, us in zip(costs, published))
        lines.append([f"{keys // 1024}K", *cells])
    note = "flash_decode, batch 1, 96 / 12 heads of 128: µs by total number of keys, published values in parentheses.\n"
    titles = ("keys", *(f"{world.nodes} node{'s' * (world.nodes > 1)}" for world in WORLDS[:3]))
    return "\n".join([note, _table(titles, lines)])


# ---- predictions by the number of nodes ----


_DENSE = ("nodes", "GPUs", "GEMM", "network", "NVLink", "bound", "unfused", "ours", "x unfused", "efficiency",
          "hidden")
_SHAPES = {
    "ag_gemm": [(8192, 28672, 8192), (8192, 57344, 8192), (8192, 49152, 12288), (8192, 106496, 16384),
                (32768, 28672, 8192), (32768, 53248, 16384)],
    "gemm_rs": [(8192, 8192, 28672), (8192, 12288, 49152), (8192, 16384, 53248), (32768, 8192, 28672),
                (32768, 12288, 49152)],
    "gemm_ar": [(2048, 5120, 25600), (8192, 8192, 8192), (8192, 8192, 28672)],
}
_WIRES = """Milliseconds. A rank sends N (L - 1) / (N - 1) times as many bytes over NVLink as over the network: with 8
GPUs per node 14 times on 2 nodes, and 8 times on 8 nodes. NVLink is {ratio:.1f} times as fast, so {which} takes longer.
"""
_OWNERS = """Milliseconds. For large messages on three or more nodes, one of the owners of a tile reduces it for all
nodes: 2 (N - 1) / N times the tile is sent over the network, as in NCCL, with a second network trip. **All reduce** is
the alternative in which the owner on each node reduces the tile: it sends N - 1 times the tile, which grows with the
number of nodes.
"""


def _dense(machine):
    parts = []
    for operator, shapes in _SHAPES.items():
        owners = operator == "gemm_ar"
        lines = [_dense_line(machine, operator, sizes, world) for sizes in shapes for world in WORLDS]
        titles = ("M x N x K", *_DENSE, *(("all reduce",) if owners else ()))
        ratio = machine.link_gbps / machine.network_rate
        which = "NVLink" if ratio < 8 else "the network (on many nodes)" if ratio < 14 else "the network"
        note = _OWNERS if owners else _WIRES.format(ratio=ratio, which=which)
        parts += [f"### {operator}, predicted\n", note, _table(titles, lines)]
    return "\n".join(parts)


def _dense_line(machine, operator, sizes, world):
    cost = getattr(model, operator)(machine, *sizes, world)
    line = [
        _sizes(sizes, cost), str(world.nodes), str(world.ranks), _time(cost.gemm), _time(cost.network),
        _time(cost.link), cost.bound, _time(cost.sequence), _time(cost.ours), factor(cost.speedup),
        share(cost.efficiency), share(cost.hidden),
    ]
    if operator == "gemm_ar":
        line.append(_time(model.gemm_ar(machine, *sizes, world, once=False).ours))
    return line


_EXPERTS = """### Dispatch and combine, predicted

Microseconds by tokens per rank; H = {hidden}, top-{choices} of {experts} experts, uniform routing without a limit on
nodes. **remote nodes**: number of other nodes that receive a token. **rows**: number of NVLink transfers per token.
Both are exact means over the ranks; the busiest rank has more. Dispatch sends fp8, combine bf16; all_to_all sends one
fp8 row per expert of a token. The fixed start-up cost was measured on few GPUs, which have fewer peers to signal.
"""


def _experts(machine):
    _, hidden, choices, experts = nodes_published.ALL_TO_ALL
    row_bytes = measured_inputs.row_bytes(hidden, "fp8")
    lines = []
    for tokens in (128, 1024, 4096):
        for world in WORLDS:
            there = token_model.ep_dispatch(machine, tokens, hidden, experts, choices, row_bytes, world)
            back = token_model.ep_combine(machine, tokens, hidden, experts, choices, world)
            rows = token_model.all_to_all(machine, tokens, hidden, choices, row_bytes, world)
            lines.append([
                str(tokens), str(world.nodes), str(world.ranks), f"{there.routing.nodes:.2f}",
                f"{there.routing.nvlink_rows:.2f}", _us(there.network), _us(there.link), _us(there.ours),
                share(there.efficiency), _us(back.ours), share(back.efficiency), _us(rows.ours),
            ])
    titles = ("tokens", "nodes", "GPUs", "remote nodes", "rows", "network", "NVLink", "dispatch", "efficiency",
              "combine", "efficiency", "all_to_all")
    head = _EXPERTS.format(hidden=hidden, choices=choices, experts=experts)
    return "\n".join([head, _table(titles, lines)])


def _decoding(machine):
    lines = []
    for keys in (2**16, 2**18, 2**20):
        for world in WORLDS:
            cost = token_model.flash_decode(machine, keys, *nodes_published.DECODE_HEADS, world)
            lines.append([
                f"{keys // 1024}K", str(world.nodes), str(world.ranks), _us(cost.local), _us(cost.sequence),
                _us(cost.ours), factor(cost.speedup), share(cost.hidden),
            ])
    note = (
        "Microseconds by total number of keys; batch 1, 96 / 12 heads of 128, in CUDA graphs. **local**: one rank "
        "without communication.\n"
    )
    titles = ("keys", "nodes", "GPUs", "local", "unfused", "ours", "x unfused", "hidden")
    return "\n".join(["### flash_decode, predicted\n", note, _table(titles, lines)])


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1] / "results"))
