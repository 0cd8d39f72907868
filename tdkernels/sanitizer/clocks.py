"""Vector clocks of threads, where a thread is a work item of a program of a launch, or a side-stream operation.

A clock is a dict. ``clock[thread number]`` is how far it has seen a thread; ``clock[rank, stream]`` is the number of
the last launch of a stream that it has seen to its end, which covers all threads of this launch and of those before it.
"""

from dataclasses import dataclass, field


def join(clock, other):
    """Let ``clock`` know all that ``other`` knows."""
    for key, value in other.items():
        if clock.get(key, -1) < value:
            clock[key] = value
    return clock


@dataclass
class Thread:
    """A sequence of accesses in program order.

    Attributes: number; rank, stream, launch; kernel; program and item, or what it is in words; clock, which leaves out
    the thread itself; now, its own time, which advances at each release; acquired {rank: (word, value, site)}, the last
    signal of each rank that it has acquired; released [(time, word, value, site)].
    """

    number: int
    rank: int
    stream: int
    launch: int
    kernel: str
    program: object
    item: object
    clock: dict
    now: int = 1
    acquired: dict = field(default_factory=dict)
    released: list = field(default_factory=list)

    def snapshot(self):
        """What another thread learns that acquires from this one now; later accesses of this one are not in it."""
        clock = {**self.clock, self.number: self.now}
        self.now += 1
        return clock


@dataclass(frozen=True)
class Access:
    """One read or write: by which thread, when in its time, at which line, of how many accesses the first."""

    thread: Thread
    time: int
    kind: str
    site: int

    def is_before(self, thread):
        """Whether the access happens before what a thread does now."""
        own = self.thread
        if own is thread:
            return True
        clock = thread.clock
        return clock.get(own.number, 0) >= self.time or clock.get((own.rank, own.stream), -1) >= own.launch


@dataclass(frozen=True)
class Release:
    """A value of a word: the clock that it carries, and who can acquire it."""

    clock: dict
    rank: int
    scope: str
    by_network: bool
    site: int

    def reaches(self, rank, scope, by_network):
        """Whether an acquire of this rank makes an edge: at system scope between ranks, by ``await_put`` for a put."""
        if self.by_network:
            return by_network
        return self.rank == rank or self.scope == scope == "SYSTEM"
