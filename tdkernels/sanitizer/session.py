"""``record``: record the ranks of a group, merge their logs, and search for races."""

import contextlib
import json
import os
import pickle
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tdkernels import launch
from tdkernels.sanitizer.events import Recorder
from tdkernels.sanitizer.happens_before import Analysis
from tdkernels.sanitizer.hooks import ON_GPU, observed, restart_barriers
from tdkernels.sanitizer.report import RaceError
from tdkernels.symm.group import resolve_group

if TYPE_CHECKING:
    from tdkernels.symm.group import GroupLike

_TIMEOUT = timedelta(minutes=10)
_sessions: dict[str, int] = {}  # {name of a group: number of its recordings}


class Races(list):
    """List of the races that ``record`` found. It is filled when the block ends.

    Attributes:
        events: Number of recorded events of all ranks.
    """

    events = 0


@contextlib.contextmanager
def record(group: "GroupLike" = None, check: bool = True) -> Iterator[Races]:
    """Record the memory accesses of a group's CPU ranks in a ``with`` block, and search for races at its end.

    Collective over ``group``. A race is two accesses to the same memory, at least one of them a write, that no signal,
    stream or collective orders. It is found whether or not the values were right in this run. Nothing is recorded
    outside the block, and there is no overhead then. If the block raises an exception on a rank, the log of that rank
    is incomplete, and no rank searches for races.

    Args:
        group: The ranks: a ProcessGroup, a one-dimensional DeviceMesh, or None for the world. Other ranks are not
            recorded, and their signals do not order any accesses.
        check: Whether to raise RaceError if a race is found.

    Yields:
        Races: A list that is filled when the block ends. It has a ``Race`` for each pair of source lines, and is the
            same on all ranks.

    Raises:
        RaceError: If a race was found and ``check`` is True, on every rank of the group.
        RuntimeError: If the rank's device is a GPU.

    Example:
        >>> with tdkernels.sanitizer.record() as races:
        ...     y = my_operator(x)
    """
    reject_gpus()
    group = resolve_group(group)
    meeting = Meeting(group)
    races = Races()
    meeting.texts("begin", "")
    restart_barriers()
    recorder = Recorder()
    try:
        with observed(recorder):
            yield races
    except BaseException:
        meeting.post("end", json.dumps(None))
        raise
    found = _analyse(meeting, recorder)
    if found is None:
        return
    races.extend(found["races"])
    races.events = found["events"]
    if races and check:
        raise RaceError(list(races))


def reject_gpus() -> None:
    """Raise RuntimeError if this rank runs on a GPU."""
    if launch._rank_device is not None and launch._rank_device.type != "cpu":
        raise RuntimeError(ON_GPU)


class Meeting:
    """Exchange of texts between the ranks of a group, through the group's store."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        number = _sessions[group.group_name] = _sessions.get(group.group_name, 0) + 1
        self._store, self._prefix = c10d._get_process_group_store(group), f"tdkernels sanitizer/{number}"

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of the group."""
        return self.rank == 0

    def post(self, what: str, text: str) -> None:
        """Store this rank's text under a name."""
        self._store.set(f"{self._prefix}/{what}/{self.rank}", text)

    def text(self, what: str, rank: int) -> str:
        """Wait for the text that a rank has stored under a name, and return it."""
        key = f"{self._prefix}/{what}/{rank}"
        self._store.wait([key], _TIMEOUT)
        return self._store.get(key).decode()

    def texts(self, what: str, text: str) -> list[str]:
        """Store this rank's text under a name and return the texts of all ranks. Collective."""
        self.post(what, text)
        return [self.text(what, rank) for rank in range(len(self.ranks))]


def _analyse(meeting, recorder):
    """Analyze the logs of all ranks on rank 0 and return the result on every rank; None if a log is missing.

    The logs and the result are passed in files, because CPU ranks share a host.
    """
    with tempfile.TemporaryDirectory(prefix="tdkernels-sanitizer-") as folder:
        path = os.path.join(folder, "log")
        with open(path, "wb") as file:
            pickle.dump(recorder.log(), file)
        paths = [json.loads(text) for text in meeting.texts("end", json.dumps(path))]
        if None in paths:
            return None
        if meeting.is_first:
            try:
                found = _find(dict(zip(meeting.ranks, paths)))
            except Exception as error:  # passed to the other ranks, which wait for the result
                found = error
            with open(path, "wb") as file:
                pickle.dump(found, file)
        meeting.texts("found", "")
        with open(paths[0], "rb") as file:
            found = pickle.load(file)
        meeting.texts("read", "")  # rank 0 deletes its folder, and the file in it, after all ranks have read the file
    if isinstance(found, Exception):
        raise found
    return found


def _find(paths):
    logs = {}
    for rank, path in paths.items():
        with open(path, "rb") as file:
            logs[rank] = pickle.load(file)
    return {"races": Analysis(logs).run(), "events": sum(len(log["events"]) for log in logs.values())}
