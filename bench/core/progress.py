"""Which cases of a run are done, so that a run that was cut off can go on.

The variable ``BENCH_PROGRESS`` names a file. Programs add each measured case to it, and skip the cases that it has.
Without the variable nothing is skipped.
"""

import os
from pathlib import Path

VARIABLE = "BENCH_PROGRESS"


def left(cases):
    """Return the cases that are not done."""
    done = _done()
    return [case for case in cases if str(case) not in done]


def add(case):
    """Note that a case is done."""
    if VARIABLE in os.environ:
        with open(os.environ[VARIABLE], "a") as file:
            file.write(f"{case}\n")


def _done():
    path = Path(os.environ.get(VARIABLE, ""))
    return set(path.read_text().splitlines()) if path.is_file() else set()
