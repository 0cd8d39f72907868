"""Events of kernels as intervals, those of all ranks on the clock of rank 0."""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tdkernels.lang import profile as words
from tdkernels.trace.clocks import offsets

KINDS = tuple(words.KINDS.value.split())
NO_PEER, ALL_PEERS = words.NO_PEER.value, words.ALL_PEERS.value


class Interval(NamedTuple):
    """What a program did from ``begin`` to ``end``, ns after the first program of all ranks began.

    Attributes:
        kind: one of KINDS but "ends"; peer: a rank, NO_PEER or ALL_PEERS
        lane: of the programs that a multiprocessor has at the same time, 0 …; multiprocessor: -1 if it is not known
    """

    program: int
    multiprocessor: int
    lane: int
    kind: str
    peer: int
    begin: int
    end: int


@dataclass(frozen=True)
class Trace:
    """One launch on all ranks.

    Attributes:
        about: what was run, as ``record_operator`` says it of rank 0; with "untraced_ms" and "traced_ms" of each rank,
            "tick_ns", the least step that the clocks have made, and "clock_error_ns", by how much each rank's times may
            be wrong in comparison with those of rank 0
        ranks: the intervals of each rank, program by program, in order of time
    """

    about: dict
    ranks: list

    @property
    def title(self):
        a = self.about
        place = f"{a['world_size']} CPU ranks" if a["gpu"] == "cpu" else f"{a['world_size']} x {a['gpu']}"
        return f"{a['operator']} {a['shape']} {a['dtype']} on {place}"

    def span(self, rank):
        """When the first program of a rank began, and when the last one ended."""
        return min(i.begin for i in self.ranks[rank]), max(i.end for i in self.ranks[rank])

    def rows(self, rank):
        """{(multiprocessor, lane) or, where that is not known, (program, -1): name}, in the order to show them in."""
        return {row: _row_name(row) for row in sorted({row_of(interval) for interval in self.ranks[rank]})}


def row_of(interval):
    """Where an interval is shown: programs of one row do not overlap."""
    if interval.multiprocessor < 0:
        return interval.program, -1
    return interval.multiprocessor, interval.lane


def _row_name(row):
    number, lane = row
    if lane < 0:
        return f"program {number}"
    return f"multiprocessor {number}" + (f", place {lane}" if lane else "")


class _Event(NamedTuple):
    """What a program has noted: so ordered, events of a program are in order of time."""

    time: int
    kind: int
    multiprocessor: int
    peer: int


def make_trace(recordings):
    """The Trace of the repetition that took the median time, from what ``record_operator`` returned on all ranks.

    Raises:
        RuntimeError: if a program has not recorded its start or its end
    """
    events = [recording["events"] for recording in recordings]
    for rank, repetitions in enumerate(events):
        for number, repetition in enumerate(repetitions):
            _check(repetition, f"rank {rank}, repetition {number}")
    count = len(events[0])
    lengths = [max(_length(of_rank[number]) for of_rank in events) for number in range(count)]
    chosen = sorted(range(count), key=lengths.__getitem__)[(count - 1) // 2]
    ahead, errors = zip(*offsets([recording["times"][chosen] for recording in recordings]))
    tick_ns = 1 if recordings[0]["gpu"] == "cpu" else min(_tick(of_rank[chosen]) for of_rank in events)
    ranks = [_programs(of_rank[chosen], ns) for of_rank, ns in zip(events, ahead)]
    zero = min(events[0].time for programs in ranks for events in programs)
    about = {
        **{name: value for name, value in recordings[0].items() if name not in ("events", "times")},
        "untraced_ms": [recording["untraced_ms"] for recording in recordings],
        "traced_ms": [recording["traced_ms"] for recording in recordings],
        "tick_ns": tick_ns,
        "clock_error_ns": [error + tick_ns * (rank > 0) for rank, error in enumerate(errors)],
        "repetitions": count,
    }
    return Trace(about, [_intervals(programs, zero) for programs in ranks])


def _check(events, where):
    times = events[..., 0]
    without = ((times[KINDS.index("starts")] == 0) | (times[KINDS.index("ends")] == 0)).sum()
    if without:
        raise RuntimeError(f"{where}: {without} of {times.shape[1]} programs have recorded no start or no end")


def _length(events):
    times = events[..., 0]
    return int(times.max() - times[KINDS.index("starts")].min())


def _tick(events):
    """The least step between two times of a rank."""
    times = np.unique(events[..., 0])
    steps = np.diff(times[times > 0])
    return int(steps.min()) if steps.size else 0


def _programs(events, ahead):
    """The _Events of each program, in order, by a clock that is not ahead."""
    return [
        sorted(_event(time - ahead, what) for time, what in events[:, program].tolist() if time)
        for program in range(events.shape[1])
    ]


def _event(time, what):
    peer = (what >> words.PEER_SHIFT.value & 0xFF) - 2
    return _Event(time, what & 0xFF, what >> words.MULTIPROCESSOR_SHIFT.value, peer)


def _intervals(programs, zero):
    """The intervals of a rank; a program's last event ends it."""
    found = []
    for program, (events, lane) in enumerate(zip(programs, _lanes(programs))):
        for event, following in zip(events, events[1:]):
            begin, end = event.time - zero, following.time - zero
            found.append(Interval(program, event.multiprocessor, lane, KINDS[event.kind], event.peer, begin, end))
    return found


def _lanes(programs):
    """For each program the first place of its multiprocessor that is free when it begins."""
    free_at = defaultdict(list)  # multiprocessor -> when each of its places becomes free
    lanes = [0] * len(programs)
    for program in sorted(range(len(programs)), key=lambda program: programs[program][0].time):
        first, last = programs[program][0], programs[program][-1]
        ends = free_at[first.multiprocessor]
        lanes[program] = next((lane for lane, end in enumerate(ends) if end <= first.time), len(ends))
        ends[lanes[program] : lanes[program] + 1] = [last.time]
    return lanes
