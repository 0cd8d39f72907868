"""Tables of interleaved runs: a line for each problem, a column for each method, and ratios of ours."""

from bench.report import cells
from bench.report.cells import factor, markdown, short_revision

_HEAD = """### {title}, {ranks} x {gpu}

{what}. {date}, revision {git}; torch {torch}, triton {triton}{nccl}{link}.
"""


def newest(rows, place_of, problem_of, with_overrides=False):
    """Return {place: {problem: {method: row}}} with the newest run of each problem that has a time.

    Rows with overridden configs are left out, unless ``with_overrides``.
    """
    found, dates = {}, {}
    for row in rows:
        if "{" in row["method"] and not with_overrides:
            continue
        place, problem = place_of(row), problem_of(row)
        run = found.setdefault(place, {}).setdefault(problem, {})
        if row["date"] > dates.get((place, problem), ""):
            run.clear()
            dates[place, problem] = row["date"]
        if row["date"] == dates[place, problem]:
            run[row["method"]] = row
    timed = {
        place: {problem: run for problem, run in runs.items() if any(row["ms"] for row in run.values())}
        for place, runs in found.items()
    }
    return {place: runs for place, runs in timed.items() if runs}


def table(title, what, runs, first, methods, more):
    """Return a heading and its table.

    Args:
        title: heading, without the number of ranks and the GPU.
        what: a sentence that explains the times.
        runs: [{method: row}], one line each.
        first: {title: function of a run}, the columns before the methods.
        methods: {title: method}; a method without measurements gets no column.
        more: {title: function of a run}, the columns after the methods.
    """
    some = [next(iter(run.values())) for run in runs]
    shown = {name: method for name, method in methods.items() if any(ms(run, method) for run in runs)}
    titles = [*first, *shown, *more]
    lines = [titles, ["---"] * len(first) + ["---:"] * (len(titles) - len(first))]
    for run in runs:
        times = [cells.ms(ms(run, method)) for method in shown.values()]
        lines.append([*(cell(run) for cell in first.values()), *times, *(cell(run) for cell in more.values())])
    return _head(title, what, some) + "\n" + markdown(lines)


def sections(intro, rows, place_of, problem_of, table_of, order=None):
    """Return an introduction and one table per place, or "" if there are no rows.

    Args:
        intro: text before the tables.
        rows: rows of all runs.
        place_of, problem_of: functions of a row, as for ``newest``.
        table_of: function of (place, {problem: {method: row}}) that returns a table.
        order: sort key of the places, or None for their own order.
    """
    found = newest(rows, place_of, problem_of)
    parts = [table_of(place, found[place]) for place in sorted(found, key=order)]
    return "\n".join([intro, *parts]) if parts else ""


def captioned(title, runs, library, lines):
    """Return a heading, the date, revisions and versions of runs {problem: {method: row}}, and a table.

    ``library``: "NCCL" or "triton", named after torch.
    """
    some = [next(iter(run.values())) for run in runs.values()]
    revisions = ", ".join(sorted({short_revision(row["git"]) for row in some}))
    row = max(some, key=lambda row: row["date"])
    what = f"{row['date'][:10]}, revision {revisions}; torch {row['torch']}, {library} {row[library.lower()]}."
    return f"### {title}\n\n{what}\n\n{markdown(lines)}"


def _head(title, what, rows):
    dates = sorted({row["date"][:10] for row in rows})
    rates = [row["link_gbps"] for row in rows if row["link_gbps"]]
    revisions = {short_revision(row["git"]) for row in rows}
    row, when = rows[0], " to ".join(dict.fromkeys((dates[0], dates[-1])))
    nccl = f", NCCL {row['nccl']}; NVLink multicast {row['multicast']}" if row["num_gpus"] > 1 else ""
    return _HEAD.format(
        title=title, what=what, ranks=row["num_gpus"], gpu=row["gpu"], date=when,
        git=", ".join(sorted(revisions)), torch=row["torch"], triton=row["triton"], nccl=nccl,
        link=f"; best link rate {max(rates):.0f} GB/s each way" if rates else "",
    )


# ---- cells ----


def ms(run, method):
    """Return the time of a method in a run in ms, or None."""
    return run.get(method, {}).get("ms")


def of(method, field):
    """Return a function of a run that shows a field of a method as a ratio."""

    def cell(run):
        value = run.get(method, {}).get(field)
        return cells.share(value) if field == "efficiency" else factor(value)

    return cell
