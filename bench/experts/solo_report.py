"""Report section of the kernels of tp_moe in solo mode: one GPU acted as one of W ranks."""

from bench.report.cells import ms, share
from bench.report.solo import section

_INTRO = """## The kernels of tp_moe in solo mode

**No byte crossed a link.** One GPU acted as one of W ranks, see [solo mode](solo.md). Each kernel was called alone, in
CUDA graphs, with a routing that was computed before. The floor is the longer of the fastest grouped GEMM alone (torch
or `group_gemm`) and the bytes on the wire at the rate of the modelled link. Calls follow each other without pauses, so
the power of one method changes the clock rate of the next one. The gradient of moe_gemm_rs is its GEMM with the
gathered dy, with the copy of dy to the rows of its tokens, which the weight gradient needs.
"""
_NAMES = {"ag_gemm": "moe_ag_gemm", "gemm_rs": "moe_gemm_rs", "gradient": "gradient of moe_gemm_rs"}
_KINDS = ("portable", "specialized")
_HEAD = ["operator", "tokens x I x H x E x k", "grouped GEMM alone", "wire", *_KINDS, "× floor"]


def text(rows):
    """Return the section, or "" if there are no rows."""
    return section(_INTRO, rows, lambda row: (row["pass"], row["shape"]), _table)


def _table(runs):
    lines = [_HEAD, ["---"] * 2 + ["---:"] * 5]
    factors = {}
    for (kernel, shape), run in sorted(runs.items()):
        fastest = {kind: _fastest(run, kind) for kind in _KINDS}
        best = min((row for row in fastest.values() if row), key=lambda row: row["ms"], default=None)
        row = next(iter(run.values()))
        if best is not None:
            factors.setdefault(_NAMES[kernel], []).append(best["over_floor"])
        lines.append([
            _NAMES[kernel], shape, ms(row["gemm_ms"]), ms(row["wire_ms"]),
            *[ms(found and found["ms"]) for found in fastest.values()], share(best and best["over_floor"]),
        ])
    return lines, factors


def _fastest(run, kind):
    """Return the row of the fastest number of stages of a kind of kernel, or None."""
    timed = [row for name, row in run.items() if name.split()[0] == kind and row["ms"] is not None]
    return min(timed, key=lambda row: row["ms"], default=None)
