"""Measure case after case: collect rows and failures, keep each row at once, and stop at a time limit."""

import contextlib
import datetime
import sys
import time

from bench.core import progress
from tdkernels.cli.output import console
from tdkernels.launch import RankError


def measure_all(pool, cases, rows_of, common, keep, summary, deadline=None):
    """Measure the cases. Return (rows, failures).

    Args:
        pool: the RankPool; when it is no longer usable, no further case is started.
        cases: list of cases.
        rows_of: function of a case that measures it and returns its rows. It may raise a RankError.
        common: fields of all rows.
        keep: function of the rows of a case, called as soon as it is measured, or None.
        summary: function of the rows of a case that returns one line.
        deadline: value of time.monotonic() after which no further case is started, or None.
    """
    cases = progress.left(cases)
    rows, failures = [], []
    for number, case in enumerate(cases):
        if deadline is not None and time.monotonic() > deadline:
            left = len(cases) - number
            print(f"time limit reached: {left} of {len(cases)} cases are skipped, from {case} on", flush=True)
            progress.cut_off()
            break
        try:
            with _status(f"case {number + 1} of {len(cases)}: {case}"):
                found = rows_of(case)
        except RankError as err:
            failures.append(f"{case}: {err}")
            print(failures[-1], file=sys.stderr, flush=True)
            if not pool.usable:
                break
            continue
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        new = [{**row, **common, "date": date} for row in found]
        rows += new
        if keep is not None:
            keep(new)
            progress.add(case)
        print(f"{case}: {summary(new)}", flush=True)
    return rows, failures


def _status(text):
    """Return a context manager that shows a line while a case runs, if stderr is a terminal."""
    if not sys.stderr.isatty():
        return contextlib.nullcontext()
    try:
        return console(stderr=True).status(text)
    except ImportError:  # rich is optional
        return contextlib.nullcontext()
