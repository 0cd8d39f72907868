"""Convert the recorded events of kernels to intervals, for all ranks on the clock of rank 0."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tdkernels.lang import profile as words
from tdkernels.trace.clocks import offsets

KINDS = tuple(words.KINDS.value.split())
NO_PEER, ALL_PEERS = words.NO_PEER.value, words.ALL_PEERS.value


class Interval(NamedTuple):
    """The activity of a program from ``begin`` to ``end``.

    Attributes:
        program: Number of the program or work item.
        multiprocessor: Number of the multiprocessor; -1 if not known.
        lane: Number among the programs that run on the multiprocessor at the same time, from 0.
        kind: One of KINDS except "ends".
        peer: A rank, NO_PEER or ALL_PEERS.
        begin: Start in ns after the first program of all ranks started.
        end: End in ns, likewise.
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
    """The trace of one launch on all ranks.

    Attributes:
        about: Description of the launch, from ``record_operator`` on rank 0. In addition, "untraced_ms" and "traced_ms"
            are lists with a value for each rank, "tick_ns" is the smallest step of the clocks, "clock_error_ns" is a
            list with the maximum error of each rank's times relative to rank 0, and "repetitions" is the number of
            recorded launches.
        ranks: The intervals of each rank, ordered by program and then by time.
    """

    about: dict
    ranks: list

    @property
    def title(self) -> str:
        """Operator, shape, dtype, and the number and model of the devices."""
        a = self.about
        if "one_of" in a:
            return f"{a['operator']} {a['shape']} {a['dtype']} on {a['gpu']}, one of {a['one_of']} ranks in solo mode"
        place = f"{a['world_size']} CPU ranks" if a["gpu"] == "cpu" else f"{a['world_size']} x {a['gpu']}"
        return f"{a['operator']} {a['shape']} {a['dtype']} on {place}"

    def span(self, rank: int) -> tuple[int, int]:
        """Return the start of a rank's first program and the end of its last one, in ns."""
        return min(i.begin for i in self.ranks[rank]), max(i.end for i in self.ranks[rank])

    def is_by_warps(self, rank: int) -> bool:
        """Return whether different warps of a program were active at the same time."""
        # A file of an older version does not say it, and another rank may have run another kernel.
        return self.about.get("by_warps", False) and any(i.lane > 0 for i in self.ranks[rank])

    def rows(self, rank: int) -> dict[tuple[int, int], str]:
        """Return {row: name} in display order. A row is (multiprocessor, lane), or (program, -1) if that is unknown."""
        return {row: _row_name(row) for row in sorted({row_of(interval) for interval in self.ranks[rank]})}


def row_of(interval: Interval) -> tuple[int, int]:
    """Return the row in which an interval is shown. The intervals of a row do not overlap."""
    if interval.multiprocessor < 0:
        return interval.program, -1
    return interval.multiprocessor, interval.lane


def _row_name(row):
    number, lane = row
    if lane < 0:
        return f"program {number}"
    return f"multiprocessor {number}" + (f", place {lane}" if lane else "")


class _Event(NamedTuple):
    """A recorded event. The order of the fields sorts the events of a program by time, then by kind."""

    time: int
    kind: int
    multiprocessor: int
    peer: int


def make_trace(recordings: Sequence[dict]) -> Trace:
    """Return the Trace of the repetition with the median duration.

    Args:
        recordings: The results of ``record_operator`` on all ranks, in rank order.

    Raises:
        RuntimeError: If a program has not recorded its start or its end.
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
    """Return the smallest step between two times of a rank."""
    times = np.unique(events[..., 0])
    steps = np.diff(times[times > 0])
    return int(steps.min()) if steps.size else 0


def _programs(events, ahead):
    """Return the sorted _Events of each program, with times on the clock of rank 0."""
    return [
        sorted(_event(time - ahead, what) for time, what in events[:, program].tolist() if time)
        for program in range(events.shape[1])
    ]


def _event(time, what):
    peer = (what >> words.PEER_SHIFT.value & 0xFF) - 2
    return _Event(time, what & 0xFF, what >> words.MULTIPROCESSOR_SHIFT.value, peer)


def _intervals(programs, zero):
    """Return the intervals of a rank. Each event lasts until the next one of its program."""
    found = []
    for program, (events, lane) in enumerate(zip(programs, _lanes(programs))):
        for event, following in zip(events, events[1:]):
            begin, end = event.time - zero, following.time - zero
            found.append(Interval(program, event.multiprocessor, lane, KINDS[event.kind], event.peer, begin, end))
    return found


def _lanes(programs):
    """Assign each program to the first lane of its multiprocessor that is free when it starts."""
    free_at = defaultdict(list)  # multiprocessor -> times at which its lanes become free
    lanes = [0] * len(programs)
    for program in sorted(range(len(programs)), key=lambda program: programs[program][0].time):
        first, last = programs[program][0], programs[program][-1]
        ends = free_at[first.multiprocessor]
        lanes[program] = next((lane for lane, end in enumerate(ends) if end <= first.time), len(ends))
        ends[lanes[program] : lanes[program] + 1] = [last.time]
    return lanes
