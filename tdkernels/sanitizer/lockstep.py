"""Let one rank run at a time, in an order that follows from a seed.

The ranks share a page of memory and pass a token: a datagram to the socket of the rank that runs next. Only the holder
of the token changes the page, and draws the next rank from the seed and the number of the step; so the order is the
same in each run. A rank that can only wait is not chosen again before another rank has done something.
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
_PER_RANK = 3  # words: its status, the version that it has waited at, how often it was out
_RUNS, _WAITS, _OUT, _DONE = 0, 1, 2, 3
_PERIOD = 150  # steps for which the ranks keep their weights
_WEIGHTS = (1.0, 0.3, 0.05, 0.01)  # a rank of a small weight is slow for a while
_STALLED_S = 240.0


class DeadlockError(RuntimeError):
    """All ranks wait for something that none of them will do. The text names what this rank waits for."""


class Lockstep:
    """This rank's part.

    Args:
        folder: shared by the ranks
        rank: number of this one among ``world_size``
    """

    def __init__(self, folder, rank, world_size, seed):
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
        self._socket.close()
        self._words = None
        self._map.close()
        os.close(self._file)

    @property
    def step(self):
        return int(self._words[_STEP])

    def begin(self):
        """Wait for the first turn; all ranks have made their sockets."""
        if random.Random(f"{self._seed}/first").randrange(self._world_size) != self.rank:
            self._await_token()

    def progress(self):
        """Say that this rank has done something since, for which others may wait."""
        self._words[_VERSION] += 1

    def switch(self, waits=False):
        """Let the rank run that is next, maybe this one. ``waits``: this one can do nothing before another has.

        Raises:
            DeadlockError: when that holds of all
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

    def out(self):
        """Begin something in which this rank waits for the others outside of the lockstep."""
        self.progress()
        self._words[_STEP] += 1
        self._set(self.rank, _OUT)
        self._words[_FIRST + _PER_RANK * self.rank + 2] += 1
        chosen = self._next()
        if chosen is not None:
            self._send(chosen)
        elif any(self._status(rank) == _WAITS for rank in range(self._world_size)):
            self._die()

    def back(self):
        """End it. The last rank that comes back draws who goes on: until then none runs.

        A rank may be done with a collective before others have begun it, as the source of a broadcast is.
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

    def leave(self):
        """Let the others go on without this rank."""
        self.progress()
        self._words[_STEP] += 1
        self._set(self.rank, _DONE)
        chosen = self._next()
        if chosen is not None:
            self._send(chosen)

    # ---- who is next ----

    def _next(self):
        """A rank that can run, or None."""
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
        """How often a rank has begun something outside; one that has left is never waited for."""
        done = self._status(rank) == _DONE
        return 1 << 60 if done else self._words[_FIRST + _PER_RANK * rank + 2]

    def _waited_at(self, rank):
        return self._words[_FIRST + _PER_RANK * rank + 1]

    def _set(self, rank, status):
        self._words[_FIRST + _PER_RANK * rank] = status
        self._words[_FIRST + _PER_RANK * rank + 1] = self._words[_VERSION]

    def _send(self, rank):
        with contextlib.suppress(OSError):  # after a deadlock it may be gone
            self._socket.sendto(b"t", self._path(rank))

    def _await_token(self):
        try:
            self._socket.recv(1)
        except TimeoutError:
            raise RuntimeError(
                f"rank {self.rank} had no turn for {_STALLED_S:g} s: another rank waits outside of the schedule"
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
