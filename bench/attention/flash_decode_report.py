"""Report sections of flash_decode: on several ranks, and on one GPU with more kinds of shapes."""

from bench.attention import flash_decode_plots
from bench.attention.flash_decode import LOCAL, ONE_GPU, SEQUENCE
from bench.core.points import is_plain_decode
from bench.report import tables as run_tables
from bench.report.cells import factor, share, us
from bench.report.tables import ms

TARGET_SHARE, LONG_KEYS = 0.85, 1 << 16  # target fraction of the memory bandwidth from this many keys per rank on
TARGET_US = 12.0  # target for the communication
_BEST_LOCAL, _BEST_SEQUENCE = "best local", "best sequence"
_INTRO = f"""## Decoding

Attention of one query token per sequence over a KV cache that is sharded across the ranks along the sequence.

- **local**: flash_decode on one rank, on its own keys. **ours**: flash_decode on all ranks, including the merge of
  their partial results.
- **torch**: the fastest attention kernel of torch or of another installed library, on the keys of one rank.
  **unfused**: the fastest kernel followed by NCCL's all-gather and a merge in torch. The last columns name these
  kernels; `method-torch` is flash_decode with method "torch", which reads the lengths on the device as ours does.
- **bandwidth**: the bytes of a rank's keys and values over the time, as a fraction of the rate of a large copy (bytes
  read and written) in the same run. From {LONG_KEYS // 1024}K keys per rank on, values below {TARGET_SHARE} are marked
  ▼.
- **comm. µs**: the cost of communication, ours minus local; values above {TARGET_US:.0f} are marked ▼.
- Calls cycled through KV caches that exceed the GPU's caches. All sequences of a batch have full length.
"""
_INTRO_ONE_GPU = """## Decoding on one GPU

Microseconds of `flash_decode` in bf16 on one GPU.

- **tokens**: query tokens per sequence, its last positions. **page**: keys per page of a paged cache; – is a dense
  cache.
- **copy**: the time that a device-to-device copy takes to read and write together as many bytes as the keys and values
  have, at the rate of a large copy in the same run. **bandwidth** is copy over flash_decode.
- **torch**: the fastest attention kernel of torch or of another installed library, named in **torch kernel**.
  `method-torch` is flash_decode with method "torch". **x torch** is torch over flash_decode.
- **method**: the method of the config that flash_decode selected. `c1 {…}`: flash_decode with these changes of its
  heuristic config.

Calls cycled through KV caches that exceed the GPU's caches. All sequences of a batch have full length.
"""


def text(rows, link):
    """Return the sections for rows of ``flash_decode.rows``, or "" if there are none.

    Rows with several query tokens or pages are shown for one GPU only.

    Args:
        link: function that returns the Markdown of a plots.Figure.
    """
    found = newest_runs(rows)
    tables = [_table([found[place][keys] for keys in sorted(found[place])]) for place in sorted(found)]
    pictures = [link(figure) for figure in flash_decode_plots.figures(found)]
    parts = [_INTRO, *pictures, *tables] if tables else []
    found = _runs_on_one_gpu(rows)
    tables = [_table_of_one_gpu(place, found[place]) for place in sorted(found)]
    return "\n".join([*parts, *([_INTRO_ONE_GPU, *tables] if tables else [])])


def newest_runs(rows):
    """Return {(GPU, ranks, in a graph, (Hq, Hkv, D), batch): {keys: {method: row}}} of the newest runs.

    Rows of shapes for one GPU, of several query tokens and of pages are left out.
    """
    found = (row for row in _no_copies(rows) if is_plain_decode(row) and not _is_for_one_gpu(row))
    return run_tables.newest(found, _place, lambda row: row["keys"])


def _no_copies(rows):
    return [row for row in rows if row["method"] != "copy"]  # each row has the copy's rate


def _is_for_one_gpu(row):
    return row["name"].startswith(ONE_GPU)


def _place(row):
    heads = row["heads"], row["kv_heads"], row["dim"]
    return row["gpu"], row["num_gpus"], row["graph"], heads, row["batch"]


def _table(runs):
    """Return the table of runs {method: row}, one line per number of keys."""
    row = next(iter(runs[0].values()))
    heads = f"{row['heads']} / {row['kv_heads']} heads of {row['dim']}"
    title = f"flash_decode, {heads}, batch {row['batch']}{', in CUDA graphs' * row['graph']}"
    runs = [run | _best(run, LOCAL, _BEST_LOCAL) | _best(run, SEQUENCE, _BEST_SEQUENCE) for run in runs]
    methods = {"torch": _BEST_LOCAL, "local": "local", "unfused": _BEST_SEQUENCE, "ours": "tdkernels"}
    more = {"bandwidth, local": lambda run: _share(run, "local"), "x torch": lambda run: _speedup(run, "local")}
    if row["num_gpus"] > 1:
        more |= {
            "bandwidth, ours": lambda run: _share(run, "tdkernels"), "comm. µs": _added,
            "x unfused": lambda run: _speedup(run, "tdkernels"),
        }
    more |= {"torch kernel": lambda run: _which(run, _BEST_LOCAL, LOCAL)}
    if row["num_gpus"] > 1:
        more |= {"unfused kernel": lambda run: _which(run, _BEST_SEQUENCE, SEQUENCE)}
    rates = sorted(round(next(iter(run.values()))["copy_gbps"]) for run in runs)
    what = f"Milliseconds by keys per rank; copy rate {rates[0]} to {rates[-1]} GB/s"
    first = {"keys": lambda run: format_count(next(iter(run.values()))["keys"])}
    return run_tables.table(title, what, runs, first, methods, more)


def format_count(count):
    """Return a number as text: 64K for 65536."""
    return str(count) if count % 1024 else f"{count // 1024}K"


def _best(run, prefix, name):
    """Return {name: row of the fastest method with this prefix}, empty if there is none."""
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


# ---- on one GPU ----


def _runs_on_one_gpu(rows):
    """Return {(GPU, in a graph): {sizes: {method: row}}} of the newest runs that ``newest_runs`` leaves out."""
    found = (
        row for row in _no_copies(rows)
        if row["num_gpus"] == 1 and (_is_for_one_gpu(row) or not is_plain_decode(row))
    )
    place = lambda row: (row["gpu"], row["graph"])  # noqa: E731
    return run_tables.newest(found, place, _sizes, with_overrides=True)


def _sizes(row):
    """Return the sizes of a problem, which order the lines of the table."""
    kind = row.get("page", 0), row.get("queries", 1)
    return *kind, row["heads"], row["kv_heads"], row["dim"], row["batch"], row["keys"]


def _table_of_one_gpu(place, runs):
    """Return the table of runs {sizes: {method: row}}, one line each."""
    gpu, graph = place
    overrides = dict.fromkeys(
        method for sizes in sorted(runs) for method in runs[sizes] if method.startswith("local ") and "{" in method
    )
    columns = {
        "copy": lambda run: us(next(iter(run.values()))["floor_ms"]),
        "torch": lambda run: us(ms(run, _BEST_LOCAL)), "flash_decode": lambda run: us(ms(run, "local")),
        **{
            f"`{method.removeprefix('local ')}`": lambda run, method=method: us(ms(run, method))
            for method in overrides
        },
        "x torch": lambda run: _speedup(run, "local"),
        "bandwidth": lambda run: share(run.get("local", {}).get("efficiency")),
        "torch kernel": lambda run: _which(run, _BEST_LOCAL, LOCAL), "method": _method_of_local,
    }
    first = "sequences x heads x kv heads x head x keys", "tokens", "page"
    lines = [[*first, *columns], ["---"] + ["---:"] * len(columns) + ["---"] * 2]
    for sizes in sorted(runs):
        page, queries, heads, kv_heads, dim, batch, keys = sizes
        run = runs[sizes] | _best(runs[sizes], LOCAL, _BEST_LOCAL)
        names = f"{batch}x{heads}x{kv_heads}x{dim}x{keys}", str(queries), str(page or "–")
        lines.append([*names, *(cell(run) for cell in columns.values())])
    title = f"flash_decode on one GPU, {gpu}{', in CUDA graphs' * graph}"
    return run_tables.captioned(title, runs, "triton", lines)


def _method_of_local(run):
    config = run.get("local", {}).get("config")
    return config["method"] if config else "–"
