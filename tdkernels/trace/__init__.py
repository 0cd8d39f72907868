"""What the programs of an operator did, and when: recorded on every rank, put on one clock, shown.

    recording.py  runs on the ranks: launches that are recorded, and what is needed to compare their clocks
    clocks.py     how far the clocks of the ranks are apart
    timeline.py   events as intervals on rank 0's clock; the Trace of all ranks
    perfetto.py     a Trace as a file for https://ui.perfetto.dev or chrome://tracing, and back
    summary.py    shares of time, arrivals, longest waits
    plot.py    a Trace as a PNG

``python -m tdkernels trace`` does all of it; docs/tracing.md says how to read what comes out.
"""

from tdkernels.runtime.recorder import Recorder, record

__all__ = ["Recorder", "record"]
