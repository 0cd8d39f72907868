"""Report section that compares times of solo mode with times that were measured on as many GPUs."""

import json
from collections import Counter
from dataclasses import dataclass

from bench.core.points import geometric_mean
from bench.report.cells import markdown, ms, share, short_revision
from bench.report.config_text import config_in_short, transport_in_short, used_fields
from bench.report.tables import newest

_INTRO = """## Predicted in solo mode and measured

**Predicted** is a time of solo mode with a modelled link, **measured** the newest benchmark on W GPUs, both in CUDA
graphs, in milliseconds. **Ratio** is measured / predicted: above 1, the prediction was too short.

- **GEMM alone** is cuBLAS in the run of each side. **GEMM ratio** is measured / predicted of these two. It shows how
  much the machines differ without any communication.
- **Bound** is the longer of the wire, at the rate of the modelled link, and the GEMM alone on the W GPUs.
- **Revisions** are those of the predicted and of the measured row. The solo run of the same revision as the measured
  row counts if there is one, otherwise the newest. Different revisions are marked †: the kernels may differ, too.
- If a run timed a config more than once, the mean counts.
- Rows of a backward pass name no config. Each side ran the configs that its revision selects.
- The second table of each part shows geometric means over the lines of the first, and the lowest and the highest ratio.
  Several configs of a shape are several lines.

[What the comparison shows](../../docs/performance/notes/solo.md#predictions-compared-with-8-h200).
"""
_UNLIKE = """**Predicted on another GPU model**, because these problems have no solo row of the same model. The models
differ in more than the link, for example in memory bandwidth. So this is a hint, and no test of solo mode.
"""
_SAME = "**The same config** on both sides.\n"
_OTHER = """**Different configs.** The measured config of these problems was not predicted. Predicted is the fastest
config in solo mode, measured the selected config. So a ratio includes the difference between the configs.
"""
_UNPREDICTED = """### Measured, but not predicted

Numbers of problems that were measured in CUDA graphs, without a solo row of the same GPU model and W:

"""
_MEASURES = ["bound", "predicted", "measured", "ratio", "GEMM alone, solo", "GEMM alone, W GPUs", "GEMM ratio", "wire"]
_MEAN_HEAD = [
    "operator", "transport", "bound", "lines", "shapes", "ratio, mean", "lowest", "highest", "GEMM ratio, mean",
]
_RULE = ["---"] * 3 + ["---:"] * 7
_BY_REVISION = "selected by each revision"


@dataclass(frozen=True)
class Comparison:
    """A predicted and a measured time of one problem, in ms.

    name:             operator, with "backward" for the gradients
    shape:            "M × N × K"
    predicted:        time in solo mode
    measured:         time on W GPUs
    solo_row, row:    a row of each side, with config, revision and GEMM time
    gemm:             the GEMM alone in the run on W GPUs, or None
    """

    name: str
    shape: str
    predicted: float
    measured: float
    solo_row: dict
    row: dict
    gemm: float | None

    @property
    def ratio(self):
        return self.measured / self.predicted

    @property
    def gemm_ratio(self):
        return self.gemm / self.solo_row["gemm_ms"] if self.gemm else None

    @property
    def bound(self):
        return "wire" if self.solo_row["wire_ms"] > (self.gemm or self.solo_row["gemm_ms"]) else "GEMM"

    @property
    def transport(self):
        config = self.solo_row["config"]
        return "–" if config is None else transport_in_short(config)


def text(solo_rows, graph_rows):
    """Return the section, or "" if no problem has a predicted and a measured time.

    Args:
        solo_rows: rows of solo mode.
        graph_rows: benchmark rows of dense operators in CUDA graphs.
    """
    predicted, known = {}, {}
    for row in solo_rows:
        if row["ms"] is not None and row["link_gbps"] and row["method"] != "gemm":
            predicted.setdefault((row["ranks"], row["gpu"], row["link_gbps"]), []).append(row)
            known.setdefault((row["ranks"], row["gpu"]), set()).add(_problem_of(row))
    on_one_host = [row for row in graph_rows if "simulated nodes" not in row["gpu"]]
    measured = newest(on_one_host, lambda row: (row["num_gpus"], row["gpu"]), _problem_of, with_overrides=True)
    alike, unlike = [], []
    for (ranks, gpu, link), rows in sorted(predicted.items()):
        for (count, model), runs in sorted(measured.items()):
            if count == ranks and model == gpu:
                alike += _place(gpu, model, ranks, link, *comparisons(rows, runs))
            elif count == ranks:
                left = {problem: run for problem, run in runs.items() if problem not in known.get((count, model), ())}
                unlike += _place(gpu, model, ranks, link, *comparisons(rows, left))
    return "\n".join([_INTRO, *alike, *unlike, _unpredicted(known, measured)]) if alike or unlike else ""


def _place(gpu, model, ranks, link, same, other):
    """Return the parts of the section for one GPU model on each side, one W and one link."""
    if not same and not other:
        return []
    parts = [f"### {ranks} x {model}, predicted on 1 x {gpu} at {link:.0f} GB/s\n"]
    parts += [] if gpu == model else [_UNLIKE]
    parts += [_SAME, _same_table(same), _means(same)] if same else []
    return parts + ([_OTHER, _other_table(other), _means(other)] if other else [])


def comparisons(solo_rows, measured):
    """Return (comparisons of equal configs, comparisons of different configs) of one W and one link.

    Args:
        solo_rows: rows of solo mode with a time, except those of the GEMM alone.
        measured: {problem: {method: row}} on W GPUs.
    """
    by_problem = {}
    for row in solo_rows:
        by_problem.setdefault(_problem_of(row), []).append(row)
    same, other = [], []
    for problem in sorted(by_problem.keys() & measured.keys()):
        run = measured[problem]
        predicted, timed = _by_config(by_problem[problem]), _by_config(_ours(run))
        gemm = run.get("gemm", {}).get("ms")
        for config in sorted(timed.keys() & predicted.keys()):
            same.append(_comparison(predicted[config], timed[config], gemm))
        selected = run.get("tdkernels")
        if selected is not None and selected["ms"] is not None and _config_key(selected) not in predicted:
            rows = _run_for(by_problem[problem], selected)
            other.append(_comparison([min(rows, key=lambda row: row["ms"])], [selected], gemm))
    return sorted(same, key=_order), sorted(other, key=_order)


def _order(found):
    row = found.row
    return found.name, row["m"], row["n"], row["k"], config_in_short(found.solo_row["config"])


def _problem_of(row):
    return row["op"], row.get("pass", "forward"), row["dtype"], row["m"], row["n"], row["k"]


def _name_of(operator, direction):
    return operator if direction == "forward" else f"{operator} {direction}"


def _ours(run):
    """Return the rows with a time of tdkernels: selected, heuristic and overridden configs."""
    return [
        row for method, row in run.items()
        if row["ms"] is not None and (method in ("tdkernels", "tdkernels-default") or " {" in method)
    ]


def _config_key(row):
    """Return a text that is equal for equal configs. A backward pass has one; a forward without config has None."""
    if row.get("pass") == "backward":
        return _BY_REVISION if row["method"] == "tdkernels" else None
    return json.dumps(used_fields(row["config"]), sort_keys=True) if row["config"] else None


def _by_config(rows):
    found = {}
    for row in rows:
        if (key := _config_key(row)) is not None:
            found.setdefault(key, []).append(row)
    return found


def _run_for(solo_rows, row):
    """Return the rows of the newest solo run of the revision of a measured row, or of the newest run."""
    alike = [solo for solo in solo_rows if not _differ(solo, row)] or solo_rows
    date = max(solo["date"] for solo in alike)
    return [solo for solo in alike if solo["date"] == date]


def _differ(solo, row):
    return short_revision(solo["git"]) != short_revision(row["git"])


def _comparison(solo_rows, rows, gemm):
    """Return the Comparison of the rows of one config."""
    chosen = _run_for(solo_rows, rows[0])
    solo, row = chosen[0], rows[0]
    name, shape = _name_of(row["op"], row.get("pass", "forward")), f"{row['m']} × {row['n']} × {row['k']}"
    return Comparison(name, shape, _mean_ms(chosen), _mean_ms(rows), solo, row, gemm)


def _mean_ms(rows):
    return sum(row["ms"] for row in rows) / len(rows)


# ---- tables ----


def _same_table(found):
    lines = [["operator", "M × N × K", *_MEASURES, "config", "revisions"], [*_RULE, "---", "---"]]
    for one in found:
        config = one.solo_row["config"]
        lines.append([*_measures(one), _BY_REVISION if config is None else config_in_short(config), _revisions(one)])
    return markdown(lines)


def _other_table(found):
    titles = ["operator", "M × N × K", *_MEASURES, "predicted config", "measured config", "revisions"]
    lines = [titles, [*_RULE, "---", "---", "---"]]
    for one in found:
        configs = [config_in_short(row["config"]) or "not recorded" for row in (one.solo_row, one.row)]
        lines.append([*_measures(one), *configs, _revisions(one)])
    return markdown(lines)


def _measures(one):
    return [
        one.name, one.shape, one.bound, ms(one.predicted), ms(one.measured), share(one.ratio),
        ms(one.solo_row["gemm_ms"]), ms(one.gemm), share(one.gemm_ratio), ms(one.solo_row["wire_ms"]),
    ]


def _revisions(one):
    mark = " †" if _differ(one.solo_row, one.row) else ""
    return f"{short_revision(one.solo_row['git'])}, {short_revision(one.row['git'])}{mark}"


def _means(found):
    """Return a table of means and worst cases: all lines of an operator, then by transport and bound."""
    lines = [_MEAN_HEAD, ["---"] * 3 + ["---:"] * 6]
    for name in sorted({one.name for one in found}):
        chosen = [one for one in found if one.name == name]
        groups = {}
        for one in chosen:
            groups.setdefault((one.transport, one.bound), []).append(one)
        if len(groups) > 1:
            lines.append(_mean_line(name, "all", "all", chosen))
        lines += [_mean_line(name, *group, members) for group, members in sorted(groups.items())]
    return markdown(lines)


def _mean_line(name, transport, bound, found):
    gemms = [one.gemm_ratio for one in found if one.gemm_ratio]
    extremes = [pick(found, key=lambda one: one.ratio) for pick in (min, max)]
    return [
        name, transport, bound, str(len(found)), str(len({one.shape for one in found})),
        share(geometric_mean([one.ratio for one in found])), *(f"{share(one.ratio)} ({one.shape})" for one in extremes),
        share(geometric_mean(gemms) if gemms else None),
    ]


def _unpredicted(known, measured):
    """Return a list of the problems that were measured, but not predicted on the same GPU model.

    Args:
        known: {(W, GPU): problems that were predicted}.
        measured: {(W, GPU): {problem: run}}.
    """
    lines = []
    for place, runs in sorted(measured.items()):
        left = runs.keys() - known.get(place, set())
        counts = Counter(_name_of(operator, direction) for operator, direction, *_ in left)
        if counts:
            shown = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
            lines.append(f"- {place[0]} x {place[1]}: {shown}\n")
    return "".join([_UNPREDICTED, *lines]) if lines else ""
