"""Process groups: resolution of the ``group`` argument, per-group state, and consensus checks between ranks."""

import contextlib
import copy
import json
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tdkernels.caches import RecentCache, VersionedDict
from tdkernels.errors import PeerTimeoutError, PlanMismatchError
from tdkernels.symm.agreement import Agreement, conflict_key, counter_keys, describe
from tdkernels.symm.early_error import raise_early_errors
from tdkernels.symm.failure import Failure
from tdkernels.symm.record import read_record
from tdkernels.symm.session import MissingRank, meet
from tdkernels.symm.shared_settings import shared_fields
from tdkernels.symm.streams import StreamOrder
from tdkernels.symm.timeout import get_timeout
from tdkernels.symm.topology import likely_size, offer, topology_of

if TYPE_CHECKING:
    from tdkernels.symm.topology import Topology

GroupLike: TypeAlias = dist.ProcessGroup | dist.DeviceMesh | None  # type of the ``group`` argument of operators


def resolve_group(group: GroupLike = None) -> dist.ProcessGroup:
    """Return the ProcessGroup for the ``group`` argument of an operator.

    Args:
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the world.

    Raises:
        ValueError: If torch.distributed is not initialized, the mesh has several dimensions, the group was destroyed,
            or this rank is not in it.
        TypeError: If ``group`` has another type.
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
    """Resolve ``group`` as ``resolve_group`` does, or return None for a single process without torch.distributed.

    Raises:
        ValueError, TypeError: As ``resolve_group``. ValueError also if WORLD_SIZE is not 1.
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


_MAX_CALLS = 4096  # entries of a call cache, which is bounded because shapes may change without end
_launches = 0  # of all groups


def number_of_launches() -> int:
    """Return how many collective kernels this process has launched, over all groups."""
    return _launches


class GroupState:
    """State of one process group while the group exists: its store, consensus checks, workspaces and errors."""

    has_link = True  # if not, ``link_rate`` is that of a model
    link_rate: float | None = None  # bytes per second
    workspace_class: type | None = None  # None: Workspace

    def __init__(self, group, prefix="tdkernels"):
        self.name = group.group_name
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.workspaces = {}
        self.choices = VersionedDict()  # configs that all ranks have agreed on, see autotune.selection
        self.calls = RecentCache(_MAX_CALLS)  # see runtime.call_cache
        self.compiled_calls = {}  # {call that torch.compile has traced: its configs, which must not change}
        self.refusal = None  # the error of every call in a process that was forked from a rank
        self.last_launch = 0, 0  # (thread, number of the launch among those of this process)
        self.tables = {}  # {id of a context table: its record.Table}, see symm.workspace
        self.call_in_progress = "", 0  # see early_error.part_of_call
        self._failures = {}
        self._stream_orders = {}
        self._store = c10d._get_process_group_store(group)
        self.members = dist.get_process_group_ranks(group)  # ranks in the world
        self._prefix, self._has_met = f"{prefix}/{'-'.join(map(str, self.members))}", False
        self._turn = 0
        self._scratches = 0
        self._agreed = set()
        self._broken = None
        self.interrupted = None  # the error of every call after an interrupted one, see break_off
        self._topology = None

    @property
    def topology(self) -> "Topology":
        """The Topology of the group. The first access is collective."""
        self._discover_topology("topology")
        return self._topology

    @property
    def local_world_size(self) -> int:
        """The number of ranks on a node. The first access is collective."""
        return self.topology.local_world_size

    @property
    def likely_local_world_size(self) -> int:
        """The ``local_world_size`` without communication: if the topology is not known yet, an estimate."""
        return likely_size(self.world_size) if self._topology is None else self._topology.local_world_size

    def _discover_topology(self, operator):
        """Exchange the locations of all ranks. It precedes any other exchange, which may differ between the ranks."""
        if self.refusal is not None:
            raise copy.copy(self.refusal)
        if self._topology is None:
            deadline = time.monotonic() + get_timeout()
            self._join_session(operator, deadline)
            self._store.set(f"{self._prefix}/where/{self.rank}", offer())
            keys = [f"{self._prefix}/where/{peer}" for peer in range(self.world_size)]
            self._await(operator, keys, deadline)
            self._topology = topology_of(self.rank, [self._store.get(key).decode() for key in keys])

    def _join_session(self, operator, deadline):
        """Get a prefix for keys in the store that no earlier group has used."""
        if not self._has_met:
            try:
                self._prefix = meet(self._store, self._prefix, self.rank, self.world_size, deadline)
            except MissingRank as error:
                raise self._lost(operator, error.rank) from error
            except RuntimeError as error:
                raise self._lost(operator, 0) from error
            self._has_met = True

    def check_consensus_cached(self, operator: str, fields: Mapping[str, Any]) -> None:
        """Run ``check_consensus``, unless it has succeeded before with the same arguments, which costs a lookup."""
        key = (operator, *fields.items(), *shared_fields().items())
        if key not in self._agreed:
            self.check_consensus(operator, fields)
            self._agreed.add(key)

    def check_consensus(self, operator: str, fields: Mapping[str, Any], offer: Any = None) -> tuple:
        """Check that all ranks pass the same operator and fields, and return all ranks' offers. Collective.

        It uses the group's store, so it needs no GPU and no collective that could hang. ``offer`` may differ between
        ranks. The offers are returned in rank order. Fields and offers must be JSON-serializable.

        Raises:
            ValueError: On every rank, if the operator or a field differs. Also an early error, see ``early_error``.
            PeerTimeoutError: If a rank does not call it within the timeout.
        """
        fields = {**fields, **shared_fields()}
        known = [failure.error for failure in self._failures.values()]
        for error in (self.interrupted, *known):  # peers that know of it do not take part
            if error is not None:
                raise copy.copy(error)
        raise_early_errors(self)
        try:
            texts = self.exchange(operator, json.dumps([{"operator": operator, **fields}, offer]))
        except PeerTimeoutError as error:
            raise error.asking(fields) from error.__cause__
        plans, offers = zip(*map(json.loads, texts), strict=True)
        if any(plan != plans[0] for plan in plans):
            raise in_step(ValueError(f"{operator}: the ranks disagree: " + _differences(plans)))
        return offers

    def exchange(self, operator: str, text: str) -> list[str]:
        """Return the texts of all ranks in rank order. Collective, and bounded by the timeout."""
        if self._broken is not None:
            cause = copy.copy(self._broken)  # raising the original would keep the frames that it passes through
            raise RuntimeError(
                f"{operator}: the ranks of this group are out of step: rank {self.rank} timed out waiting for rank "
                f"{cause.peer} in a consensus check ({cause.operator}). Destroy the group and make a new one"
            ) from cause
        self._discover_topology(operator)
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

    def barrier(self, operator: str) -> None:
        """Return when every rank has called this. Host only: it does not wait for devices."""
        self.exchange(operator, "")

    def _await(self, operator, keys, deadline):
        """Return when the store has all keys. There is one for each rank."""
        try:
            self._store.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:  # a store raises it at the timeout, and if its server is gone
            raise self._lost(operator, self._first_missing(keys)) from error

    def _first_missing(self, keys):
        """Return the first rank whose key is not in the store, or the first peer if the store is gone."""
        for peer, key in enumerate(keys):
            try:
                if not self._store.check([key]):
                    return peer
            except RuntimeError:
                break
        return int(self.rank == 0)

    def _lost(self, operator, peer):
        """Return the error of an exchange in which ``peer`` was missing, and break the group."""
        calls = max(self._turn, 1)
        self._broken = PeerTimeoutError(operator, self.rank, peer, "agreement", calls, calls - 1, get_timeout())
        return copy.copy(self._broken)

    def _key(self, turn, peer):
        return f"{self._prefix}/{turn}/{peer}"

    def failure(self, device) -> Failure:
        """Return the Failure of this rank on a device. The first call creates it, never during CUDA graph capture."""
        if device not in self._failures:
            self._failures[device] = Failure(device, self._error_of)
        return self._failures[device]

    def stream_order(self, device) -> StreamOrder:
        """Return the StreamOrder of the group's launches on a device."""
        if device not in self._stream_orders:
            self._stream_orders[device] = StreamOrder(device)
        return self._stream_orders[device]

    def error_on(self, device) -> Exception | None:
        """Return the error that every call on a device raises: of a failed launch or an interrupted call, or None.

        If a launch of another group has failed on the device, its error is returned once, because the missing output of
        that launch may be an operand of this call.
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

    def conflict_with(self, peer: int, call: int, description: str) -> PlanMismatchError:
        """Return the error of a known call whose peer waits in the consensus check of another call. Notify the peer."""
        turn = self._turn  # of the exchange that this rank has not joined
        key, conflict = self._key(turn, peer), conflict_key(self, turn)
        try:
            self._store.set(conflict, json.dumps([self.rank, description]))
            new = describe(self._store.get(key).decode()) if self._store.check([key]) else "another call"
        except RuntimeError:  # the store is gone
            new = "another call"
        return PlanMismatchError(
            f"{description.partition('(')[0]}: rank {self.rank} makes {description} as call {call} of its workspace, "
            f"while rank {peer} waits in the consensus check of a new call, {new}"
        )

    def break_off(self, error: Exception) -> None:
        """Make every later call of this rank raise ``error``, because its peers may be in the middle of a call."""
        self.interrupted = self.interrupted or error

    def count_launch(self) -> None:
        """Record that this thread launches a kernel of the group, see ``whole_call``."""
        global _launches
        _launches += 1
        self.last_launch = threading.get_ident(), _launches

    def expect_new_kernels(self) -> None:
        """Prepare for calls that load other kernels than the calls before. Only solo mode has anything to prepare."""

    def end_abruptly(self, name: str, error: BaseException) -> None:
        """Break the group on this rank after an exception between the launches of a call, if it is not ``in_step``."""
        if not getattr(error, "in_step", False):
            self.break_off(
                RuntimeError(
                    f"{name}: {type(error).__name__} in the middle of a call on rank {self.rank}: {error}. Its peers "
                    "wait for the rest of the call; destroy the process group and make a new one"
                )
            )

    def check(self) -> None:
        """Raise the first error that a kernel of the group has recorded."""
        for workspace in self.workspaces.values():
            workspace.check(in_call=False)

    def close(self) -> None:
        """Free the memory of all workspaces. It is a local operation."""
        for workspace in self.workspaces.values():
            workspace.close()
        self.workspaces.clear()


def in_step(error):
    """Mark an error that every rank of the group raises at the same place, so that the ranks stay in step."""
    error.in_step = True
    return error


def _differences(plans):
    """Describe each field that differs between ranks: its values and their ranks."""
    lines = []
    for name in dict.fromkeys(name for plan in plans for name in plan):
        ranks_by_value = defaultdict(list)
        for rank, plan in enumerate(plans):
            ranks_by_value[json.dumps(plan.get(name, "absent"))].append(rank)
        if len(ranks_by_value) > 1:
            held = [f"{v} on rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}" for v, r in ranks_by_value.items()]
            lines.append(f"{name} is {', '.join(held)}")
    return "; ".join(lines)


states: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def group_state(group: dist.ProcessGroup) -> GroupState:
    """Return the state of a resolved group. The first call creates it; it is freed with the group."""
    state = states.get(group)
    if state is None:
        state = states[group] = GroupState(group)
        # Not at exit: the operating system and the driver free everything then, in an unknown order.
        weakref.finalize(group, state.close).atexit = False
    return state


@contextlib.contextmanager
def scratch_state(group):
    """Give a group a temporary state within a ``with`` block, for launches that may fail. Collective.

    Launches within the block use other workspaces, and their failures do not affect the group's own state, which is
    restored at the end. The group's devices must be idle at the end of the block, on all ranks.
    """
    kept = group_state(group)
    kept._scratches += 1
    topology = kept.topology
    scratch = type(kept)(group, f"{kept._prefix}/scratch{kept._scratches}")
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
    """Return the object with the caches ``choices`` and ``calls`` of a resolved group, or of None."""
    if group is None:
        return alone
    return states.get(group) or group_state(group)


def live_states() -> list[GroupState]:
    """Return the states of all groups that exist."""
    return list(states.values())


def _reject_groups_after_fork():
    """Make all groups unusable in a forked process: it shares stores and memory with its parent, which is the rank."""
    for group in list(c10d._world.pg_map):
        group_state(group).refusal = RuntimeError(
            f"process {os.getpid()} was forked from rank {dist.get_rank(group)} of this group and is no rank itself; "
            "call the operators where the group was made, or start workers by spawn and give them a group of their own"
        )


os.register_at_fork(after_in_child=_reject_groups_after_fork)
