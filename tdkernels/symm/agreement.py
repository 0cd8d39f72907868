"""The wait of a rank for its peers at an agreement, and its notice to peers that are in another call.

A rank that makes a call for the first time waits here, on the host, for all ranks. If a peer has made a known call
instead, its kernel waits for this rank, and both would wait until the timeout. So after a moment this rank posts a
notice, a status word in the memory of its peers: the number of the first call of each workspace that it has not made. A
kernel that waits for that call, or for a later one, gives up at once, and its host names both calls.
"""

import json
import time

import torch

from tdkernels.errors import PlanMismatchError
from tdkernels.symm.timeout import get_timeout

_PATIENCE_S = 0.2  # before a rank posts a notice, for which it waits for its device
_POLL_S = 0.05


class Agreement:
    """One wait of a rank until every rank has posted its key.

    Args:
        state: the GroupState.
        operator: for errors.
        turn: number of the exchange.
        keys: in the store, one of each rank.
    """

    def __init__(self, state, operator, turn, keys):
        self._state, self._store = state, state._store
        self._operator, self._keys = operator, keys
        self._announced, self._withdrawn = counter_keys(state, turn)
        self._conflict = conflict_key(state, turn)
        self._deadline = time.monotonic() + get_timeout()

    def await_all(self):
        """Return when all keys are there.

        Raises:
            PeerTimeoutError: at the timeout.
            PlanMismatchError: if a peer has found that it is in another call.
        """
        try:
            if not self._all_come(_PATIENCE_S):
                self._await_late_peers()
            self._await_withdrawals()
        except PlanMismatchError:
            raise
        except RuntimeError as error:  # the server of the store is gone
            raise self._state._lost(self._operator, self._state._first_missing(self._keys)) from error

    def _await_late_peers(self):
        if self._announce():
            while not self._all_come(_POLL_S):
                self._raise_conflict()
                if time.monotonic() >= self._deadline:
                    raise self._state._lost(self._operator, self._state._first_missing(self._keys))
            self._post(False)
        self._store.add(self._withdrawn, 1)

    def _all_come(self, seconds):
        """Whether all keys are there, after at most so many seconds."""
        until = min(time.monotonic() + seconds, self._deadline)
        return poll(lambda: self._store.check(self._keys), until)

    def _announce(self):
        """Post a notice to the peers, unless all keys are there by now; return whether it was posted.

        A rank reads the count of notices after it has found all keys. So either it sees the count of this rank and
        waits until the notice is withdrawn, or this rank finds all keys here.
        """
        _synchronize(self._state)
        self._store.add(self._announced, 1)
        if self._store.check(self._keys):
            return False
        self._post(True)
        return True

    def _post(self, is_waiting):
        for workspace in self._state.workspaces.values():
            workspace.post_status(is_waiting)
        _synchronize(self._state)

    def _await_withdrawals(self):
        """Return when all notices are withdrawn: they would end waits of the calls that follow."""
        announced = self._store.add(self._announced, 0)
        if not poll(lambda: self._store.add(self._withdrawn, 0) >= announced, self._deadline):
            raise self._state._lost(self._operator, int(self._state.rank == 0))

    def _raise_conflict(self):
        if self._store.check([self._conflict]):
            rank, call = json.loads(self._store.get(self._conflict).decode())
            own = describe(self._store.get(self._keys[self._state.rank]).decode())
            error = PlanMismatchError(
                f"{self._operator}: rank {self._state.rank} waits for the agreement on a call that is new to it, "
                f"{own}, while rank {rank} makes {call}, which it knows"
            )
            self._state.break_off(error)
            raise error


def poll(condition, until):
    """Whether a condition came to hold by a time on ``time.monotonic``'s clock.

    Not by the store's own wait, which logs a warning each time that it ends in vain.
    """
    pause = 0.0002
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, 0.02)
    return True


def counter_keys(state, turn):
    """Where ranks count, in the store, the notices that they have announced and withdrawn at an agreement."""
    return [f"{state._prefix}/{word}/{turn}" for word in ("announced", "withdrawn")]


def conflict_key(state, turn):
    """Where a rank says, in the store, which known call it makes while others wait for an agreement."""
    return f"{state._prefix}/conflict/{turn}"


def describe(text):
    """A posted text as the call that it is about."""
    try:
        (fields, *_) = json.loads(text)
        fields = dict(fields)
        return f"{fields.pop('operator')}({', '.join(f'{name}={value}' for name, value in fields.items())})"
    except (ValueError, TypeError, KeyError):
        return "a barrier, or an allocation of symmetric memory"


def _synchronize(state):
    for device in {workspace.device for workspace in state.workspaces.values()}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
