"""What calls of few rows take the host, a part of the report."""

from bench.report.machines import section

_INTRO = """## What calls take the host

Microseconds of small calls made one after the other: until the host has launched a call / until the device has done it.
By torch's sequence as a user would write it, by our call where its config says torch, and by our kernels in their
default configs; products of 64 rows, 4096 columns and 1536 outputs a rank, collectives of 1 KiB, a cache of 1024 keys.
Rows are made by `python -m bench.dense.host`.
"""
_METHODS = ("sequence", "ours by torch", "ours")


def text(rows):
    """The section of all rows; nothing if there are none."""
    return section(_INTRO, rows, _table)


def _table(rows):
    times = {(row["op"], row["method"]): f"{row['host_us']:.0f} / {row['call_us']:.0f}" for row in rows}
    lines = [
        f"{rows[0]['num_gpus']} x {rows[0]['gpu']}, {rows[0]['date'][:10]}, revision {rows[0]['git'][:7]}.",
        "",
        f"| call | {' | '.join(_METHODS)} |",
        "|---|" + "---:|" * len(_METHODS),
    ]
    for operator in dict.fromkeys(row["op"] for row in rows):
        lines.append(f"| {operator} | {' | '.join(times.get((operator, method), '–') for method in _METHODS)} |")
    return "\n".join(lines) + "\n"
