"""Summarize a Trace: shares of the multiprocessors' time, arrival of data, and the longest waits."""

import math
from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING

from tdkernels.trace.timeline import ALL_PEERS, KINDS, NO_PEER

if TYPE_CHECKING:
    from tdkernels.trace.timeline import Interval, Trace

_OVERHEAD = ("starts", "finishes")
BUSY = tuple(kind for kind in KINDS if kind not in (*_OVERHEAD, "ends"))
_SENDS = ("pushes", "sums")  # kinds that send data if they name a peer
_WAITS = 3  # longest waits shown for each rank


def shares(trace, rank):
    """Return {kind: share of time} for a rank, from the start of its first program to the end of its last.

    The total is the time of all multiprocessors. A kind counts as long as at least one program of a multiprocessor
    performs it, so with several programs at a time the shares can add up to more than 1. "overhead" is the time in
    which programs start and finish. "idle" is the time without a program, and "tail" is the part of it after the last
    program.
    """
    begin, end = trace.span(rank)
    found = defaultdict(lambda: defaultdict(list))  # place -> kind -> [(begin, end)]
    for interval in trace.ranks[rank]:
        found[_place(interval)][interval.kind].append((interval.begin, interval.end))
    unused = max(trace.about["num_multiprocessors"] - len(found), 0)
    total = max((len(found) + unused) * (end - begin), 1)

    def share(kinds):
        return sum(_covered(chain.from_iterable(of[kind] for kind in kinds)) for of in found.values()) / total

    every = {kind: share([kind]) for kind in BUSY}
    last = [max(stop for intervals in of.values() for _, stop in intervals) for of in found.values()]
    tail = sum(end - stop for stop in last) + unused * (end - begin)
    return {**every, "overhead": share(_OVERHEAD), "idle": 1 - share(KINDS), "tail": tail / total}


def _place(interval):
    """Return the multiprocessor of an interval, or its lane if that is not known."""
    return interval.multiprocessor, interval.lane if interval.multiprocessor < 0 else 0


def _covered(intervals):
    """Return the time that is within at least one of several intervals (begin, end)."""
    total, reached = 0, -math.inf
    for begin, end in sorted(intervals):
        total += max(end - max(begin, reached), 0)
        reached = max(reached, end)
    return total


def arrivals(trace: "Trace", rank: int) -> tuple[int, int, bool] | None:
    """Return when data from peers arrived: (first in ns, last in ns, whether the peers recorded it).

    If programs of the peers push the data, the times are those after they raised the signal. If a copy engine moves the
    data, the times are those at which a waiting program of this rank continued. Return None if there is neither.
    """
    ends = [
        interval.end
        for peer, intervals in enumerate(trace.ranks)
        for interval in intervals
        if peer != rank and interval.kind in _SENDS and interval.peer in (rank, ALL_PEERS)
    ]
    sent = bool(ends)
    if not sent:
        ends = [i.end for i in trace.ranks[rank] if i.kind == "waits" and i.peer not in (rank, NO_PEER)]
    return (min(ends), max(ends), sent) if ends else None


def longest_waits(trace: "Trace", rank: int, count: int = _WAITS) -> "list[Interval]":
    """Return the longest waits of a rank's programs, the longest first."""
    waits = [interval for interval in trace.ranks[rank] if interval.kind == "waits"]
    return sorted(waits, key=lambda i: (i.begin - i.end, i.program))[:count]


def headline(trace: "Trace") -> str:
    """Return the summary line: duration, cost of tracing, shares of the multiprocessors' time, and clock errors."""
    mean: defaultdict[str, float] = defaultdict(float)
    for rank in range(len(trace.ranks)):
        for kind, share in shares(trace, rank).items():
            mean[kind] += share / len(trace.ranks)
    ends = [trace.span(rank)[1] for rank in range(len(trace.ranks))]
    parts = [f"{kind} {mean[kind]:.0%}" for kind in (*BUSY, "overhead", "idle") if mean[kind] >= 0.005]
    a = trace.about
    return (
        f"{_ms(max(ends))} ms from the first program to the last; a call takes {max(a['traced_ms']):.3f} ms traced, "
        f"{max(a['untraced_ms']):.3f} ms untraced\n{', '.join(parts)}; clocks agree within "
        f"{max(a['clock_error_ns']) / 1e3:.2f} us, tick {a['tick_ns']} ns"
    )


def tables(trace: "Trace") -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the tables to print, as (title, columns, rows of text)."""
    return [_of_ranks(trace), _of_waits(trace)]


def _of_ranks(trace):
    kinds = [kind for kind in BUSY if any(i.kind == kind for intervals in trace.ranks for i in intervals)]
    rows = []
    for rank in range(len(trace.ranks)):
        begin, end = trace.span(rank)
        share = shares(trace, rank)
        arrived = arrivals(trace, rank)
        rows.append([
            str(rank), _ms(end - begin), _us(begin), *(f"{share[kind]:.1%}" for kind in kinds),
            *(f"{share[kind]:.1%}" for kind in ("overhead", "idle", "tail")),
            *([_us(time) for time in arrived[:2]] if arrived else ["-", "-"]),
            f"± {trace.about['clock_error_ns'][rank] / 1e3:.2f}",
        ])
    seen = "data" if all(found is None or found[2] for found in map(lambda r: arrivals(trace, r), range(len(rows)))) \
        else "data seen"
    columns = [
        "rank", "ms", "began, us", *kinds, "overhead", "idle", "idle at the end",
        f"first {seen}, us", f"last {seen}, us", "clock, us",
    ]
    return trace.title, columns, rows


def _of_waits(trace):
    rows = []
    for rank in range(len(trace.ranks)):
        for wait in longest_waits(trace, rank):
            peer = "all peers" if wait.peer == ALL_PEERS else "itself" if wait.peer == rank else f"rank {wait.peer}"
            place = str(wait.multiprocessor) if wait.multiprocessor >= 0 else "-"
            rows.append([str(rank), str(wait.program), place, peer, _us(wait.begin), _us(wait.end - wait.begin)])
    return "longest waits", ["rank", "program", "multiprocessor", "peer", "start, us", "duration, us"], rows


def _ms(ns):
    return f"{ns / 1e6:.4f}"


def _us(ns):
    return f"{ns / 1e3:.1f}"
