"""Report page of the dense operators with scaled fp8 operands, from the rows of ``bench.dense.scaled``."""

from bench.core.points import geometric_mean
from bench.report import cells
from bench.report.config_text import config_in_short
from bench.report.tables import newest

_INTRO = """## Scaled fp8

Operands in float8_e4m3fn with row-wise or block-wise scales (1 × 128 of x, 128 × 128 of the weight), bf16 outputs,
milliseconds. All methods of a line ran in turns. Every output of tdkernels was checked first, against the dequantized
operands in fp32.

- **scaling**: "row, fast" is with `use_fast_accum=True`, "row" without it. "block" has block-wise scales.
- **GEMM** is `torch._scaled_mm` with the same scales, without communication. If torch does not have them on the
  device, it is the row-wise GEMM with fast accumulation.
- **torch** is the collective, then `torch._scaled_mm`. **torch fused** is torch's fused operator of
  `torch.ops.symm_mem`; gemm_ar and block-wise scales have none. **bf16** is tdkernels with bf16 operands.
- **fastest** is the fastest config that was timed, **selected** the config of a call that is given none.
- **× floor** is the fastest config over the longer of GEMM and wire. The wire is computed at {floor:.0f} GB/s, or at
  the rate of the modelled link.
- Solo mode: no byte crossed a link, see [its page](solo.md).
"""
_TITLE = "### {where}, {mode}\n\n{when}, revision {git}; torch {torch}, triton {triton}; multicast {multicast}.\n"
_HEAD = [
    "operator", "M × N × K", "scaling", "GEMM", "wire", "torch", "torch fused", "bf16", "selected", "fastest",
    "× floor", "fastest config",
]
_SCALINGS = {"scaled": "row", "scaled fast": "row, fast", "scaled by block": "block"}
_OTHERS = {"gemm", "gemm, row-wise, fast", "torch", "torch fused", "bf16"}
_FLOOR_GBPS = 390.0  # of bench.dense.scaled


def text(rows):
    """Return the section, or "" if there are no rows."""
    places = newest(rows, _place_of, _problem_of)
    tables = [_table(place, runs) for place, runs in sorted(places.items(), key=str)]
    return "\n".join([_INTRO.format(floor=_FLOOR_GBPS), *tables]) if tables else ""


def _place_of(row):
    return row["gpu"], row["ranks"], row["solo"], row["link_gbps"], row["graph"]


def _problem_of(row):
    return row["op"], row["m"], row["n"], row["k"], row["layout"]


def _table(place, runs):
    gpu, ranks, solo, link, graph = place
    some = [next(iter(run.values())) for run in runs.values()]
    where = f"{gpu}, one of {ranks} ranks in solo mode" if solo else f"{ranks} x {gpu}"
    mode = "CUDA graphs" if graph else "eager mode"
    mode += f", data arrives at {link:.0f} GB/s (model)" if link else ", data arrives at once" if solo else ""
    title = _TITLE.format(
        where=where, mode=mode, when=max(row["date"][:10] for row in some),
        git=", ".join(sorted({cells.short_revision(row["git"]) for row in some})), torch=some[0]["torch"],
        triton=some[0]["triton"], multicast=some[0]["multicast"],
    )
    lines = [_HEAD, ["---"] * 3 + ["---:"] * 8 + ["---"]]
    factors = {}
    for (operator, m, n, k, layout), run in sorted(runs.items()):
        best = _fastest(run)
        if best is None:
            continue
        scaling = _SCALINGS[layout]
        factors.setdefault(f"{operator}, {scaling}", []).append(best["over_floor"])
        times = [cells.ms(run.get(name, {}).get("ms")) for name in ("torch", "torch fused", "bf16", "tdkernels")]
        lines.append([
            operator, f"{m} × {n} × {k}", scaling, cells.ms(best["gemm_ms"]), cells.ms(best["wire_ms"]), *times,
            cells.ms(best["ms"]), cells.share(best["over_floor"]), config_in_short(best["config"]) or "selected",
        ])
    means = [f"{name} {geometric_mean(values):.2f} ({len(values)})" for name, values in factors.items()]
    return f"{title}\n{cells.markdown(lines)}\nFastest over floor, geometric mean (shapes): {'; '.join(means)}.\n"


def _fastest(run):
    """Return the row of the fastest config of tdkernels, or None."""
    timed = [row for name, row in run.items() if name not in _OTHERS and row["ms"] is not None and row["over_floor"]]
    return min(timed, key=lambda row: row["ms"], default=None)
