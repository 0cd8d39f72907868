"""Save and load a Trace as JSON in Chrome's trace event format, which Perfetto also reads. Nothing is lost."""

import json
from typing import TYPE_CHECKING

from tdkernels.trace.timeline import ALL_PEERS, NO_PEER, Interval, Trace, row_of

if TYPE_CHECKING:
    from pathlib import Path


def to_chrome(trace: Trace) -> dict:
    """Convert a Trace to a dict for ``json.dump``: a process for each rank, a thread for each row, times in us."""
    named, events = [], []
    for rank, intervals in enumerate(trace.ranks):
        error = trace.about["clock_error_ns"][rank] / 1e3
        named.append(_name("process_name", rank, 0, f"rank {rank} (clock ± {error:.2f} us)" if rank else "rank 0"))
        named.append({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
        threads = {row: (number, name) for number, (row, name) in enumerate(trace.rows(rank).items(), 1)}
        named += [_name("thread_name", rank, number, name) for number, name in threads.values()]
        events += [_event(interval, rank, threads[row_of(interval)][0]) for interval in intervals]
    events.sort(key=lambda event: (event["ts"], event["pid"], event["tid"]))
    return {"traceEvents": named + events, "displayTimeUnit": "ns", "otherData": trace.about}


def _name(what, pid, tid, name):
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _event(interval, rank, thread):
    args = {"program": interval.program, "multiprocessor": interval.multiprocessor, "lane": interval.lane}
    if interval.peer != NO_PEER:
        args["peer"] = "all" if interval.peer == ALL_PEERS else interval.peer
    return {
        "ph": "X", "name": interval.kind, "cat": interval.kind, "pid": rank, "tid": thread,
        "ts": interval.begin / 1e3, "dur": (interval.end - interval.begin) / 1e3, "args": args,
    }


def save(trace: Trace, path: "Path") -> None:
    """Write a Trace to a file for Perfetto and for ``load``."""
    path.write_text(json.dumps(to_chrome(trace), separators=(",", ":")))


def load(path: "Path") -> Trace:
    """Return the Trace from a file that ``save`` has written.

    Raises:
        ValueError: If the file is not a trace.
        OSError: If it cannot be read.
    """
    try:
        found = json.loads(path.read_text())
        about, events = found["otherData"], [event for event in found["traceEvents"] if event["ph"] == "X"]
        ranks: list[list[Interval]] = [[] for _ in range(about["world_size"])]
        for event in events:
            ranks[event["pid"]].append(_interval(event))
    except (KeyError, TypeError, IndexError, UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{path} is not a trace of tdkernels") from None
    return Trace(about, [sorted(intervals, key=lambda i: (i.program, i.begin, i.end)) for intervals in ranks])


def _interval(event):
    args = event["args"]
    peer = args.get("peer", NO_PEER)
    begin = round(event["ts"] * 1e3)
    return Interval(
        args["program"], args["multiprocessor"], args["lane"], event["name"], ALL_PEERS if peer == "all" else peer,
        begin, begin + round(event["dur"] * 1e3),
    )
