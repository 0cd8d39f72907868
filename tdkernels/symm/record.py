"""Conversion of the failure record that a failed launch writes (``lang.failure_record``) to an exception."""

from typing import NamedTuple

from tdkernels.errors import PeerFailedError, PeerTimeoutError, PlanMismatchError
from tdkernels.lang import context as words
from tdkernels.lang import failure_record as records

_WORD = 8
_PLANS = 1 << words.PLAN_BITS.value  # signal value = call number * _PLANS + plan id


class Table(NamedTuple):
    """Description of a workspace's context table, for error messages. It is kept after the table was replaced."""

    workspace: object  # weak reference to the workspace
    name: str
    base: int  # address of this rank's buffer
    half_signals: int


def read_record(state, record, source):
    """Return the exception for a failure record of a group.

    Args:
        state: The GroupState.
        record: Kind, peer, address of the signal, expected value, value seen, and id of the context table.
        source: The error of another group that made launches of this group void, or None.
    """
    kind, *rest, number = record
    table = state.tables.get(number)
    workspace = table and table.workspace()
    name = table.name if table else state.name
    if kind == records.RECORD_VOID.value:
        cause = "" if source is None else f": {source}"
        return RuntimeError(
            f"{name}: rank {state.rank} launched this call after another group had failed on the same device, so it "
            f"did not run, and its output is undefined{cause}"
        )
    if workspace is None:
        return RuntimeError(f"{name}: a launch of this group has failed on rank {state.rank}")
    return _of_workspace(workspace, table, kind, *rest)


def _of_workspace(workspace, table, kind, peer, address, expected, seen):
    signal, rank, timeout_s = _signal_name(table, address), workspace.rank, workspace.timeout_s
    if kind == records.RECORD_TIMEOUT.value:
        error = PeerFailedError if workspace.status_of(peer) == words.STATUS_FAILED.value else PeerTimeoutError
        return error(workspace.name, rank, peer, signal, expected, seen, timeout_s)
    if kind == records.RECORD_PLAN_TIMEOUT.value:
        return _of_wait(workspace, peer, signal, expected, seen)
    if kind == records.RECORD_PEER_FAILED.value:
        return PeerFailedError(workspace.name, rank, peer, signal, expected, seen, timeout_s)
    if kind == records.RECORD_OVERLAP.value:
        return RuntimeError(
            f"{workspace.name}: two launches of one workspace were in flight together on rank {rank}: {seen} "
            f"programs had started where the launch has {expected}. Order the calls and the CUDA graph replays of "
            "a group on each rank: on one stream, or by events"
        )
    call, plan = divmod(expected, _PLANS)
    return PlanMismatchError(
        f"{workspace.plan_key(plan)[0]}: rank {peer} made call {call} with another shape, dtype or config than rank "
        f"{rank}: {_describe(workspace, seen % _PLANS)} there, {_describe(workspace, plan)} here"
    )


def _of_wait(workspace, peer, signal, expected, seen):
    """Return the error of a wait that timed out. The peer's status word may give the cause."""
    call, plan = divmod(expected, _PLANS)
    status = workspace.status_of(peer)
    if _PLANS <= status <= call * _PLANS:
        return workspace.group.conflict_with(peer, call, _describe(workspace, plan))
    kind = PeerFailedError if status == words.STATUS_FAILED.value else PeerTimeoutError
    operator = workspace.plan_key(plan)[0]
    return kind(operator, workspace.rank, peer, signal, call, seen // _PLANS, workspace.timeout_s)


def _describe(workspace, plan):
    operator, *fields = workspace.plan_key(plan)
    return f"{operator}({', '.join(f'{name}={value}' for name, value in fields)})"


def _signal_name(table, address):
    """Return the name of the word at an address of a record."""
    index = (address - table.base) // _WORD
    if not 0 <= index < words.SIGNALS_BEGIN.value + 2 * table.half_signals:
        return "between programs of this rank"
    if index < words.MAX_RANKS.value:
        return f"ready[{index}]"
    if index < words.SIGNALS_BEGIN.value:
        return f"status[{index - words.MAX_RANKS.value}]"
    half, number = divmod(index - words.SIGNALS_BEGIN.value, table.half_signals)
    return f"{number} of half {half}"
