"""Report section of the kernels of tp_moe in solo mode: one GPU acted as one of W ranks."""

from bench.core.points import geometric_mean
from bench.report.cells import markdown, ms, share, short_revision
from bench.report.tables import newest

_INTRO = """## The kernels of tp_moe in solo mode

**No byte crossed a link.** One GPU acted as one of W ranks, see [solo mode](solo.md). Each kernel was called alone, in
CUDA graphs, with a routing that was computed before. The floor is the longer of the fastest grouped GEMM alone (torch
or `group_gemm`) and the bytes on the wire at the rate of the modelled link. Calls follow each other without pauses, so
the power of one method changes the clock rate of the next one.
"""
_TITLE = "### {gpu}, one of {ranks} ranks, {link}\n\n{when}, revision {git}; torch {torch}, triton {triton}.\n"
_KINDS = ("portable", "specialized")
_HEAD = ["operator", "tokens x I x H x E x k", "grouped GEMM alone", "wire", *_KINDS, "× floor"]


def text(rows):
    """Return the section, or "" if there are no rows."""
    places = newest(
        rows, lambda row: (row["gpu"], row["ranks"], row["link_gbps"]), lambda row: (row["pass"], row["shape"])
    )
    tables = [_table(place, runs) for place, runs in sorted(places.items(), key=lambda item: str(item[0]))]
    return "\n".join([_INTRO, *tables]) if tables else ""


def _table(place, runs):
    gpu, ranks, link = place
    some = [next(iter(run.values())) for run in runs.values()]
    title = _TITLE.format(
        gpu=gpu, ranks=ranks, when=max(row["date"][:10] for row in some),
        link="data arrives at once" if link is None else f"data arrives at {link:.0f} GB/s (model)",
        git=", ".join(sorted({short_revision(row["git"]) for row in some})), torch=some[0]["torch"],
        triton=some[0]["triton"],
    )
    lines = [_HEAD, ["---"] * 2 + ["---:"] * 5]
    factors = {}
    for (kernel, shape), run in sorted(runs.items()):
        fastest = {kind: _fastest(run, kind) for kind in _KINDS}
        best = min((row for row in fastest.values() if row), key=lambda row: row["ms"], default=None)
        row = next(iter(run.values()))
        if best is not None:
            factors.setdefault(kernel, []).append(best["over_floor"])
        lines.append([
            f"moe_{kernel}", shape, ms(row["gemm_ms"]), ms(row["wire_ms"]),
            *[ms(found and found["ms"]) for found in fastest.values()], share(best and best["over_floor"]),
        ])
    means = [f"moe_{kernel} {geometric_mean(each):.2f} ({len(each)} shapes)" for kernel, each in factors.items()]
    return f"{title}\n{markdown(lines)}\nFastest over floor, geometric mean: {', '.join(means)}.\n"


def _fastest(run, kind):
    """Return the row of the fastest number of stages of a kind of kernel, or None."""
    timed = [row for name, row in run.items() if name.split()[0] == kind and row["ms"] is not None]
    return min(timed, key=lambda row: row["ms"], default=None)
