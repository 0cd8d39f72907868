"""What was measured, read from the JSONL rows: one Point for each problem and place, from its newest run."""

import json
import math
from dataclasses import dataclass, field

from bench.dense.operators import Case
from bench.dense.shapes import Shape, layer_names

_OWN = ("gemm", "collective", "sequence")
_FUSED = "torch-fused"
# Rows of what has no products.
_SEQUENCES = ("ag_attention", "ulysses")
_APART = (
    "collective", "ep", "configs", "host", "chosen", "network", "group_gemm", "tp_moe", "ep_moe", "flash_decode",
    "tests", *_SEQUENCES,
)


@dataclass(frozen=True)
class Point:
    """One problem on one machine. Times in ms of the slowest rank; None is what was not, or could not be, measured.

    machine:    the folder of its rows, such as h200x4
    tuner:      whether this is the tuner's last round, which has no peers, and not a benchmark
    ours, default:  tdkernels with the best config that is known, and with its default config
    floor:      the larger of the GEMM alone and ``wire``, the bytes at the best rate of a link
    settings:   GPU, versions and the like, as in the rows
    """

    machine: str
    operator: str
    direction: str
    dtype: str
    layout: str
    graph: bool
    tuner: bool
    shape: Shape
    gemm: float | None
    collective: float | None
    sequence: float | None
    peers: dict
    ours: float | None
    default: float | None
    floor: float | None
    wire: float | None
    config: dict | None
    settings: dict = field(repr=False)

    @property
    def layer(self):
        return self.operator, self.shape.n, self.shape.k

    @property
    def speedup(self):
        """Over the sequence."""
        return _ratio(self.sequence, self.ours)

    @property
    def fused(self):
        """ms of torch's fused operator."""
        return self.peers.get(_FUSED)

    @property
    def over_fused(self):
        return _ratio(self.fused, self.ours)

    @property
    def best_peer(self):
        """(name, ms) or None."""
        return min(self.peers.items(), key=lambda item: item[1], default=None)

    @property
    def untuned(self):
        """Whether it is a run from before there was a tuner: ours was what is called default now."""
        return self.direction == "forward" and self.config is not None and self.default is None

    @property
    def efficiency(self):
        return _ratio(self.floor, self.ours)


def _ratio(above, below):
    return above / below if above and below else None


class BadRow(ValueError):
    """A line of a JSONL file that is no row."""


def read(folder):
    """The newest Point of each problem, place and source, in a fixed order; BadRow where a line is no row."""
    runs = {}
    for path in sorted(folder.glob("*/*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                row = json.loads(line)
                if row.get("what") in _APART:
                    continue  # see the functions below
                key = _key(path.parent.name, row)
                runs.setdefault(key, {}).setdefault(row["date"], {})[row.get("method")] = row
            except (ValueError, KeyError, TypeError, AttributeError) as err:
                raise BadRow(f"{path}, line {number}: {type(err).__name__}: {err}") from None
    names = layer_names()
    # Dates of one form compare as text do. Rows of one date and method: the last in the file counts.
    points = [_point(key, dates[max(dates)], names) for key, dates in runs.items()]
    return sorted(points, key=_order)


def read_collectives(folder):
    """The rows of the collectives alone, which have no products."""
    return _read_apart(folder, "collective")


def read_ep(folder):
    """The rows of expert parallelism."""
    return _read_apart(folder, "ep")


def read_layers(folder):
    """The rows of layers of experts, and of products by expert on one GPU."""
    return [row for what in ("tp_moe", "ep_moe", "group_gemm") for row in _read_apart(folder, what)]


def read_decode(folder):
    """The rows of attention to a cache that the ranks share."""
    return _read_apart(folder, "flash_decode")


def read_network(folder):
    """The rows of the words that take the network."""
    return _read_apart(folder, "network")


def read_host(folder):
    """The rows of what calls take the host."""
    return _read_apart(folder, "host")


def read_chosen(folder):
    """The rows of what the tuner found for what is no dense product."""
    return _read_apart(folder, "chosen")


def read_sequences(folder):
    """The rows of what is divided along the sequence."""
    return [row for what in _SEQUENCES for row in _read_apart(folder, what)]


def _read_apart(folder, what):
    lines = [line for path in sorted(folder.glob("*/*.jsonl")) for line in path.read_text().splitlines()]
    return [row for row in map(json.loads, lines) if row.get("what") == what]


def _key(machine, row):
    """What there is one Point for."""
    return (
        machine, row["op"], row.get("pass", "forward"), row["dtype"], row.get("layout", "nk"), row.get("graph", False),
        row.get("what") == "tune", row["m"], row["n"], row["k"],
    )


def _point(key, rows, names):
    *place, m, n, k = key
    shape = Shape(m, n, k, names.get((place[1], n, k), ""))
    return (_of_tuner if place[-1] else _of_benchmark)(place, shape, rows)


def _of_tuner(place, shape, rows):
    (row,) = rows.values()
    floor = max(row["gemm_ms"], row["wire_ms"] or 0.0)
    return Point(
        *place, shape, gemm=row["gemm_ms"], collective=None, sequence=row["sequence_ms"], peers={}, ours=row["ms"],
        default=row["default_ms"], floor=floor, wire=row["wire_ms"], config=row["config"], settings=row,
    )


def _of_benchmark(place, shape, rows):
    any_row = next(iter(rows.values()))
    ms = {method: row["ms"] for method, row in rows.items() if row["ms"]}
    case = Case(place[1], shape, any_row["num_gpus"], backward=place[2] == "backward")
    link = any_row["link_gbps"]
    return Point(
        *place, shape, gemm=ms.get("gemm"), collective=ms.get("collective"), sequence=ms.get("sequence"),
        peers={method: time for method, time in sorted(ms.items()) if _is_peer(method)}, ours=ms.get("tdkernels"),
        default=ms.get("tdkernels-default"), floor=any_row["floor_ms"],
        wire=case.wire_bytes / link / 1e6 if link else None,
        config=rows.get("tdkernels", {}).get("config"), settings=any_row,
    )


def _is_peer(method):
    """Not the floor, not ours, not a try of another config (c1 {"num_comm_sms": 32})."""
    return method not in _OWN and not method.startswith("tdkernels") and " {" not in method


def _order(point):
    shape, settings = point.shape, point.settings
    return (
        settings["gpu"], settings["num_gpus"], point.machine, point.operator, point.direction != "forward",
        point.dtype, point.layout, point.graph, point.tuner, shape.n * shape.k, shape.n, shape.m,
    )


# ---- what tables and plots ask of many points ----


def groups(points, *names):
    """{values of these attributes: points}, in the order of their first points."""
    found = {}
    for point in points:
        found.setdefault(tuple(getattr(point, name) for name in names), []).append(point)
    return found


def swept(points):
    """{layer: points by M} of the layers that were measured with at least four numbers of rows."""
    found = {layer: chosen for (layer,), chosen in groups(points, "layer").items()}
    return {layer: chosen for layer, chosen in found.items() if len({p.shape.m for p in chosen}) >= 4}


def at_full_size(points, rows):
    """The points with this number of rows, and those of layers that were not swept."""
    sweeps = swept(points)
    return [point for point in points if point.shape.m == rows or point.layer not in sweeps]


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))
