"""Vector clocks. A thread is a work item of a program of a launch, an access by the host, or a put of the network.

A clock is a dict. ``clock[thread number]`` is the time of a thread up to which its accesses are covered.
``clock[rank, stream]`` is the number of the last covered launch of a stream. It covers all threads of this launch and
of earlier ones.
"""

from dataclasses import dataclass, field


def join(clock: dict, other: dict) -> dict:
    """Set ``clock`` to the elementwise maximum of both clocks, and return it."""
    for key, value in other.items():
        if clock.get(key, -1) < value:
            clock[key] = value
    return clock


@dataclass
class Thread:
    """A sequence of accesses in program order.

    Attributes:
        number: Number of the thread.
        rank: Rank in the world.
        stream: MAIN or SIDE, or "network" for a put.
        launch: Number of the launch on this rank and stream.
        kernel: Name of the kernel, or "host".
        program: Program id (x, y, z); None for the host.
        item: Number of the work item, "end", "put" or None.
        clock: The clock, without an entry for the thread itself.
        now: The thread's own time, which advances with each release.
        acquired: {rank: (inode, offset, value, site)}, the last signal that the thread acquired from each rank.
        released: [(time, inode, offset, value, site)], the signals that the thread raised.
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

    def snapshot(self) -> dict:
        """Return the clock that a thread gets if it acquires from this one now, and advance the own time.

        The clock does not cover later accesses of this thread.
        """
        clock = {**self.clock, self.number: self.now}
        self.now += 1
        return clock


@dataclass(frozen=True)
class Access:
    """One read or write: its thread, the thread's time, the kind ("read" or "write") and the source line."""

    thread: Thread
    time: int
    kind: str
    site: int

    def is_before(self, thread: Thread) -> bool:
        """Return whether the access happens before the next access of a thread."""
        own = self.thread
        if own is thread:
            return True
        clock = thread.clock
        return clock.get(own.number, 0) >= self.time or clock.get((own.rank, own.stream), -1) >= own.launch


@dataclass(frozen=True)
class Release:
    """A release of a value to a word: the clock that it carries, and the properties that limit its acquires."""

    clock: dict
    rank: int
    scope: str
    by_network: bool
    site: int

    def reaches(self, rank: int, scope: str, by_network: bool) -> bool:
        """Return whether an acquire by a rank synchronizes with this release.

        Between ranks both sides need system scope. A put is only acquired by ``await_put``.
        """
        if self.by_network:
            return by_network
        return self.rank == rank or self.scope == scope == "SYSTEM"
