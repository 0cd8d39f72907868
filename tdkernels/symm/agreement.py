"""Host-side wait of a consensus check, and its notice to peers that are in another call.

The first call with a shape or config waits on the host until all ranks have made it. If a peer makes a known call
instead, its kernel waits for this rank, and both ranks would wait until the timeout. To prevent this, the waiting rank
posts a notice after 0.2 s. For each workspace it writes a status word to the memory of its peers. The word holds the
number of the first call that this rank has not made. A kernel that waits for that call or a later one fails at once,
and its host raises an error that names both calls.
"""

import json
import time
from collections.abc import Callable

import torch

from tdkernels.errors import PlanMismatchError
from tdkernels.symm.timeout import get_timeout

_NOTICE_DELAY_S = 0.2  # before a rank posts a notice, since posting waits for the device
_POLL_S = 0.05


class Agreement:
    """One wait until every rank has posted its key to the store.

    Args:
        state: The GroupState.
        operator: The operator, for errors.
        turn: The number of the exchange.
        keys: The keys in the store, one for each rank.
    """

    def __init__(self, state, operator, turn, keys):
        self._state, self._store = state, state._store
        self._operator, self._keys = operator, keys
        self._announced, self._withdrawn = counter_keys(state, turn)
        self._conflict = conflict_key(state, turn)
        self._deadline = time.monotonic() + get_timeout()

    def await_all(self) -> None:
        """Return when all keys are in the store.

        Raises:
            PeerTimeoutError: If a key is missing at the timeout.
            PlanMismatchError: If a peer has found that it is in another call.
        """
        try:
            if not self._all_posted(_NOTICE_DELAY_S):
                self._await_late_peers()
            self._await_withdrawals()
        except PlanMismatchError:
            raise
        except RuntimeError as error:  # the server of the store is gone
            raise self._state._lost(self._operator, self._state._first_missing(self._keys)) from error

    def _await_late_peers(self):
        if self._announce():
            while not self._all_posted(_POLL_S):
                self._raise_conflict()
                if time.monotonic() >= self._deadline:
                    raise self._state._lost(self._operator, self._state._first_missing(self._keys))
            self._post(False)
        self._store.add(self._withdrawn, 1)

    def _all_posted(self, seconds):
        """Wait up to ``seconds`` for all keys, and return whether they are in the store."""
        until = min(time.monotonic() + seconds, self._deadline)
        return poll(lambda: self._store.check(self._keys), until)

    def _announce(self):
        """Post a notice to the peers, unless all keys are in the store by now. Return whether it was posted.

        A rank reads the count of announced notices after it has found all keys. So either it sees the count of this
        rank and waits until the notice is withdrawn, or this rank finds all keys here.
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
        """Return when all notices are withdrawn. Otherwise they would fail the waits of later calls."""
        announced = self._store.add(self._announced, 0)
        if not poll(lambda: self._store.add(self._withdrawn, 0) >= announced, self._deadline):
            raise self._state._lost(self._operator, int(self._state.rank == 0))

    def _raise_conflict(self):
        if self._store.check([self._conflict]):
            rank, call = json.loads(self._store.get(self._conflict).decode())
            own = describe(self._store.get(self._keys[self._state.rank]).decode())
            error = PlanMismatchError(
                f"{self._operator}: rank {self._state.rank} waits in the consensus check of a new call, "
                f"{own}, while rank {rank} makes {call}, a known call"
            )
            self._state.break_off(error)
            raise error


def poll(condition: Callable[[], bool], until: float) -> bool:
    """Wait until a condition holds, and return whether it did by ``until`` on the clock of ``time.monotonic``.

    The store's own wait is not used because it logs a warning at each timeout.
    """
    pause = 0.0002
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, 0.02)
    return True


def counter_keys(state, turn):
    """Return the store keys of the numbers of announced and of withdrawn notices in exchange ``turn``."""
    return [f"{state._prefix}/{word}/{turn}" for word in ("announced", "withdrawn")]


def conflict_key(state, turn):
    """Return the store key at which a rank posts the known call that it makes during exchange ``turn``."""
    return f"{state._prefix}/conflict/{turn}"


def describe(text: str) -> str:
    """Return the call for which a rank has posted ``text``, in a readable form."""
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
