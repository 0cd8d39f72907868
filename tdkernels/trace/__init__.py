"""Trace the programs of an operator on all ranks, on a common clock.

    recording.py  Record launches of an operator. Runs on every rank.
    clocks.py     Measure the offsets between the clocks of the ranks.
    timeline.py   Convert events to intervals on rank 0's clock. Defines Trace, the capture of all ranks.
    perfetto.py   Save a Trace as a file for https://ui.perfetto.dev or chrome://tracing, and load it.
    summary.py    Compute shares of time, arrivals of data and the longest waits.
    plot.py       Plot a Trace as a PNG.

``python -m tdkernels trace`` runs all of this. docs/guides/tracing.md explains the output.
"""

from tdkernels.runtime.recorder import Recorder, record

__all__ = ["Recorder", "record"]
