"""A table of tuned configs for one operator on one kind of GPU, and its JSON text: one line an entry.

    {"format": 1, "operator": "ag_gemm", "gpu": "NVIDIA H200", "entries": [
      {"world_size": 4, …, "shape": [8192, 57344, 8192], "versions": {…}, "config": {…}, "ms": 2.71, …}
    ]}
"""

import json
import math
from dataclasses import asdict, dataclass, field

from tdkernels.autotune.problem import Problem

FORMAT = 1
_MAX_NAME = 128  # characters; a file name has 255 bytes, which must hold ".json.lock" too, and temporary names
_TIMES = ("ms", "plain_ms", "default_ms", "local_ms", "wire_ms")


class TableError(ValueError):
    """A text that is no table of ours."""


class LaterFormat(TableError):
    """A table of a later version of this library."""


@dataclass(frozen=True)
class Entry:
    """The best config known for a problem, and what was measured when it was found.

    Attributes:
        versions: of torch, triton and the operator's kernels (a hash of their source)
        config: the config as a dict
        ms: of a call with it; plain_ms: of the plain sequence; default_ms: of the default config; local_ms: of the
            product alone; wire_ms: of the bytes on the wire at the best rate of a link; None: not measured
        when: the day, as YYYY-MM-DD
        graph: whether all these are of calls in a CUDA graph, since one by one they took the host as long
    """

    problem: Problem
    versions: dict
    config: dict
    ms: float
    plain_ms: float | None = None
    default_ms: float | None = None
    local_ms: float | None = None
    wire_ms: float | None = None
    when: str = ""
    graph: bool = False
    identity: tuple = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "identity", (self.problem, tuple(sorted(self.versions.items()))))


def to_json(entries):
    """The text of a table; entries of one operator and GPU, sorted so that two tables compare line by line."""
    heads = {head(entry) for entry in entries}
    if len(heads) != 1:
        raise ValueError(f"a table is for one operator and GPU, not {sorted(heads)}")
    ((operator, gpu),) = heads
    first = {"format": FORMAT, "operator": operator, "gpu": gpu}
    lines = [json.dumps(_to_dict(entry)) for entry in sorted(entries, key=_order)]
    return json.dumps(first)[:-1] + ', "entries": [\n  ' + ",\n  ".join(lines) + "\n]}\n"


def head(entry):
    """Of which table an entry is: operator and GPU."""
    return entry.problem.operator, entry.problem.gpu


def from_json(text):
    """The entries of a table's text, and how many of it were no entries.

    Raises:
        TableError
    """
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TableError(f"not JSON: {error}") from None
    if not isinstance(table, dict) or "format" not in table:
        raise TableError("not a table of configs")
    version = table["format"]
    if version != FORMAT:
        later = type(version) is int and version > FORMAT
        raise (LaterFormat if later else TableError)(f"format {version!r}, this version reads {FORMAT}")
    names = table.get("operator"), table.get("gpu")
    if not all(isinstance(name, str) for name in names) or not isinstance(table.get("entries"), list):
        raise TableError("not a table of configs for an operator and a GPU")
    _check_names(*names)
    entries = [_from_dict(*names, item) for item in table["entries"]]
    return [entry for entry in entries if entry is not None], entries.count(None)


def _check_names(operator, gpu):
    """Reject names that cannot name a file of the cache, ``<slug of gpu>/<operator>.json``.

    Tables are passed from machine to machine, so a name in one must not lead out of the cache's folder. The operator
    becomes a file name as it is; of the GPU's name only letters, digits and hyphens remain (``slug``).

    Raises:
        TableError
    """
    if not operator.isidentifier() or len(operator) > _MAX_NAME:
        raise TableError(
            f"operator must be an identifier of at most {_MAX_NAME} characters, such as 'ag_gemm', not "
            f"{_shortened(operator)}"
        )
    if not gpu.isprintable() or not 0 < len(gpu) <= _MAX_NAME:
        raise TableError(f"gpu must be 1 to {_MAX_NAME} printable characters, not {_shortened(gpu)}")


def _shortened(name):
    return repr(name if len(name) <= _MAX_NAME else name[:_MAX_NAME] + "…")


def merge(*tables):
    """All entries; of those with the same problem and versions the one that comes last."""
    return list({entry.identity: entry for entries in tables for entry in entries}.values())


def newest(entries):
    """Of entries for the same problem the one of the latest day, of equal days the one that comes last."""
    return list({entry.problem: entry for entry in sorted(entries, key=lambda entry: entry.when)}.values())


def nearest(entries, problem):
    """The entry for the most similar problem, or None: what to run where nobody has tuned.

    Everything but the shape must be the same. The first size (M) is compared in buckets, up to each power of two, and
    may be one bucket off; each other size by its logarithm, and may be off by a factor of two. The smallest sum of the
    differences counts; of equals, the larger shape.
    """
    best, best_distance = None, math.inf
    for entry in sorted(entries, key=_order, reverse=True):
        distance = _distance(entry.problem, problem)
        if distance < best_distance:
            best, best_distance = entry, distance
    return best


def _distance(tuned, wanted):
    if _but_shape(tuned) != _but_shape(wanted) or len(tuned.shape) != len(wanted.shape):
        return math.inf
    if not all(tuned.shape) or not all(wanted.shape):
        return math.inf
    buckets = abs(_bucket(tuned.shape[0]) - _bucket(wanted.shape[0]))
    others = [abs(math.log2(a / b)) for a, b in zip(tuned.shape[1:], wanted.shape[1:], strict=True)]
    return math.inf if max([buckets, *others]) > 1 else buckets + sum(others)


def _bucket(size):
    """The exponent of the next power of two: 513 … 1024 is one bucket."""
    return (size - 1).bit_length()


def _but_shape(problem):
    return problem.operator, problem.gpu, problem.world_size, problem.local_world_size, problem.dtype, problem.layout


def _order(entry):
    return *_but_shape(entry.problem), entry.problem.shape, sorted(entry.versions.items())


def _to_dict(entry):
    problem = asdict(entry.problem)
    del problem["operator"], problem["gpu"]  # the table says them
    times = {name: _rounded(getattr(entry, name)) for name in _TIMES}
    graph = {"graph": True} if entry.graph else {}
    return {**problem, "versions": entry.versions, "config": entry.config, **times, "when": entry.when, **graph}


def _rounded(ms):
    return None if ms is None else float(f"{ms:.4g}")


def _from_dict(operator, gpu, item):
    """The entry, or None if it is none."""
    try:
        problem = Problem(
            operator, gpu, _whole(item["world_size"]), _whole(item["local_world_size"]), _text(item["dtype"]),
            _text(item["layout"]), tuple(_whole(size) for size in item["shape"]),
        )
        versions = {_text(name): _text(version) for name, version in item["versions"].items()}
        if not isinstance(item["config"], dict):
            return None
        times = {name: _time(item.get(name)) for name in _TIMES}
        if times["ms"] is None:
            return None
        when, graph = _text(item.get("when", "")), item.get("graph", False) is True
        return Entry(problem, versions, item["config"], **times, when=when, graph=graph)
    except (AttributeError, KeyError, OverflowError, TypeError):
        return None


def _whole(value):
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TypeError(value)
    return value


def _text(value):
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _time(value):
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise TypeError(value)
    return float(value)
