"""Report section of the collectives: tables of microseconds by message size."""

from bench.collectives import plots
from bench.collectives.cases import PEERS, format_size
from bench.report.cells import factor, markdown, share, short_revision

_OURS = ("tdkernels", "tdkernels-default")
_HEAD = """### {operator}{graph}, {ranks} x {gpu}

Microseconds by message size, the bytes of the full bf16 tensor. "Ours" uses the best known config, "ours, heuristic"
the heuristic config; the other columns of ours name the algorithm. {date}, revision {git}; torch {torch}, triton
{triton}, NCCL {nccl}; NVLink multicast {multicast}; best link rate {link}.
"""


def text(rows, link):
    """Return the section for rows of ``cases.rows``, or "" if there are none.

    Args:
        link: function that returns the Markdown of a plots.Figure.
    """
    newest = newest_runs(rows)
    tables = [_table(place, newest[place]) for place in sorted(newest)]
    pictures = [link(figure) for figure in plots.figures(newest)]
    return "\n".join(["## Collectives\n", *pictures, *tables]) if tables else ""


def newest_runs(rows):
    """Return {(GPU, ranks, operator, in a graph): {bytes: {method: row, "date": date}}} of the newest runs."""
    newest = {}
    for row in rows:
        place = row["gpu"], row["num_gpus"], row["op"], row["graph"]
        run = newest.setdefault(place, {}).setdefault(row["bytes"], {"date": row["date"]})
        if row["date"] > run["date"]:
            run.clear()
            run["date"] = row["date"]
        if row["date"] == run["date"]:
            run[row["method"]] = row
    return newest


def _table(place, runs):
    gpu, ranks, operator, graph = place
    settings = runs[max(runs)]["nccl"]
    methods = _in_order({name for run in runs.values() for name in run if name != "date"})
    titles = [_title(name) for name in methods]
    lines = [["bytes", *titles, "x NCCL", "efficiency"], ["---"] + ["---:"] * (len(methods) + 2)]
    for nbytes in sorted(runs):
        run = runs[nbytes]
        cells = [_us(run.get(name)) for name in methods]
        ours = run.get("tdkernels", {})
        lines.append([format_size(nbytes), *cells, factor(ours.get("speedup")), share(ours.get("efficiency"))])
    link = f"{settings['link_gbps']:.0f} GB/s each way" if settings["link_gbps"] else "unknown"
    head = _HEAD.format(
        operator=operator, graph=", in a CUDA graph" if graph else "", ranks=ranks, gpu=gpu, date=settings["date"][:10],
        git=short_revision(settings["git"]), torch=settings["torch"],
        triton=settings["triton"], nccl=settings["nccl"], multicast=settings["multicast"], link=link,
    )
    return head + "\n" + markdown(lines)


def _title(method):
    """Return the column title of a method as stored in rows."""
    kind, _, variant = method.partition("-")
    if kind != "tdkernels":
        return "NCCL" if method == "nccl" else method
    return f"ours, {'heuristic' if variant == 'default' else variant}" if variant else "ours"


def _in_order(names):
    """Order the columns: NCCL, other libraries, tdkernels. Config overrides are not shown."""
    shown = [name for name in names if "{" not in name]
    first = ["nccl", *PEERS, *_OURS]
    return sorted(shown, key=lambda name: (first.index(name) if name in first else len(first), name))


def _us(row):
    return f"{row['ms'] * 1e3:.1f}" if row and row["ms"] else "–"
