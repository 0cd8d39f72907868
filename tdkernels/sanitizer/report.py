"""Race reports: the two accesses, the location in memory, and the signals that should have ordered them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tdkernels.sanitizer.locations import place_of

if TYPE_CHECKING:
    from tdkernels.sanitizer.clocks import Access

_SHOWN = 10  # maximum number of races in the text of an error


@dataclass
class AccessReport:
    """One of the two accesses of a race.

    Attributes:
        kind: "read" or "write".
        file: Source file of the access in the operator.
        line: Line number in ``file``.
        function: Name of the function.
        rank: Rank in the world.
        kernel: Name of the kernel; "host" for a copy or read by the host.
        launch: Number of the launch on this rank and stream, counted from the start of the recording.
        program: Program id (x, y, z), or None for the host.
        item: Number of the work item; "end" after the call of ``finish``, "put" for a put of the network, None if the
            kernel has no work items.
    """

    kind: str
    file: str
    line: int
    function: str
    rank: int
    kernel: str
    launch: int
    program: tuple | None
    item: int | str | None

    def __str__(self):
        where = f"{_short(self.file)}:{self.line} in {self.function}, rank {self.rank}"
        if self.program is None:
            return f"{self.kind:5} {where}, by the host"
        program = self.program[0] if not any(self.program[1:]) else self.program
        launch = "" if self.item == "put" else f" launch {self.launch},"
        item = {None: "", "end": ", after its items", "put": ", put by the network"}.get(
            self.item, f", work item {self.item}"
        )
        return f"{self.kind:5} {where}, {self.kernel},{launch} program {program}{item}"


@dataclass
class Race:
    """Two accesses to the same memory, at least one of them a write, that no signal orders.

    Attributes:
        first: The access of the earlier launch; for equal launches, the write.
        second: The other access.
        workspace: The workspace, and the rank that owns the memory.
        place: The part of the workspace.
        offset: Offset of the first conflicting byte in that part, in bytes.
        acquired: Text: the last signal from the rank of the first access that the work item of the second access
            acquired before that access.
        released: Text: the first signal that the work item of the first access raised after that access.
        times: Number of races found between these two source lines.
    """

    first: AccessReport
    second: AccessReport
    workspace: str
    place: str
    offset: int
    acquired: str
    released: str
    times: int = 1

    @classmethod
    def of(
        cls, analysis: Any, first: "Access", second: "Access", inode: int, offset: int, times: int,
    ) -> "Race":
        """Create the report for two accesses of an ``Analysis`` that conflict at a location."""
        workspace, place, byte = place_of(analysis.names, inode, offset)
        return cls(
            _access(analysis, first), _access(analysis, second), workspace, place, byte,
            _acquired(analysis, first.thread.rank, second), _released(analysis, first), times,
        )

    def __str__(self) -> str:
        times = "" if self.times == 1 else f" ({self.times} times)"
        return (
            f"race in {self.workspace}, {self.place} {self.offset}{times}\n"
            f"  {self.first}\n  {self.second}\n  {self.released}\n  {self.acquired}"
        )


class RaceError(RuntimeError):
    """Races were found.

    Attributes:
        races: The list of ``Race`` objects. The text of the error shows the first 10.
    """

    def __init__(self, races: Sequence[Race]) -> None:
        shown = "\n".join(map(str, races[:_SHOWN]))
        more = f"\nand {len(races) - _SHOWN} more" if len(races) > _SHOWN else ""
        super().__init__(f"{len(races)} race{'s' * (len(races) > 1)} found\n{shown}{more}")
        self.races = races

    def __reduce__(self):
        return type(self), (self.races,)


def _access(analysis, access):
    file, line, function = analysis.site(access)
    thread = access.thread
    return AccessReport(
        access.kind, file or "?", line, function, thread.rank, thread.kernel, thread.launch, thread.program, thread.item
    )


def _acquired(analysis, rank, access):
    thread = access.thread
    if rank not in thread.acquired:
        source = "another program of its rank" if thread.rank == rank else f"rank {rank}"
        return f"acquired before the second access: no signal from {source} was acquired by this work item"
    inode, offset, value, site = thread.acquired[rank]
    return f"acquired before the second access: {_signal(analysis, thread.rank, inode, offset, value, site)}"


def _released(analysis, access):
    for time, *release in access.thread.released:
        if time >= access.time:
            return f"released after the first access: {_signal(analysis, access.thread.rank, *release)}"
    return "released after the first access: no signal by this work item"


def _signal(analysis, rank, inode, offset, value, site):
    workspace, place, _ = place_of(analysis.names, inode, offset)
    file, line, _ = analysis.site_of(rank, site)
    name = f"a private word of rank {rank}" if inode == 0 else f"{place} in {workspace}"
    return f"{name} = {value} at {_short(file or '?')}:{line}"


def _short(file):
    """Return the path from the folder of the package, the tests or the examples on, or else only the file name."""
    parts = Path(file).parts
    for root in ("tdkernels", "tests", "examples"):
        if root in parts:
            return "/".join(parts[len(parts) - 1 - parts[::-1].index(root) :])
    return "/".join(parts[-1:])
