"""Tables of expert parallelism, a part of the report: microseconds by the tokens of a rank."""

from bench.experts import dispatch_plots
from bench.experts.dispatch import PEERS

_SEQUENCES = ("sequence", "sequence-known-splits")
_OURS = ("tdkernels", "tdkernels-max-tokens", "tdkernels-direct", "tdkernels-again")
_INTRO = """## Expert parallelism

- **sequence** is NCCL's all_to_all_single with the permutes around it in plain torch, the host waiting for the sizes;
  **sequence-known-splits** is told them, and never waits, as in a graph. It sends a row for each choice.
- **tdkernels** is a call as it comes, where the host waits for how many rows there are; **-max-tokens** one with a
  capacity, for which it never waits; **-direct** one with a bound on the tokens of each rank (max_tokens_per_rank) as
  well, so that few tokens leave before anything is counted; **-again** one by the handle of a dispatch before. All with
  the best config that is known, rows from before 2026-11-23 with the default one.
- **wire** is the floor: what the busiest GPU has to send or receive, each token once for a rank, over the best rate of
  a link. **Efficiency** is wire / ours, **over sequence** is of ours, that with a capacity in graphs.
- Outputs were checked against the reference before the clock started. DeepEP gives a token one row on a rank: spreading
  and adding up, which the others do, are not in its times.
"""
_HEAD = """### {title}, {ranks} x {gpu}

Microseconds by the tokens of a rank; H = {hidden}, {experts} experts, {choices} a token{routing}. {date}, revision
{git}; torch {torch}, triton {triton}, NCCL {nccl}; NVLink multicast {multicast}; best link rate {link}.
"""


def text(rows, link):
    """The section of all rows, which are those of ``ep.rows``; nothing if there are none.

    Args:     link: what shows a plots.Figure in the text
    """
    newest = newest_runs(rows)
    tables = [_table(place, newest[place]) for place in sorted(newest)]
    pictures = [link(figure) for figure in dispatch_plots.figures(newest)]
    return "\n".join([_INTRO, *pictures, *tables]) if tables else ""


def newest_runs(rows):
    """{(GPU, ranks, (H, E, k), routing, operator, payload, whether in a graph): {tokens: {method: row}}}.

    Of each number of tokens the newest run. A latency's rows are in one place, in a graph or not.
    """
    newest, dates = {}, {}
    for row in rows:
        layer = row["hidden"], row["experts"], row["choices"]
        graph = row["graph"] and row["op"] != "ep_latency"
        place = row["gpu"], row["num_gpus"], layer, row["routing"], row["op"], row["payload"], graph
        run = newest.setdefault(place, {}).setdefault(row["tokens"], {})
        if row["date"] > dates.get((place, row["tokens"]), ""):
            run.clear()
            dates[place, row["tokens"]] = row["date"]
        if row["date"] == dates[place, row["tokens"]] and (row["ms"] or row["method"] not in run):
            run[row["method"]] = row
    return newest


def ours(run):
    """The row of ours that is compared with the sequence, or None."""
    return next((run[name] for name in _OURS if name in run and run[name]["ms"]), None)


def _table(place, runs):
    gpu, ranks, (hidden, experts, choices), routing, operator, payload, graph = place
    settings = next(iter(runs[max(runs)].values()))
    methods = _in_order({name for run in runs.values() for name in run})
    lines = [["tokens", *methods, "wire", "over sequence", "efficiency"], ["---:"] * (len(methods) + 4)]
    for tokens in sorted(runs):
        run = runs[tokens]
        row = ours(run) or {}
        floor = next(iter(run.values()))["floor_ms"]
        lines.append([
            str(tokens), *(_us(run.get(name)) for name in methods), f"{floor * 1e3:.1f}" if floor else "–",
            _factor(row.get("speedup")), _share(row.get("efficiency")),
        ])
    what = "there and back, median / 99th percentile" if operator == "ep_latency" else ""
    title = ", ".join(
        filter(None, [operator, payload if operator in ("ep_dispatch", "ep_latency") else "", what,
                      "in a CUDA graph" if graph else ""])
    )
    head = _HEAD.format(
        title=title, ranks=ranks, gpu=gpu, hidden=hidden, experts=experts, choices=choices,
        routing="" if routing == "balanced" else f", {routing} routing", date=settings["date"][:10],
        git=settings["git"][:7] + ("+" if settings["git"].endswith("+") else ""), torch=settings["torch"],
        triton=settings["triton"], nccl=settings["nccl"], multicast=settings["multicast"],
        link=f"{settings['link_gbps']:.0f} GB/s each way" if settings["link_gbps"] else "unknown",
    )
    return "\n".join([head, *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def _in_order(names):
    """NCCL, other libraries, ours; tries of other configs are not shown."""
    first = [*_SEQUENCES, *PEERS, *_OURS]
    return sorted((name for name in names if name in first), key=first.index)


def _us(row):
    if not row or not row["ms"]:
        return "–"
    p99 = f" / {row['p99_ms'] * 1e3:.1f}" if row["p99_ms"] else ""
    return f"{row['ms'] * 1e3:.1f}{p99}"


def _factor(value):
    return "–" if value is None else f"{value:.2f}{' ▼' if round(value, 2) < 1 else ''}"


def _share(value):
    return "–" if value is None else f"{value:.2f}"
