"""``record``: record the ranks of a group, put their logs together, and look for races."""

import contextlib
import json
import os
import pickle
import tempfile
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tdkernels import launch
from tdkernels.sanitizer.events import Recorder
from tdkernels.sanitizer.happens_before import Analysis
from tdkernels.sanitizer.hooks import ON_GPU, observed, restart_barriers
from tdkernels.sanitizer.report import RaceError
from tdkernels.symm.group import resolve_group

_TIMEOUT = timedelta(minutes=10)
_sessions: dict[str, int] = {}  # name of a group -> how many recordings it has had


class Races(list):
    """The races found, once the block of ``record`` has ended; ``events`` is the number of events of all ranks."""

    events = 0


@contextlib.contextmanager
def record(group=None, check=True):
    """Record what the CPU ranks of a group do in the block, and look for races at its end; collective.

    A race is two accesses to the same memory, at least one of them a write, that no signal, stream or collective
    orders. It is found whether or not the values were right in this run. Nothing is recorded outside the block, and
    without a block nothing costs anything.

    Args:
        group (ProcessGroup, DeviceMesh or None): The ranks; None means the world. Ranks that are not in it are not
            recorded, and neither are the edges that signals of these ranks make.
        check (bool): Whether to raise if there is a race.

    Yields:
        Races: A list that holds a ``Race`` for each pair of lines when the block has ended, the same on all ranks.

    Raises:
        RaceError: If a race was found and ``check`` is True, on every rank of the group.
        RuntimeError: If the rank's device is a GPU.

    If the block raises an exception on a rank, its log is not complete: then no rank looks for races.

    Example:
        :

        with tdkernels.sanitizer.record() as races:
            y = my_operator(x)
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


def reject_gpus():
    """Raise RuntimeError in a rank that runs on a GPU."""
    if launch._rank_device is not None and launch._rank_device.type != "cpu":
        raise RuntimeError(ON_GPU)


class Meeting:
    """Texts that the ranks of a group pass each other through its store."""

    def __init__(self, group):
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        number = _sessions[group.group_name] = _sessions.get(group.group_name, 0) + 1
        self._store, self._prefix = c10d._get_process_group_store(group), f"tdkernels sanitizer/{number}"

    @property
    def is_first(self):
        return self.rank == 0

    def post(self, what, text):
        self._store.set(f"{self._prefix}/{what}/{self.rank}", text)

    def text(self, what, rank):
        key = f"{self._prefix}/{what}/{rank}"
        self._store.wait([key], _TIMEOUT)
        return self._store.get(key).decode()

    def texts(self, what, text):
        self.post(what, text)
        return [self.text(what, rank) for rank in range(len(self.ranks))]


def _analyse(meeting, recorder):
    """What rank 0 finds in the logs of all ranks; None if a rank has none. CPU ranks share a host, and so files."""
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
            except Exception as error:  # the others wait for it
                found = error
            with open(path, "wb") as file:
                pickle.dump(found, file)
        meeting.texts("found", "")
        with open(paths[0], "rb") as file:
            found = pickle.load(file)
        meeting.texts("read", "")  # rank 0's file goes with its folder
    if isinstance(found, Exception):
        raise found
    return found


def _find(paths):
    logs = {}
    for rank, path in paths.items():
        with open(path, "rb") as file:
            logs[rank] = pickle.load(file)
    return {"races": Analysis(logs).run(), "events": sum(len(log["events"]) for log in logs.values())}
