"""Report section of the tuner's selections for collectives, MoE and attention."""

from bench.report.config_text import config_in_short
from bench.report.machines import section

_INTRO = """## Tuned configs: collectives, MoE, attention

Milliseconds of the best config, and its speedup over the unfused baseline and over the heuristic config, from the
tuner's final round; eager calls, bf16. Speedups with a † are over attention in fp32, which was the unfused baseline of
`flash_decode` before torch's flash attention. "torch compute" is torch's time for the compute of one rank without
communication, "wire" the transferred bytes over the best rate of a link. Configs marked "host" are not in the shipped
tables, because their times are bound by host launch time and do not depend on the config.
"""
_COLUMNS = (
    "operator", "sizes", "layout", "ms", "x unfused", "x heuristic", "torch compute", "wire", "shipped", "config",
)


def text(rows):
    """Return the section, or "" if there are no rows."""
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
    if row["op"] == "flash_decode" and not row.get("baseline"):
        ratios[0] += " †"
    what = row["op"], row["shape"], row["layout"]
    return *what, f"{best:.3f}", *ratios, *times, "yes" if row["shipped"] else "host", config_in_short(row["config"])


def _number(value):
    return "–" if value is None else f"{value:.3f}"


def _ratio(value, best):
    return "–" if value is None else f"{value / best:.2f}"
