"""Read the JSONL rows of measurements. A Point is the newest run of one dense problem on one machine."""

import json
import math
from dataclasses import dataclass, field

from bench.dense.operators import Case
from bench.dense.shapes import Shape, layer_names

_BASELINES = ("gemm", "collective", "sequence")
_FUSED = "torch-fused"
_SEQUENCE_PARALLEL = ("ag_attention", "ulysses")
# Values of "what" in rows that are not measurements of dense operators.
_OTHER_KINDS = (
    "collective", "ep", "configs", "host", "chosen", "network", "group_gemm", "tp_moe", "ep_moe", "flash_decode",
    "tests", "solo", "solo_moe", "small_m", "torch_operators", "model", "scaled", "wire", "norm", "gemm_ar_norm",
    "latent", "invariance", "group_gemm_scaled", "quantize", "float8_linear", "fp8_moe", *_SEQUENCE_PARALLEL,
)


@dataclass(frozen=True)
class Point:
    """One problem on one machine. Times are ms of the slowest rank; None if not measured.

    machine:        the folder of its rows, such as h200x4
    tuner:          whether the times are from the tuner's final round, which has no peers, and not from a benchmark
    sequence:       the unfused baseline, NCCL and cuBLAS without overlap
    ours, default:  tdkernels with the best known config, and with the heuristic config
    floor:          the larger of the GEMM alone and ``wire``, the bytes at the best rate of a link
    settings:       a row of the run, with GPU, versions and revision
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
        """Speed-up of tdkernels over the unfused baseline."""
        return _ratio(self.sequence, self.ours)

    @property
    def fused(self):
        """Time of torch's fused operator in ms."""
        return self.peers.get(_FUSED)

    @property
    def over_fused(self):
        return _ratio(self.fused, self.ours)

    @property
    def best_peer(self):
        """(name, ms) of the fastest other library, or None."""
        return min(self.peers.items(), key=lambda item: item[1], default=None)

    @property
    def untuned(self):
        """Whether the run predates the tuner, so that ``ours`` used the heuristic config."""
        return self.direction == "forward" and self.config is not None and self.default is None

    @property
    def efficiency(self):
        return _ratio(self.floor, self.ours)


def _ratio(above, below):
    return above / below if above and below else None


class BadRow(ValueError):
    """A line of a JSONL file is not a valid row."""


def read(folder):
    """Return the newest Point of each problem, machine and source, in a fixed order.

    Raises:
        BadRow: if a line is not a valid row.
    """
    runs = {}
    for path in sorted(folder.glob("*/*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                row = json.loads(line)
                if row.get("what") in _OTHER_KINDS:
                    continue  # read by the functions below
                key = _key(path.parent.name, row)
                runs.setdefault(key, {}).setdefault(row["date"], {})[row.get("method")] = row
            except (ValueError, KeyError, TypeError, AttributeError) as err:
                raise BadRow(f"{path}, line {number}: {type(err).__name__}: {err}") from None
    names = layer_names()
    # Dates have one format and compare as strings. If two rows have the same date and method, the last one counts.
    points = [_point(key, dates[max(dates)], names) for key, dates in runs.items()]
    return sorted(points, key=_order)


def read_collectives(folder):
    """Return the rows of collectives."""
    return _read_kind(folder, "collective")


def read_norms(folder):
    """Return the rows of all-reduce with residual addition and norm."""
    return _read_kind(folder, "norm")


def read_gemm_ar_norms(folder):
    """Return the rows of GEMM and all-reduce with residual addition and norm."""
    return _read_kind(folder, "gemm_ar_norm")


def read_ep(folder):
    """Return the rows of expert-parallel dispatch and combine."""
    return _read_kind(folder, "ep")


def read_layers(folder):
    """Return the rows of MoE layers and of grouped GEMMs."""
    return [row for what in ("tp_moe", "ep_moe", "group_gemm") for row in _read_kind(folder, what)]


def read_scaled_experts(folder):
    """Return the rows of grouped GEMMs with scaled fp8 operands."""
    return _read_kind(folder, "group_gemm_scaled")


def read_fp8_layers(folder):
    """Return the rows of layers of experts with weights in fp8."""
    return _read_kind(folder, "fp8_moe")


def read_quantize(folder):
    """Return the rows of quantization to fp8 and of linear layers in fp8."""
    return [row for what in ("quantize", "float8_linear") for row in _read_kind(folder, what)]


def read_decode(folder):
    """Return the rows of flash_decode."""
    return _read_kind(folder, "flash_decode")


def is_plain_decode(row):
    """Return whether a row of flash_decode has one query token and a dense cache. Older rows have no such fields."""
    return row.get("queries", 1) == 1 and not row.get("page", 0)


def read_latent(folder):
    """Return the rows of flash_decode with latent caches."""
    return _read_kind(folder, "latent")


def read_network(folder):
    """Return the rows of the RDMA primitives."""
    return _read_kind(folder, "network")


def read_host(folder):
    """Return the rows of host launch times."""
    return _read_kind(folder, "host")


def read_torch_operators(folder):
    """Return the rows of torch's fused operators."""
    return _read_kind(folder, "torch_operators")


def read_chosen(folder):
    """Return the rows of the tuner's selections for operators other than the dense ones."""
    return _read_kind(folder, "chosen")


def read_tests(folder):
    """Read the rows of test runs on GPUs."""
    return _read_kind(folder, "tests")


def read_dense_graphs(folder):
    """Return the benchmark rows of dense operators in CUDA graphs, one per method. ``read`` makes Points of them."""
    return [row for row in _read_kind(folder, None) if row.get("graph") and row.get("layout", "nk") == "nk"]


def read_solo(folder, graph=True):
    """Return the rows of solo mode, of calls in CUDA graphs or of eager calls."""
    return [row for row in _read_kind(folder, "solo") if row.get("graph", True) == graph]


def read_solo_moe(folder):
    """Return the rows of the kernels of tp_moe in solo mode."""
    return _read_kind(folder, "solo_moe")


def read_scaled(folder):
    """Return the rows of dense operators with scaled fp8 operands."""
    return _read_kind(folder, "scaled")


def read_models(folder):
    """Return the rows of whole models in frameworks."""
    return _read_kind(folder, "model")


def read_invariance(folder):
    """Return the rows of calls inside and outside the batch-invariant mode."""
    return _read_kind(folder, "invariance")


def read_sequences(folder):
    """Return the rows of sequence-parallel operators."""
    return [row for what in _SEQUENCE_PARALLEL for row in _read_kind(folder, what)]


def _read_kind(folder, what):
    lines = [line for path in sorted(folder.glob("*/*.jsonl")) for line in path.read_text().splitlines()]
    if what is not None:
        lines = [line for line in lines if f'"{what}"' in line]  # before parsing, which takes most of the time
    return [row for row in map(json.loads, lines) if row.get("what") == what]


def _key(machine, row):
    """Return the key that identifies a Point."""
    return (
        machine, row["op"], row.get("pass", "forward"), row["dtype"], row.get("layout", "nk"), row.get("graph", False),
        row.get("what") == "tune", row["m"], row["n"], row["k"],
    )


def _point(key, rows, names):
    *place, m, n, k = key
    shape = Shape(m, n, k, names.get((place[1], n, k), ""))
    return (_tuner_point if place[-1] else _benchmark_point)(place, shape, rows)


def _tuner_point(place, shape, rows):
    (row,) = rows.values()
    floor = max(row["gemm_ms"], row["wire_ms"] or 0.0)
    return Point(
        *place, shape, gemm=row["gemm_ms"], collective=None, sequence=row["sequence_ms"], peers={}, ours=row["ms"],
        default=row["default_ms"], floor=floor, wire=row["wire_ms"], config=row["config"], settings=row,
    )


def _benchmark_point(place, shape, rows):
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
    """Whether a method is another library: no baseline, not tdkernels, no config override (c1 {"num_comm_sms": 32})."""
    return method not in _BASELINES and not method.startswith("tdkernels") and " {" not in method


def _order(point):
    shape, settings = point.shape, point.settings
    return (
        settings["gpu"], settings["num_gpus"], point.machine, point.operator, point.direction != "forward",
        point.dtype, point.layout, point.graph, point.tuner, shape.n * shape.k, shape.n, shape.m,
    )


# ---- selections of points for tables and plots ----


def groups(points, *names):
    """Group points by attributes. Return {values of the attributes: points}, ordered by first occurrence."""
    found = {}
    for point in points:
        found.setdefault(tuple(getattr(point, name) for name in names), []).append(point)
    return found


def swept(points):
    """Return {layer: points} of the layers that were measured for at least four values of M."""
    found = {layer: chosen for (layer,), chosen in groups(points, "layer").items()}
    return {layer: chosen for layer, chosen in found.items() if len({p.shape.m for p in chosen}) >= 4}


def at_full_size(points, rows):
    """Return the points with M = ``rows``, and all points of layers without a sweep of M."""
    sweeps = swept(points)
    return [point for point in points if point.shape.m == rows or point.layer not in sweeps]


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))
