"""Run one rank at a time, in an order that is determined by a seed.

The ranks share a page of memory and pass a token: a datagram to the socket of the next rank. Only the rank with the
token changes the page. It draws the next rank from the seed and the number of the step, so the order is the same in
each run. A rank that can only wait is not selected again before another rank has made progress.
"""

import contextlib
import fcntl
import mmap
import os
import random
import socket
import time

import numpy as np

_STEP, _VERSION, _DEAD, _FIRST = 0, 1, 2, 8
_PER_RANK = 3  # words for each rank: status, version at which it waited, number of calls of ``out``
_RUNS, _WAITS, _OUT, _DONE = 0, 1, 2, 3
_PERIOD = 150  # number of steps after which new weights are drawn
_WEIGHTS = (1.0, 0.3, 0.05, 0.01)  # relative probabilities: a rank with a small weight is slow for a period
_STALLED_S = 240.0


class DeadlockError(RuntimeError):
    """All ranks of a schedule wait, and none can continue. The text names the words that this rank waits for."""


class Lockstep:
    """One rank's side of the token passing.

    Args:
        folder: A folder that the ranks share.
        rank: Number of this rank.
        world_size: Number of ranks.
        seed: The seed; its ``str`` is used.
    """

    def __init__(self, folder: str, rank: int, world_size: int, seed: object) -> None:
        self.rank, self._world_size, self._seed = rank, world_size, seed
        self._folder = folder
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._path(rank))
        self._socket.settimeout(_STALLED_S)
        file = os.open(os.path.join(folder, "state"), os.O_RDWR | os.O_CREAT)
        os.ftruncate(file, mmap.PAGESIZE)
        self._file = file
        self._map = mmap.mmap(file, mmap.PAGESIZE)
        self._words = np.frombuffer(self._map, dtype=np.int64)

    def close(self):
        """Close the socket and the shared memory."""
        self._socket.close()
        self._words = None
        self._map.close()
        os.close(self._file)

    @property
    def step(self) -> int:
        """Number of the current step, the same on all ranks."""
        return int(self._words[_STEP])

    def begin(self) -> None:
        """Wait for the first turn. Call it after all ranks have created their sockets."""
        if random.Random(f"{self._seed}/first").randrange(self._world_size) != self.rank:
            self._await_token()

    def progress(self) -> None:
        """Record that this rank has made progress that others may wait for."""
        self._words[_VERSION] += 1

    def switch(self, waits: bool = False) -> None:
        """Pass the token to the next rank, which may be this one, and wait for the next turn.

        Args:
            waits: Whether this rank cannot continue before another rank has made progress.

        Raises:
            DeadlockError: If no rank can continue.
        """
        self._words[_STEP] += 1
        self._set(self.rank, _WAITS if waits else _RUNS)
        chosen = self._next()
        if chosen is None:
            self._die()
        elif chosen != self.rank:
            self._send(chosen)
            self._await_token()
        self._set(self.rank, _RUNS)

    def out(self) -> None:
        """Leave the lockstep before an operation that waits for other ranks, such as a collective."""
        self.progress()
        self._words[_STEP] += 1
        self._set(self.rank, _OUT)
        chosen = self._next()
        if chosen is not None:
            self._send(chosen)
        elif any(self._status(rank) == _WAITS for rank in range(self._world_size)):
            self._die()
        # Not earlier: a rank that is done with the collective waits for this in ``back``. It would be chosen here.
        self._words[_FIRST + _PER_RANK * self.rank + 2] += 1

    def back(self) -> None:
        """Return to the lockstep after such an operation. The last rank to return draws the next rank; until then no
        rank runs.

        First wait for all ranks to begin the collective: the source of a broadcast may be done before others begin it.
        """
        while any(self._outs(rank) < self._outs(self.rank) for rank in range(self._world_size)):
            if self._words[_DEAD]:
                raise DeadlockError
            time.sleep(0.0002)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            self._set(self.rank, _RUNS)
            is_last = not any(self._status(rank) == _OUT for rank in range(self._world_size))
            chosen = self._next() if is_last else None
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        if chosen is not None and chosen != self.rank:
            self._send(chosen)
        if chosen != self.rank:
            self._await_token()

    def leave(self) -> None:
        """End this rank's part in the lockstep; the other ranks continue without it."""
        self.progress()
        self._words[_STEP] += 1
        self._set(self.rank, _DONE)
        chosen = self._next()
        if chosen is not None:
            self._send(chosen)

    # ---- selection of the next rank ----

    def _next(self):
        """Return a rank that can run, or None if there is none."""
        version = self._words[_VERSION]
        can = [
            rank for rank in range(self._world_size)
            if self._status(rank) == _RUNS or self._status(rank) == _WAITS and self._waited_at(rank) != version
        ]
        if len(can) < 2:
            return can[0] if can else None
        weights = random.Random(f"{self._seed}/{self.step // _PERIOD}").choices(_WEIGHTS, k=self._world_size)
        order = random.Random(f"{self._seed}/step/{self.step}")
        return order.choices(can, [weights[rank] for rank in can])[0]

    def _status(self, rank):
        return self._words[_FIRST + _PER_RANK * rank]

    def _outs(self, rank):
        """Return how often a rank has called ``out``. For a rank that has left, the number is so large that no rank
        waits for it.
        """
        done = self._status(rank) == _DONE
        return 1 << 60 if done else self._words[_FIRST + _PER_RANK * rank + 2]

    def _waited_at(self, rank):
        return self._words[_FIRST + _PER_RANK * rank + 1]

    def _set(self, rank, status):
        self._words[_FIRST + _PER_RANK * rank] = status
        self._words[_FIRST + _PER_RANK * rank + 1] = self._words[_VERSION]

    def _send(self, rank):
        with contextlib.suppress(OSError):  # after a deadlock the rank may have ended
            self._socket.sendto(b"t", self._path(rank))

    def _await_token(self):
        try:
            self._socket.recv(1)
        except TimeoutError:
            raise RuntimeError(
                f"rank {self.rank} had no turn for {_STALLED_S:g} s: another rank waits outside the schedule"
            ) from None
        if self._words[_DEAD]:
            raise DeadlockError

    def _die(self):
        self._words[_DEAD] = 1
        for rank in range(self._world_size):
            if rank != self.rank and self._status(rank) != _DONE:
                self._send(rank)
        raise DeadlockError

    def _path(self, rank):
        return os.path.join(self._folder, str(rank))
