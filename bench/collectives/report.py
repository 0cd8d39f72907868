"""Tables of the collectives alone, a part of the report: microseconds by the size of the message."""

from bench.collectives import plots
from bench.collectives.cases import PEERS, in_words

_OURS = ("tdkernels", "tdkernels-default")
_HEAD = """### {operator} alone{graph}, {ranks} x {gpu}

Microseconds by the bytes of the full tensor (bf16); ours by exchange, "tdkernels" as a call comes. {date}, revision
{git}; torch {torch}, triton {triton}, NCCL {nccl}; NVLink multicast {multicast}; best link rate {link}.
"""


def text(rows, link):
    """The section of all rows, which are those of ``collectives.rows``; nothing if there are none.

    Args:     link: what shows a plots.Figure in the text
    """
    newest = newest_runs(rows)
    tables = [_table(place, newest[place]) for place in sorted(newest)]
    pictures = [link(figure) for figure in plots.figures(newest)]
    return "\n".join(["## Collectives alone\n", *pictures, *tables]) if tables else ""


def newest_runs(rows):
    """{(GPU, ranks, operator, whether in a graph): {bytes: {method: row, and "date"}}}, of each size the newest run."""
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
    lines = [["bytes", *methods, "ours over nccl", "efficiency"], ["---"] + ["---:"] * (len(methods) + 2)]
    for nbytes in sorted(runs):
        run = runs[nbytes]
        cells = [_us(run.get(name)) for name in methods]
        ours = run.get("tdkernels", {})
        lines.append([in_words(nbytes), *cells, _factor(ours.get("speedup")), _share(ours.get("efficiency"))])
    link = f"{settings['link_gbps']:.0f} GB/s each way" if settings["link_gbps"] else "unknown"
    head = _HEAD.format(
        operator=operator, graph=", in a CUDA graph" if graph else "", ranks=ranks, gpu=gpu, date=settings["date"][:10],
        git=settings["git"][:7] + ("+" if settings["git"].endswith("+") else ""), torch=settings["torch"],
        triton=settings["triton"], nccl=settings["nccl"], multicast=settings["multicast"], link=link,
    )
    return "\n".join([head, *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def _in_order(names):
    """NCCL, other libraries, ours; tries of other configs are not shown."""
    shown = [name for name in names if "{" not in name]
    first = ["nccl", *PEERS, *_OURS]
    return sorted(shown, key=lambda name: (first.index(name) if name in first else len(first), name))


def _us(row):
    return f"{row['ms'] * 1e3:.1f}" if row and row["ms"] else "–"


def _factor(value):
    return "–" if value is None else f"{value:.2f}{' ▼' if round(value, 2) < 1 else ''}"


def _share(value):
    return "–" if value is None else f"{value:.2f}"
