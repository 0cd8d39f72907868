"""The main part of a benchmark program: start ranks, measure the cases, and append their rows to a file."""

import time

from bench.core import harness
from bench.core.each_case import measure_all
from bench.core.row_files import append
from bench.run import revision
from tdkernels.launch import RankPool


def measure_on_ranks(ranks, device, cases, rows_of, summary, options, file):
    """Start ranks and measure the cases; on CPU ranks as a rehearsal, which writes nothing. Return the exit code.

    Args:
        ranks: number of ranks.
        device: "cuda" or "cpu".
        cases: list of cases.
        rows_of: function of (pool, case, rounds) that returns the rows of a case.
        summary: as for ``measure_all``.
        options: command-line options ``rounds``, ``seconds`` (time limit, or None) and ``out`` (folder, or None).
        file: name of the file of rows.
    """
    deadline = None if options.seconds is None else time.monotonic() + options.seconds
    rehearsal = device == "cpu"
    rounds = 1 if rehearsal else options.rounds
    keep = None if rehearsal or options.out is None else lambda table: append(table, options.out, file)
    with RankPool(ranks, device) as pool:
        common = {**pool.run(harness.machine)[0], "rounds": rounds, "git": revision()}
        rows = lambda case: rows_of(pool, case, rounds)  # noqa: E731
        _, failures = measure_all(pool, cases, rows, common, keep, summary, deadline)
    if rehearsal:
        print("CPU ranks interpret the kernels: these times are meaningless and are not written.")
    return 1 if failures else 0
