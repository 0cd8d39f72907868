"""A process group as the library sees it: who is in it, and how its ranks agree before they launch anything."""

import contextlib
import copy
import json
import os
import threading
import time
import weakref
from collections import defaultdict
from datetime import timedelta
from types import SimpleNamespace
from typing import TypeAlias

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tdkernels.caches import RecentCache, VersionedDict
from tdkernels.errors import PeerTimeoutError, PlanMismatchError
from tdkernels.symm.agreement import Agreement, conflict_key, counter_keys, describe
from tdkernels.symm.failure import Failure
from tdkernels.symm.record import read_record
from tdkernels.symm.session import MissingRank, meet
from tdkernels.symm.streams import StreamOrder
from tdkernels.symm.timeout import get_timeout
from tdkernels.symm.topology import likely_size, offer, topology_of

GroupLike: TypeAlias = dist.ProcessGroup | dist.DeviceMesh | None  # what operators take for ``group``


def resolve_group(group: GroupLike = None) -> dist.ProcessGroup:
    """The ProcessGroup meant by ``group``: a ProcessGroup, a one-dimensional DeviceMesh, or None for the world.

    Raises:
        ValueError: when there is no such group, it was destroyed, or this rank is not in it
        TypeError: otherwise
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("group: torch.distributed is not initialized; call torch.distributed.init_process_group first")
    if group is None:
        return c10d._get_default_group()
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group: a DeviceMesh must have one dimension, this one has {group.ndim}: {group}")
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"group: rank {dist.get_rank()} is not a member of it")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup, a DeviceMesh or None, not {type(group).__name__}")
    if group not in c10d._world.pg_map:
        raise ValueError("group: this process group was destroyed")
    return group


def resolve_group_if_any(operator: str, group: GroupLike) -> dist.ProcessGroup | None:
    """As ``resolve_group``. Returns None if no group is given and torch.distributed is not initialized.

    Raises:
        ValueError: as ``resolve_group``, or if WORLD_SIZE says that this process is not the only one
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        ranks = os.environ.get("WORLD_SIZE", "1")
        if ranks != "1":
            raise ValueError(
                f"{operator}: group: torch.distributed is not initialized, but WORLD_SIZE is {ranks}; call "
                "torch.distributed.init_process_group first"
            )
        return None
    return resolve_group(group)


_MAX_CALLS = 4096  # whose outcomes are kept; shapes may go on changing for ever
_launches = 0  # of all groups


def number_of_launches():
    """How many kernels of any group this process has launched."""
    return _launches


class GroupState:
    """What is kept for one process group, for as long as it lives: its store, agreed plans and workspaces."""

    def __init__(self, group, prefix="tdkernels"):
        self.name = group.group_name
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.workspaces = {}
        self.choices = VersionedDict()  # what has been agreed to run, see autotune.selection
        self.calls = RecentCache(_MAX_CALLS)  # see runtime.call_cache
        self.compiled_calls = {}  # {a call that torch.compile has traced: its configs}, where these must not change
        self.refusal = None  # the error of every call, in a process that is no rank of the group
        self.last_launch = 0, 0  # (thread, number of the launch among all of this process)
        self.tables = {}  # {id of a table: what errors say of its workspace}, see symm.workspace
        self._failures = {}
        self._stream_orders = {}
        self._store = c10d._get_process_group_store(group)
        self.members = dist.get_process_group_ranks(group)  # as ranks of the world
        self._prefix, self._has_met = f"{prefix}/{'-'.join(map(str, self.members))}", False
        self._turn = 0
        self._scratches = 0
        self._agreed = set()
        self._broken = None
        self.interrupted = None  # the error of every call after one that ended in the middle, see break_off
        self._topology = None

    @property
    def topology(self):
        """The Topology of the group; collective the first time."""
        self._know_topology("topology")
        return self._topology

    @property
    def local_world_size(self):
        return self.topology.local_world_size

    @property
    def likely_local_world_size(self):
        """As ``local_world_size``, but asks nobody: before the ranks have met, what the environment says."""
        return likely_size(self.world_size) if self._topology is None else self._topology.local_world_size

    def _know_topology(self, operator):
        """Find the nodes, before whatever it is that the ranks exchange first: they may begin with different things."""
        if self.refusal is not None:
            raise copy.copy(self.refusal)
        if self._topology is None:
            deadline = time.monotonic() + get_timeout()
            self._meet(operator, deadline)
            self._store.set(f"{self._prefix}/where/{self.rank}", offer())
            keys = [f"{self._prefix}/where/{peer}" for peer in range(self.world_size)]
            self._await(operator, keys, deadline)
            self._topology = topology_of(self.rank, [self._store.get(key).decode() for key in keys])

    def _meet(self, operator, deadline):
        """Agree on keys in the store that no group had before this one."""
        if not self._has_met:
            try:
                self._prefix = meet(self._store, self._prefix, self.rank, self.world_size, deadline)
            except MissingRank as error:
                raise self._lost(operator, error.rank) from error
            except RuntimeError as error:
                raise self._lost(operator, 0) from error
            self._has_met = True

    def check_consensus_cached(self, operator, fields):
        """``check_consensus``, unless all ranks have agreed on just this before; costs a look-up then."""
        key = (operator, *fields.items())
        if key not in self._agreed:
            self.check_consensus(operator, fields)
            self._agreed.add(key)

    def check_consensus(self, operator, fields, offer=None):
        """Return all ranks' offers when every rank has come here with the same operator and fields; collective.

        Goes through the group's store, so it needs no GPU and no collective that could hang itself.

        Raises:
            ValueError: on every rank when they differ
            PeerTimeoutError: when a rank does not come in time
        """
        known = [failure.error for failure in self._failures.values()]
        for error in (self.interrupted, *known):  # peers that know of it do not come
            if error is not None:
                raise copy.copy(error)
        try:
            texts = self.exchange(operator, json.dumps([{"operator": operator, **fields}, offer]))
        except PeerTimeoutError as error:
            raise error.asking(fields) from error.__cause__
        plans, offers = zip(*map(json.loads, texts), strict=True)
        if any(plan != plans[0] for plan in plans):
            raise in_step(ValueError(f"{operator}: the ranks disagree: " + _differences(plans)))
        return offers

    def exchange(self, operator, text):
        """All ranks' texts, in rank order; collective and bounded by the timeout."""
        if self._broken is not None:
            cause = copy.copy(self._broken)  # the original would keep the frames that it is raised through
            raise RuntimeError(
                f"{operator}: the ranks of this group lost step: rank {self.rank} waited for rank {cause.peer} in vain "
                f"at an agreement ({cause.operator}). Destroy the group and make a new one"
            ) from cause
        self._know_topology(operator)
        turn, self._turn = self._turn, self._turn + 1
        keys = [self._key(turn, peer) for peer in range(self.world_size)]
        self._store.set(keys[self.rank], text)
        Agreement(self, operator, turn, keys).await_all()
        texts = [self._store.get(key).decode() for key in keys]
        if turn > 0:
            # Every rank has posted this turn, so every rank has read the one before.
            self._store.delete_key(self._key(turn - 1, self.rank))
            if self.rank == 0:
                for key in counter_keys(self, turn - 1):
                    self._store.delete_key(key)
        return texts

    def barrier(self, operator):
        """Return when every rank has come here."""
        self.exchange(operator, "")

    def _await(self, operator, keys, deadline):
        """Return when the store has all keys, one of each rank."""
        try:
            self._store.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:  # what a store raises when the time is up, and when its server is gone
            raise self._lost(operator, self._first_missing(keys)) from error

    def _first_missing(self, keys):
        """The first rank whose key is not in the store; the first peer if the store is gone."""
        for peer, key in enumerate(keys):
            try:
                if not self._store.check([key]):
                    return peer
            except RuntimeError:
                break
        return int(self.rank == 0)

    def _lost(self, operator, peer):
        """The error of a rank that waited in vain for an agreement; the group is broken from now on."""
        calls = max(self._turn, 1)
        self._broken = PeerTimeoutError(operator, self.rank, peer, "agreement", calls, calls - 1, get_timeout())
        return copy.copy(self._broken)

    def _key(self, turn, peer):
        return f"{self._prefix}/{turn}/{peer}"

    def failure(self, device):
        """The Failure of this rank on a device; made on first use, and never while a CUDA graph is captured."""
        if device not in self._failures:
            self._failures[device] = Failure(device, self._error_of)
        return self._failures[device]

    def stream_order(self, device):
        """The StreamOrder of the group's launches on a device."""
        if device not in self._stream_orders:
            self._stream_orders[device] = StreamOrder(device)
        return self._stream_orders[device]

    def error_on(self, device):
        """The error of every call on a device: of a launch that has failed, or of a call that was interrupted; or None.

        If a launch of another group has failed on the device, its error once: what that launch did not compute may be
        an operand of this call.
        """
        if self.refusal is not None:
            return self.refusal
        failure = self._failures.get(device)
        if failure is None:
            return self.interrupted
        if failure.error is None and failure.device.is_set():
            source = failure.device.report()
            return failure.error or source or self.interrupted
        return failure.error or self.interrupted

    def _error_of(self, record, source):
        return read_record(self, record, source)

    def conflict_with(self, peer, call, description):
        """The error of a rank in a known call whose peer waits for the agreement on another; the peer hears of it."""
        turn = self._turn  # of the agreement that this rank has not come to
        key, conflict = self._key(turn, peer), conflict_key(self, turn)
        try:
            self._store.set(conflict, json.dumps([self.rank, description]))
            new = describe(self._store.get(key).decode()) if self._store.check([key]) else "another call"
        except RuntimeError:  # the store is gone
            new = "another call"
        return PlanMismatchError(
            f"{description.partition('(')[0]}: rank {self.rank} makes {description} as call {call} of its workspace, "
            f"while rank {peer} waits for the agreement on a call that is new to it, {new}"
        )

    def break_off(self, error):
        """Let every later call of this rank raise ``error``: its peers may be in the middle of a call."""
        self.interrupted = self.interrupted or error

    def count_launch(self):
        """Note that this thread launches a kernel of the group, see ``whole_call``."""
        global _launches
        _launches += 1
        self.last_launch = threading.get_ident(), _launches

    def end_abruptly(self, name, error):
        """Break the group on this rank after an exception between the launches of a call."""
        if not getattr(error, "in_step", False):
            self.break_off(
                RuntimeError(
                    f"{name}: {type(error).__name__} in the middle of a call on rank {self.rank}: {error}. Its peers "
                    "wait for the rest of the call; destroy the process group and make a new one"
                )
            )

    def check(self):
        """Raise the first error that a kernel of the group has recorded."""
        for workspace in self.workspaces.values():
            workspace.check(in_call=False)

    def close(self):
        for workspace in self.workspaces.values():
            workspace.close()
        self.workspaces.clear()


def in_step(error):
    """Mark an error that every rank of the group raises in the same place, so that they are in step after it."""
    error.in_step = True
    return error


def _differences(plans):
    """Name each field that differs, with the ranks that hold each value."""
    lines = []
    for name in dict.fromkeys(name for plan in plans for name in plan):
        ranks_by_value = defaultdict(list)
        for rank, plan in enumerate(plans):
            ranks_by_value[json.dumps(plan.get(name, "absent"))].append(rank)
        if len(ranks_by_value) > 1:
            held = ", ".join(f"{value} on rank{'s' * (len(r) > 1)} {_join(r)}" for value, r in ranks_by_value.items())
            lines.append(f"{name} is {held}")
    return "; ".join(lines)


def _join(ranks):
    return ", ".join(str(rank) for rank in ranks)


states: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def group_state(group):
    """The state kept for a (resolved) process group; made on first use, freed with the group."""
    state = states.get(group)
    if state is None:
        state = states[group] = GroupState(group)
        # At exit the operating system and the driver clean up; their order with ours is not known then.
        weakref.finalize(group, state.close).atexit = False
    return state


@contextlib.contextmanager
def scratch_state(group):
    """A state of its own for what may fail: within, launches use other workspaces, and break only those. Collective.

    The group's devices must be idle at the end, on all ranks. The group's own state is as it was before.
    """
    kept = group_state(group)
    kept._scratches += 1
    topology = kept.topology
    scratch = GroupState(group, f"{kept._prefix}/scratch{kept._scratches}")
    scratch._topology, scratch._has_met = topology, True
    states[group] = scratch
    try:
        yield scratch
    finally:
        states[group] = kept
        scratch.close()


# The same caches for operators that need no group.
alone = SimpleNamespace(choices=VersionedDict(), calls=RecentCache(_MAX_CALLS))


def caches_of(group):
    """What has ``choices`` and ``calls`` for a resolved group, or for None."""
    if group is None:
        return alone
    return states.get(group) or group_state(group)


def live_states():
    return list(states.values())


def _refuse_groups_of_the_parent():
    """In a process that was just forked: it has the stores and the memory of a rank, and would speak in its name."""
    for group in list(c10d._world.pg_map):
        group_state(group).refusal = RuntimeError(
            f"process {os.getpid()} was forked from rank {dist.get_rank(group)} of this group and is no rank itself; "
            "call the operators where the group was made, or start workers by spawn and give them a group of their own"
        )


os.register_at_fork(after_in_child=_refuse_groups_of_the_parent)
