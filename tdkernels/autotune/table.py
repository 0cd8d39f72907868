"""Table of tuned configs for one operator on one GPU model. Its JSON text has one line for each entry.

    {"format": 1, "operator": "ag_gemm", "gpu": "NVIDIA H200", "entries": [
      {"world_size": 4, …, "shape": [8192, 57344, 8192], "versions": {…}, "config": {…}, "ms": 2.71, …}
    ]}
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from tdkernels.autotune.problem import Problem

FORMAT = 1
_MAX_NAME = 128  # characters; a file name has 255 bytes, including ".json.lock" and the suffixes of temporary files
_FLAGS = "graph", "modelled"
_TIMES = ("ms", "plain_ms", "default_ms", "local_ms", "wire_ms")


class TableError(ValueError):
    """A text is not a table of tuned configs."""


class LaterFormat(TableError):
    """A table was written by a later version of this library."""


@dataclass(frozen=True)
class Entry:
    """The best known config for a problem, with the measurements of its tuning.

    Attributes:
        problem: The problem.
        versions: Versions of torch, triton and the operator's kernels (a hash of their source).
        config: The config as a dict.
        ms: Time of a call with the config in ms.
        plain_ms: Time of the torch baseline; None if not measured, as for the following times.
        default_ms: Time with the default config.
        local_ms: Time of the computation alone.
        wire_ms: Time of the bytes on the wire at the measured rate of a link.
        when: The date as YYYY-MM-DD.
        graph: Whether these times are of calls in a CUDA graph. The tuner uses one if launching the calls one by one
            takes the host about as long as the GPU.
        modelled: Whether the times are from solo mode with a modelled link, and not from a run on all ranks.
        baseline: ``Tunable.baseline`` when ``plain_ms`` was measured.
        identity: The problem, the versions and ``modelled``. A table has one entry for each identity.
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
    modelled: bool = False
    baseline: str = ""
    identity: tuple = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "identity", (self.problem, self.modelled, tuple(sorted(self.versions.items()))))


def to_json(entries: Iterable[Entry]) -> str:
    """Return the text of a table. The entries are sorted, so that two tables can be compared line by line.

    Raises:
        ValueError: If the entries are not for one operator and one GPU.
    """
    heads = {head(entry) for entry in entries}
    if len(heads) != 1:
        raise ValueError(f"a table is for one operator and GPU, not {sorted(heads)}")
    ((operator, gpu),) = heads
    first = {"format": FORMAT, "operator": operator, "gpu": gpu}
    lines = [json.dumps(_to_dict(entry)) for entry in sorted(entries, key=_order)]
    return json.dumps(first)[:-1] + ', "entries": [\n  ' + ",\n  ".join(lines) + "\n]}\n"


def head(entry: Entry) -> tuple[str, str]:
    """Return (operator, GPU) of an entry. It identifies the table to which the entry belongs."""
    return entry.problem.operator, entry.problem.gpu


def from_json(text: str) -> tuple[list[Entry], int]:
    """Parse the text of a table. Return its entries and the number of invalid entries, which are skipped.

    Raises:
        TableError: If the text is not a table, or one of a later version.
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
    """Reject names that are unsafe in the path of a cache file, ``<slug of gpu>/<operator>.json``.

    Tables are copied between machines, so a name in a table must not lead out of the cache's folder. The operator
    becomes a file name unchanged. ``slug`` reduces the GPU's name to letters, digits and hyphens.

    Raises:
        TableError: If a name is rejected.
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


def merge(*tables: Iterable[Entry]) -> list[Entry]:
    """Return the entries of all tables. If several have the same problem and versions, keep the last one."""
    return list({entry.identity: entry for entries in tables for entry in entries}.values())


def newest(entries: Iterable[Entry]) -> list[Entry]:
    """Return one measured entry and one modelled entry for each problem, as far as there are any.

    It is the one with the latest date, and for equal dates the last one.
    """
    by_date = sorted(entries, key=lambda entry: entry.when)
    return list({(entry.problem, entry.modelled): entry for entry in by_date}.values())


def nearest(entries: Sequence[Entry], problem: Problem) -> Entry | None:
    """Return the entry with the nearest shape, or None if no shape is near enough.

    All properties except the shape must be the same. The first size (M) is compared in buckets, one for each power of
    two, and may be one bucket off. The other sizes are compared by their logarithms, and may be off by a factor of two.
    The entry with the smallest sum of these differences is returned; for equal sums, the one with the larger shape.
    """
    best, best_distance = None, math.inf
    for entry in sorted(entries, key=_order, reverse=True):
        distance = _distance(entry.problem, problem)
        if distance < best_distance:
            best, best_distance = entry, distance
    return best


def _distance(tuned, wanted):
    if _without_shape(tuned) != _without_shape(wanted) or len(tuned.shape) != len(wanted.shape):
        return math.inf
    if not all(tuned.shape) or not all(wanted.shape):
        return math.inf
    buckets = abs(_bucket(tuned.shape[0]) - _bucket(wanted.shape[0]))
    others = [abs(math.log2(a / b)) for a, b in zip(tuned.shape[1:], wanted.shape[1:], strict=True)]
    return math.inf if max([buckets, *others]) > 1 else buckets + sum(others)


def _bucket(size):
    """Return the exponent of the next power of two; the sizes 513 … 1024 share a bucket."""
    return (size - 1).bit_length()


def _without_shape(problem):
    return problem.operator, problem.gpu, problem.world_size, problem.local_world_size, problem.dtype, problem.layout


def _order(entry):
    return *_without_shape(entry.problem), entry.problem.shape, sorted(entry.versions.items())


def _to_dict(entry):
    problem = asdict(entry.problem)
    del problem["operator"], problem["gpu"]  # the head of the table has them
    times = {name: _rounded(getattr(entry, name)) for name in _TIMES}
    others = {name: True for name in _FLAGS if getattr(entry, name)}
    if entry.baseline:
        others["baseline"] = entry.baseline
    return {**problem, "versions": entry.versions, "config": entry.config, **times, "when": entry.when, **others}


def _rounded(ms):
    return None if ms is None else float(f"{ms:.4g}")


def _from_dict(operator, gpu, item):
    """Return the Entry for an item of the JSON text, or None if the item is invalid."""
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
        flags = {name: item.get(name, False) is True for name in _FLAGS}
        texts = {name: _text(item.get(name, "")) for name in ("when", "baseline")}
        return Entry(problem, versions, item["config"], **times, **texts, **flags)
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
