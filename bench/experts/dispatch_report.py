"""Report section of expert-parallel dispatch and combine: tables of microseconds by tokens per rank."""

from bench.experts import dispatch_plots
from bench.experts.dispatch import PEERS
from bench.report.cells import factor, markdown, share, short_revision

_SEQUENCES = ("sequence", "sequence-known-splits")
_OURS = ("tdkernels", "tdkernels-max-tokens", "tdkernels-direct", "tdkernels-again")
_LABELS = {  # {method as stored in rows: column title}
    "sequence": "unfused", "sequence-known-splits": "unfused, known splits",
    "tdkernels": "ours", "tdkernels-max-tokens": "ours, max_tokens", "tdkernels-direct": "ours, low-latency",
    "tdkernels-again": "ours, reused handle",
}
_INTRO = """## Expert parallelism

- **unfused**: NCCL's all_to_all_single with permutes in plain torch, one row per top-k assignment. The host waits for
  the sizes. **known splits**: the same with the sizes as arguments; the host never waits, so it can run in a graph.
- **ours**: two-phase dispatch, where the host waits for the number of received rows. **max_tokens**: with this capacity
  the host never waits. **low-latency**: with `max_tokens_per_rank` as well, so that tokens are sent before counts are
  exchanged. **reused handle**: dispatch with the handle of an earlier dispatch. All use the best known config; rows
  from before 2026-11-23 use the heuristic one.
- **wire** is the floor: the bytes that the busiest GPU sends or receives, each token once per destination rank, over
  the best rate of a link. **efficiency** is wire / ours. **x unfused** is the speedup of ours over unfused; in graphs
  both are the variants that do not wait.
- Outputs were checked against the reference before timing. DeepEP returns one row per token and rank; its times do not
  include the replication to the experts and the sum of their results.
"""
_HEAD = """### {title}, {ranks} x {gpu}

Microseconds by tokens per rank; H = {hidden}, {experts} experts, top-{choices}{routing}. {date}, revision {git}; torch
{torch}, triton {triton}, NCCL {nccl}; NVLink multicast {multicast}; best link rate {link}.
"""


def text(rows, link):
    """Return the section for rows of ``dispatch.rows``, or "" if there are none.

    Args:
        link: function that returns the Markdown of a plots.Figure.
    """
    newest = newest_runs(rows)
    tables = [_table(place, newest[place]) for place in sorted(newest)]
    pictures = [link(figure) for figure in dispatch_plots.figures(newest)]
    return "\n".join([_INTRO, *pictures, *tables]) if tables else ""


def newest_runs(rows):
    """Return {(GPU, ranks, (H, E, k), routing, operator, payload, in a graph): {tokens: {method: row}}}.

    Each token count has the newest run. Rows of ep_latency are not divided by eager and graph mode.
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
    """Return the tdkernels row that is compared with the baseline, or None."""
    return next((run[name] for name in _OURS if name in run and run[name]["ms"]), None)


def _table(place, runs):
    gpu, ranks, (hidden, experts, choices), routing, operator, payload, graph = place
    settings = next(iter(runs[max(runs)].values()))
    methods = _in_order({name for run in runs.values() for name in run})
    titles = [_LABELS.get(name, name) for name in methods]
    lines = [["tokens", *titles, "wire", "x unfused", "efficiency"], ["---:"] * (len(methods) + 4)]
    for tokens in sorted(runs):
        run = runs[tokens]
        row = ours(run) or {}
        floor = next(iter(run.values()))["floor_ms"]
        lines.append([
            str(tokens), *(_us(run.get(name)) for name in methods), f"{floor * 1e3:.1f}" if floor else "–",
            factor(row.get("speedup")), share(row.get("efficiency")),
        ])
    what = "dispatch + combine, median / 99th percentile" if operator == "ep_latency" else ""
    title = ", ".join(
        filter(None, [operator, payload if operator in ("ep_dispatch", "ep_latency") else "", what,
                      "in a CUDA graph" if graph else ""])
    )
    head = _HEAD.format(
        title=title, ranks=ranks, gpu=gpu, hidden=hidden, experts=experts, choices=choices,
        routing="" if routing == "balanced" else f", {routing} routing", date=settings["date"][:10],
        git=short_revision(settings["git"]), torch=settings["torch"],
        triton=settings["triton"], nccl=settings["nccl"], multicast=settings["multicast"],
        link=f"{settings['link_gbps']:.0f} GB/s each way" if settings["link_gbps"] else "unknown",
    )
    return head + "\n" + markdown(lines)


def _in_order(names):
    """Order the columns: baselines, other libraries, tdkernels. Config overrides are not shown."""
    first = [*_SEQUENCES, *PEERS, *_OURS]
    return sorted((name for name in names if name in first), key=first.index)


def _us(row):
    if not row or not row["ms"]:
        return "–"
    p99 = f" / {row['p99_ms'] * 1e3:.1f}" if row["p99_ms"] else ""
    return f"{row['ms'] * 1e3:.1f}{p99}"
