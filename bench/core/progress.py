"""Which cases of a run are done, so that a run that was cut off can go on.

The variable ``BENCH_PROGRESS`` names a file. Programs add each measured case to it, and skip the cases that it has.
Without the variable nothing is skipped.
"""

import os
from pathlib import Path

VARIABLE = "BENCH_PROGRESS"
_CUT_OFF = "# stopped at the time limit"


def left(cases):
    """Return the cases that are not done."""
    done = _lines(os.environ.get(VARIABLE, ""))
    return [case for case in cases if str(case) not in done]


def add(case):
    """Note that a case is done."""
    _append(f"{case}")


def cut_off():
    """Note that the program leaves out the other cases because of its time limit."""
    _append(_CUT_OFF)


def was_cut_off(path):
    """Return whether the last program with this file called ``cut_off``."""
    return _CUT_OFF in _lines(path)


def begin(path):
    """Prepare the file for another run: keep the cases that are done."""
    if lines := _lines(path):
        Path(path).write_text("".join(f"{line}\n" for line in lines if line != _CUT_OFF))


def _append(line):
    if VARIABLE in os.environ:
        with open(os.environ[VARIABLE], "a") as file:
            file.write(f"{line}\n")


def _lines(path):
    return Path(path).read_text().splitlines() if Path(path).is_file() else []
