"""What the tuner found for operators that are no dense products, a part of the report."""

from bench.report.config_text import config_in_short
from bench.report.machines import section

_INTRO = """## What the tuner found: collectives, experts, attention

Milliseconds of the best config, and how many times as long torch's sequence and the default config took; the tuner's
last round, calls without a CUDA graph, bf16. Of `flash_decode` torch's sequence is the specification, which nobody
would run. "torch alone" is what torch takes for a rank's own part, without communication; "wire" the bytes that cross
at the best rate of a link. A time that is hardly more than the host's for a call says nothing of configs: what is
marked "host" did not go into the tables that are shipped.
"""
_COLUMNS = ("operator", "sizes", "layout", "ms", "x torch", "x default", "torch alone", "wire", "shipped", "config")


def text(rows):
    """The section of all rows; nothing if there are none."""
    return section(_INTRO, rows, _table)


def _table(rows):
    lines = [
        f"{rows[0]['num_gpus']} x {rows[0]['gpu']}, {rows[0]['date'][:10]}, revision {rows[0]['git'][:7]}.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|---|---|---|" + "---:|" * 5 + "---|---|",
    ]
    return "\n".join(lines + [f"| {' | '.join(_cells(row))} |" for row in rows]) + "\n"


def _cells(row):
    best = row["ms"]
    times = [_number(row[name]) for name in ("gemm_ms", "wire_ms")]
    ratios = [_ratio(row[name], best) for name in ("sequence_ms", "default_ms")]
    what = row["op"], row["shape"], row["layout"]
    return *what, f"{best:.3f}", *ratios, *times, "yes" if row["shipped"] else "host", config_in_short(row["config"])


def _number(value):
    return "–" if value is None else f"{value:.3f}"


def _ratio(value, best):
    return "–" if value is None else f"{value / best:.2f}"
