"""Tables of attention to a cache that the ranks share, a part of the report."""

from bench.attention import flash_decode_plots
from bench.attention.flash_decode import LOCAL, SEQUENCE
from bench.report import tables as run_tables
from bench.report.tables import factor, ms

TARGET_SHARE, LONG_KEYS = 0.85, 1 << 16  # of the memory's bandwidth, with at least so many keys of a rank
TARGET_US = 12.0  # of the communication
_BEST_LOCAL, _BEST_SEQUENCE = "best local", "best sequence"
_INTRO = f"""## Decoding

- One query token of each sequence attends to the keys and values that the ranks share. **Local** is flash_decode in a
  group of one rank alone, on its own keys; **ours** is that of all ranks, with the merge of what each has made.
- **Torch** is the fastest attention of torch, or of another library that could be imported, on a rank's own keys.
  **Sequence** is the fastest of these followed by an all-gather (NCCL) and the merge in torch; which ones are named.
- **Share** is that of the memory's bandwidth: bytes of a rank's keys and values over the time, over the rate of a large
  copy (read and written) in the same run; from {LONG_KEYS // 1024}K keys of a rank on marked ▼ below {TARGET_SHARE}.
- **Added** is the communication: by how much ours takes longer than local, in microseconds; ▼ above {TARGET_US:.0f}.
- Caches took turns until more than any cache of the GPU holds had gone by. All sequences are as long as they can be.
"""


def text(rows, link):
    """The section of all rows, which are those of ``flash_decode.rows``; nothing if there are none.

    Args:     link: what shows a plots.Figure in the text
    """
    found = newest_runs(rows)
    tables = [_table([found[place][keys] for keys in sorted(found[place])]) for place in sorted(found)]
    pictures = [link(figure) for figure in flash_decode_plots.figures(found)]
    return "\n".join([_INTRO, *pictures, *tables]) if tables else ""


def newest_runs(rows):
    """{(GPU, ranks, whether in a graph, (Hq, Hkv, D), batch): {keys: {method: row}}}, of each the newest run."""
    attending = (row for row in rows if row["method"] != "copy")  # whose rate every row has
    return run_tables.newest(attending, _place, lambda row: row["keys"])


def _place(row):
    heads = row["heads"], row["kv_heads"], row["dim"]
    return row["gpu"], row["num_gpus"], row["graph"], heads, row["batch"]


def _table(runs):
    """Of runs {method: row}, by keys."""
    row = next(iter(runs[0].values()))
    heads = f"{row['heads']} / {row['kv_heads']} heads of {row['dim']}"
    title = f"flash_decode, {heads}, batch {row['batch']}{', in CUDA graphs' * row['graph']}"
    runs = [run | _best(run, LOCAL, _BEST_LOCAL) | _best(run, SEQUENCE, _BEST_SEQUENCE) for run in runs]
    methods = {"torch": _BEST_LOCAL, "local": "local", "sequence": _BEST_SEQUENCE, "ours": "tdkernels"}
    more = {"share, local": lambda run: _share(run, "local"), "x torch": lambda run: _speedup(run, "local")}
    if row["num_gpus"] > 1:
        more |= {
            "share, ours": lambda run: _share(run, "tdkernels"), "added µs": _added,
            "x sequence": lambda run: _speedup(run, "tdkernels"),
        }
    more |= {"torch is": lambda run: _which(run, _BEST_LOCAL, LOCAL)}
    if row["num_gpus"] > 1:
        more |= {"sequence of": lambda run: _which(run, _BEST_SEQUENCE, SEQUENCE)}
    rates = sorted(round(next(iter(run.values()))["copy_gbps"]) for run in runs)
    what = f"By the keys of a rank; a copy reaches {rates[0]} to {rates[-1]} GB/s"
    first = {"keys": lambda run: in_words(next(iter(run.values()))["keys"])}
    return run_tables.table(title, what, runs, first, methods, more)


def in_words(keys):
    """65536 is 64K."""
    return str(keys) if keys % 1024 else f"{keys // 1024}K"


def _best(run, prefix, name):
    """{name: the row of the fastest method with this beginning}, empty if there is none."""
    rows = [row for method, row in run.items() if method.startswith(prefix) and row["ms"]]
    return {name: min(rows, key=lambda row: row["ms"])} if rows else {}


def _which(run, best, prefix):
    return run[best]["method"].removeprefix(prefix) if best in run else "–"


def _share(run, method):
    if not ms(run, method):
        return "–"
    row = run[method]
    missed = row["keys"] >= LONG_KEYS and round(row["efficiency"], 2) < TARGET_SHARE
    return f"{row['efficiency']:.2f}{' ▼' * missed}"


def _added(run):
    value = run.get("tdkernels", {}).get("added_us")
    return "–" if value is None else f"{value:.1f}{' ▼' * (round(value, 1) > TARGET_US)}"


def _speedup(run, method):
    return factor(run.get(method, {}).get("speedup"))
