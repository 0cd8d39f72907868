"""What the cost model says of several nodes, a part of the report: `python -m bench.multinode_model.report` prints it.

All of it is predicted; what is published of another library, on other machines, stands beside it.
"""

import sys
from pathlib import Path

from bench.core.points import BadRow, geometric_mean, read, read_collectives, read_decode, read_ep
from bench.multinode_model import measured_inputs, model, token_model
from bench.multinode_model import published as nodes_published
from bench.multinode_model.model import World
from bench.report.tables import factor

BEGIN, END = "<!-- predicted: begin -->", "<!-- predicted: end -->"
WORLDS = tuple(World(count) for count in (1, 2, 4, 8))
_HEAD = """## PREDICTED: several nodes

**Nothing in this part was run.** It is what the model of `bench/multinode_model/model.py` and
`bench/multinode_model/token_model.py` makes of pieces that were measured on one node, for 1 to 8 nodes of 8 GPUs with
400 Gb/s of network each. Its formulas are in the
docstrings there. How well it tells what was measured on one node comes first, what it assumes next, then its figures
beside published ones, which are typed in `bench/multinode_model/published.py`. `python -m bench.multinode_model.report`
prints it.

- **Product** is cuBLAS alone, **network** and **NVLink** what a rank sends at the rates of the model, **bound** the
  longest of the three. **Sequence** is NCCL's collective (which is granted the same network, and hides the smaller of
  network and NVLink) and cuBLAS, one after the other. **Ours** is the hierarchical operator, tuned.
- **Efficiency** is floor / ours; the floor is the largest of the product, the network at its full 50 GB/s and NVLink at
  its best rate. **Hidden** is product / ours: well below 1 means that the communication cannot be hidden, since the
  product shrinks with the number of ranks and what each of them receives does not.
- ~ beside a size: no product that was measured is near it (an octave), so its time is a guess by rates.
"""


def text(points, alone, ep, decode):
    """The section; nothing if rows that the model needs are missing.

    Args:     as those of nodes_measured.machine
    """
    try:
        machine = measured_inputs.machine(points, alone, ep, decode)
    except measured_inputs.Missing:
        return ""
    parts = [BEGIN, _HEAD, _checked(machine, points), _known(machine), _beside_published(machine), _dense(machine),
             _experts(machine), _decoding(machine), END, ""]
    return "\n".join(parts)


def main(results):
    """Print the section; the exit code."""
    try:
        points = read(results)
        machine_rows = read_collectives(results), read_ep(results), read_decode(results)
        measured_inputs.machine(points, *machine_rows)
    except (BadRow, measured_inputs.Missing) as error:
        print(f"bench.multinode_model.report: {error}", file=sys.stderr)
        return 1
    print(text(points, *machine_rows))
    return 0


def _table(titles, lines, words=1):
    """Markdown, the first columns left-aligned."""
    rule = ["---"] * words + ["---:"] * (len(titles) - words)
    return "\n".join("| " + " | ".join(line) + " |" for line in (titles, rule, *lines)) + "\n"


def _time(value):
    """Nothing is what is not sent."""
    return "–" if not value else f"{value:.{3 if value >= 0.1 else 4}f}"


def _us(value):
    return "–" if not value else f"{1e3 * value:.0f}"


def _share(value):
    return "–" if value is None else f"{value:.2f}"


# ---- what can be checked, and what goes in ----


def _checked(machine, points):
    """The model against what was measured on one node."""
    lines = []
    for operator in ("ag_gemm", "gemm_rs", "gemm_ar"):
        found = measured_inputs.widest(measured_inputs.usable(points), operator)
        ours, sequence = zip(*(_predicted_over_measured(machine, point) for point in found))
        gpus = str(found[0].settings["num_gpus"])
        lines.append([operator, gpus, str(len(found)), *_spread(ours), *_spread(sequence)])
    titles = ("operator", "GPUs", "shapes", "ours", "least", "most", "sequence", "least", "most")
    apart = [machine.products.without(sizes).ms(*sizes) / time for sizes, time in machine.products.known.items()
             if sizes[0] >= measured_inputs.ROWS]
    mean, least, most = _spread(apart)
    note = (
        "Predicted over measured (the tuner's last rounds, at least 8192 rows): geometric mean and extremes. The\n"
        "rates of the model are medians of these same rows, so the means had to be near 1; the extremes tell how far\n"
        f"single shapes are off. Products, each predicted from all others: {mean} (least {least}, most {most}, "
        f"{len(apart)} products).\n"
    )
    return "\n".join(["### How well it tells what was measured on one node\n", note, _table(titles, lines)])


def _predicted_over_measured(machine, point):
    shape, world = point.shape, World(1, point.settings["num_gpus"])
    cost = getattr(model, point.operator)(machine, shape.m, shape.n, shape.k, world)
    return cost.ours / point.ours, cost.sequence / point.sequence


def _spread(ratios):
    return [f"{value:.2f}" for value in (geometric_mean(ratios), min(ratios), max(ratios))]


def _known(machine):
    """All fields, with where they come from."""
    lines = [[name, _value(getattr(machine, name)), kind, source] for name, kind, source in model.provenance()]
    return "\n".join(["### What goes in\n", _table(("piece", "value", "kind", "from"), lines, 4)])


def _value(value):
    if isinstance(value, model.Products):
        return f"{len(value.known)} products"
    if isinstance(value, tuple) and isinstance(value[0], tuple):
        return ", ".join(f"{keys // 1024}K: {1e3 * time:.0f} µs" for keys, time in value)
    if isinstance(value, tuple):
        return " x ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return str(value)


# ---- beside what is published ----


def _beside_published(machine):
    slow, two = model.with_links(machine, nodes_published.H800_LINK_GBPS), World(2)
    lines, ratios = [], {}
    for operator, bars in nodes_published.TWO_NODES.items():
        for sizes, bar in bars.items():
            here, there = (getattr(model, operator)(rates, *sizes, two) for rates in (machine, slow))
            ratios.setdefault(operator, []).append(there.speedup / bar)
            lines.append([
                operator, _sizes(sizes, here), factor(here.speedup), _share(here.hidden), factor(there.speedup),
                _share(there.hidden), f"{bar:.2f}",
            ])
    titles = ("operator", "M x N x K", "x sequence", "hidden", "links of H800: x sequence", "hidden", "published")
    words = (
        f"{operator} {mean} (least {least}, most {most})"
        for operator, (mean, least, most) in ((name, _spread(found)) for name, found in ratios.items())
    )
    summary = f"Predicted with links of H800 over published, 2 nodes; above 1 is optimism: {', '.join(words)}.\n"
    return "\n".join(
        ["### Predicted beside published figures of Triton-distributed\n", nodes_published.NOTE,
         _table(titles, lines, 2), summary, _all_to_all_beside(machine), _decode_beside(machine)]
    )


def _sizes(sizes, cost):
    return "x".join(map(str, sizes)) + (" ~" if cost.far else "")


def _all_to_all_beside(machine):
    """Its 32-GPU figure, as one row an expert and as tokens that cross once a node."""
    tokens, hidden, choices, experts = nodes_published.ALL_TO_ALL
    world, row_bytes = World(4), measured_inputs.row_bytes(hidden, "fp8")
    straight = token_model.all_to_all(machine, tokens, hidden, choices, row_bytes, world)
    once = token_model.ep_dispatch(machine, tokens, hidden, experts, choices, row_bytes, world)
    lines = [
        [name, f"{cost.sent.network / 1e6:.2f}", _us(cost.network), _us(cost.ours), _share(cost.efficiency)]
        for name, cost in (("all_to_all, a row for each expert", straight), ("ep_dispatch, once for each node", once))
    ]
    lines += [[name, "", "", str(us), ""] for name, us in nodes_published.ALL_TO_ALL_US.items()]
    note = f"{tokens} tokens a rank of {world.ranks} GPUs, H = {hidden}, {choices} of {experts} experts, fp8; µs.\n"
    return "\n".join([note, _table(("how", "MB over the network", "network", "µs", "efficiency"), lines)])


def _decode_beside(machine):
    lines = []
    for keys, published in nodes_published.DECODE_US.items():
        costs = [token_model.flash_decode(machine, keys, *nodes_published.DECODE_HEADS, world) for world in WORLDS[:3]]
        cells = (f"{_us(cost.ours)} ({us})" for cost, us in zip(costs, published))
        lines.append([f"{keys // 1024}K", *cells])
    note = "flash_decode, batch 1, 96 / 12 heads of 128: µs by the keys of all ranks, in brackets what is published.\n"
    titles = ("keys", *(f"{world.nodes} node{'s' * (world.nodes > 1)}" for world in WORLDS[:3]))
    return "\n".join([note, _table(titles, lines)])


# ---- by the number of nodes ----


_DENSE = ("nodes", "GPUs", "product", "network", "NVLink", "bound", "sequence", "ours", "x sequence", "efficiency",
          "hidden")
_SHAPES = {
    "ag_gemm": [(8192, 28672, 8192), (8192, 57344, 8192), (8192, 49152, 12288), (8192, 106496, 16384),
                (32768, 28672, 8192), (32768, 53248, 16384)],
    "gemm_rs": [(8192, 8192, 28672), (8192, 12288, 49152), (8192, 16384, 53248), (32768, 8192, 28672),
                (32768, 12288, 49152)],
    "gemm_ar": [(2048, 5120, 25600), (8192, 8192, 8192), (8192, 8192, 28672)],
}
_WIRES = """A rank sends N (L - 1) / (N - 1) times as much over NVLink as over the network: with 8 GPUs a node 14 times
on 2 nodes, 8 times on 8. NVLink is {ratio:.1f} times as fast here. So {which} is what takes longer.
"""
_OWNERS = """From three nodes on, where there is much to send, one of a tile's owners adds up for all: 2 (N - 1) / N
times its tiles go over the network, as in NCCL, and there is a second trip. **All add** is the other form, in which
each owner adds for its node: N - 1 times its tiles, so it grows with the number of nodes.
"""


def _dense(machine):
    parts = []
    for operator, shapes in _SHAPES.items():
        owners = operator == "gemm_ar"
        lines = [_dense_line(machine, operator, sizes, world) for sizes in shapes for world in WORLDS]
        titles = ("M x N x K", *_DENSE, *(("all add",) if owners else ()))
        ratio = machine.link_gbps / machine.network_rate
        which = "NVLink" if ratio < 8 else "on many nodes the network" if ratio < 14 else "the network"
        note = _OWNERS if owners else _WIRES.format(ratio=ratio, which=which)
        parts += [f"### {operator}, predicted\n", note, _table(titles, lines)]
    return "\n".join(parts)


def _dense_line(machine, operator, sizes, world):
    cost = getattr(model, operator)(machine, *sizes, world)
    line = [
        _sizes(sizes, cost), str(world.nodes), str(world.ranks), _time(cost.product), _time(cost.network),
        _time(cost.link), cost.bound, _time(cost.sequence), _time(cost.ours), factor(cost.speedup),
        _share(cost.efficiency), _share(cost.hidden),
    ]
    if operator == "gemm_ar":
        line.append(_time(model.gemm_ar(machine, *sizes, world, once=False).ours))
    return line


_EXPERTS = """### Tokens to experts and back, predicted

H = {hidden}, {choices} of {experts} experts, uniform routing with no limit on nodes; µs. **Nodes of a token** is to how
many others it goes, **rows** how often it crosses NVLink: exact averages, the busiest rank has more. A dispatch is in
fp8, a combine in bf16; all_to_all carries a row for each of a token's experts, in fp8. What both take
at the start was measured on few GPUs, with fewer peers to signal.
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
                f"{there.routing.passed:.2f}", _us(there.network), _us(there.link), _us(there.ours),
                _share(there.efficiency), _us(back.ours), _share(back.efficiency), _us(rows.ours),
            ])
    titles = ("tokens", "nodes", "GPUs", "nodes of a token", "rows", "network", "NVLink", "dispatch", "efficiency",
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
                _us(cost.ours), factor(cost.speedup), _share(cost.hidden),
            ])
    note = "Batch 1, 96 / 12 heads of 128, in CUDA graphs; µs by the keys of all ranks. Local is a rank alone.\n"
    titles = ("keys", "nodes", "GPUs", "local", "sequence", "ours", "x sequence", "hidden")
    return "\n".join(["### flash_decode, predicted\n", note, _table(titles, lines)])


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1] / "results"))
