"""Report section of flash_decode with latent caches."""

from bench.attention.latent_methods import FUSED, SELECTED, SPLIT, WIDE
from bench.report import tables
from bench.report.cells import factor, share, us

_INTRO = """## Decoding with latent caches (MLA)

Microseconds of `flash_decode` in bf16 with caches of 576 columns, whose first 512 are the values. All query heads read
one head of the cache. "fp8" caches have the first 512 columns in e4m3 with one scale, the others in bf16.

- **keys** are those of one rank. **tokens**: query tokens per sequence.
- **floor**: the larger of a copy that reads and writes together as many bytes as the cache has, and one cuBLAS GEMM
  with as many floating-point operations. The GEMM has dimensions of at least 2048; for less work its time is scaled by
  the number of operations. Both ran in the same run, on one rank only.
- **split** and **fused** are methods of `FlashDecodeConfig`, **64 rows** is "fused" with tiles of 64 query rows, and
  **selected** is a call without a config. **x fused** divides the time of "fused" by that of "split".
- **TFLOP/s**, **GB/s** (bytes of the cache) and **share of floor** (floor / time) are those of "split".

Calls cycled through caches that exceed the GPU's caches. Rows are written by `python -m bench.attention.latent`.
"""
_METHODS = {"split": SPLIT, "fused": FUSED, "fused, 64 rows": WIDE, "selected": SELECTED}


def text(rows):
    """Return the section for rows of ``bench.attention.latent.rows``, or "" if there are none."""
    problem = lambda row: (row["heads"], row["keys"], row["batch"], row["queries"])  # noqa: E731
    return tables.sections(_INTRO, rows, _place, problem, _table)


def _place(row):
    return row["gpu"], row["num_gpus"], row["page"], row.get("fp8", False), row["graph"]


def _table(place, runs):
    """Return the table of runs {(heads, keys, batch, queries): {method: row}} on one machine."""
    gpu, ranks, page, fp8, graph = place
    cache = (f"pages of {page} keys" if page else "dense caches") + ", fp8" * fp8
    title = f"flash_decode, latent, {cache}{', in CUDA graphs' * graph}, {ranks} x {gpu}"
    # On several ranks there is no floor and no method with 64 rows.
    measured = {method for run in runs.values() for method in run if tables.ms(run, method)}
    methods = {name: method for name, method in _METHODS.items() if method in measured}
    floors = {"floor": lambda run: us(_floor(run))} if any(_floor(run) for run in runs.values()) else {}
    shares = {"share of floor": lambda run: share(_of_split(run, "share"))} if floors else {}
    columns = {
        **floors, **{name: lambda run, method=method: us(tables.ms(run, method)) for name, method in methods.items()},
        "x fused": lambda run: factor(_over_fused(run)),
        "TFLOP/s": lambda run: _whole(_of_split(run, "tflops")), "GB/s": lambda run: _whole(_of_split(run, "gbps")),
        **shares,
    }
    lines = [["sequences x heads x keys", "tokens", *columns], ["---"] + ["---:"] * (len(columns) + 1)]
    for heads, keys, batch, queries in sorted(runs):
        run = runs[heads, keys, batch, queries]
        lines.append([f"{batch}x{heads}x{keys}", str(queries), *(cell(run) for cell in columns.values())])
    return tables.captioned(title, runs, "triton", lines)


def _floor(run):
    return next(iter(run.values()))["floor_ms"]


def _of_split(run, field):
    return run.get(SPLIT, {}).get(field)


def _over_fused(run):
    """Return the time of "fused" over that of "split", or None."""
    split, fused = tables.ms(run, SPLIT), tables.ms(run, FUSED)
    return fused / split if split and fused else None



def _whole(value):
    return "–" if value is None else f"{value:.0f}"
