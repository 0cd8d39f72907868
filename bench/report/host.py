"""Report section of host launch times of small calls."""

from bench.report.machines import section

_INTRO = """## Host launch time

Microseconds per call for small calls issued back to back: until the host has launched the call / until the device has
finished it. **unfused** is torch + NCCL written by hand, **ours, method "torch"** is a tdkernels call that runs torch +
NCCL, and **ours** runs the kernels with heuristic configs. GEMMs have M = 64, K = 4096 and N = 1536 per rank,
collectives 1 KiB, caches 1024 keys. Rows are written by `python -m bench.dense.host`.
"""
_METHODS = ("sequence", "ours by torch", "ours")  # as stored in rows
_TITLES = ("unfused", 'ours, method "torch"', "ours")


def text(rows):
    """Return the section, or "" if there are no rows."""
    return section(_INTRO, rows, _table)


def _table(rows):
    times = {(row["op"], row["method"]): f"{row['host_us']:.0f} / {row['call_us']:.0f}" for row in rows}
    lines = [
        f"{rows[0]['num_gpus']} x {rows[0]['gpu']}, {rows[0]['date'][:10]}, revision {rows[0]['git'][:7]}.",
        "",
        f"| operator | {' | '.join(_TITLES)} |",
        "|---|" + "---:|" * len(_METHODS),
    ]
    for operator in dict.fromkeys(row["op"] for row in rows):
        lines.append(f"| {operator} | {' | '.join(times.get((operator, method), '–') for method in _METHODS)} |")
    return "\n".join(lines) + "\n"
