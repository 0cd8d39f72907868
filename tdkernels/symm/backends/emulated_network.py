"""Emulated network between CPU processes, with the weakest ordering that NVSHMEM and rocSHMEM allow.

The data of a put is read from the sender's memory at delivery, not at the call. It is delivered in pieces, after random
delays and in random order, subject to three rules:

- A signal is delivered after the data of its own put. It has no order relative to other puts.
- ``fence`` orders earlier puts before later puts to the same peer.
- ``quiet`` returns when everything has been delivered.

An operator that relies on more than these rules eventually fails. The seed of the random order is set by
``TDKERNELS_NETWORK_SEED`` (default 0) and ``reseed``.
"""

import ctypes
import os
import random
import threading
import time
from collections.abc import Sequence
from itertools import pairwise

VARIABLE = "TDKERNELS_NETWORK_SEED"
_PIECES = 3  # maximum number of pieces of a put
_LONGEST_S = 0.002  # maximum time between two deliveries
_WORD = 8

_live: list = []  # the open networks of this process


class EmulatedNetwork:
    """Network interface of one rank. It delivers on its own thread.

    Args:
        rank: This rank.
        bases: The address at which each rank's memory of a symmetric buffer is mapped in this process, [W].
    """

    def __init__(self, rank: int, bases: Sequence[int]):
        self.rank = rank
        self._bases = bases
        self._random = random.Random(f"{_seed()}/{rank}")
        # For each peer, the messages in groups that are separated by fences.
        self._pending: dict[int, list[list[_Message]]] = {peer: [[]] for peer in range(len(bases))}
        self._left = 0
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._deliver_all, name="tdkernels network", daemon=True)
        self._thread.start()
        _live.append(self)

    def put(
        self, dst: int, src: int, num_bytes: int, peer: int, signal: int | None = None, value: int = 0
    ) -> None:
        """Copy to the memory of ``peer``, then set a signal word there, if any.

        Args:
            dst: The address in this rank's symmetric buffer that corresponds to the destination.
            src: The address of the data.
            num_bytes: The number of bytes.
            peer: The destination rank.
            signal: The address in this rank's symmetric buffer that corresponds to the signal word, or None.
            value: The value of the signal.
        """
        offset = self._bases[peer] - self._bases[self.rank]
        with self._changed:
            cuts = [self._random.randrange(num_bytes + 1) // _WORD * _WORD for _ in range(_PIECES - 1)]
        cuts = sorted({0, num_bytes, *cuts})
        copies = [(dst + offset + first, src + first, last - first) for first, last in pairwise(cuts)]
        self._add(peer, _Message(copies, None if signal is None else (signal + offset, value)))

    def set_signal(self, signal: int, value: int, peer: int) -> None:
        """Set the word of ``peer`` that corresponds to address ``signal`` in this rank's symmetric buffer."""
        self._add(peer, _Message([], (signal + self._bases[peer] - self._bases[self.rank], value)))

    def fence(self) -> None:
        """Order all earlier messages before all later ones to the same peer."""
        with self._changed:
            for groups in self._pending.values():
                if groups[-1]:
                    groups.append([])

    def quiet(self) -> None:
        """Return when everything has been delivered."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left)

    def reseed(self, seed: object) -> None:
        """Restart the random order with a seed."""
        with self._changed:
            self._random = random.Random(f"{seed}/{self.rank}")

    def close(self) -> None:
        """Deliver all pending messages and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self in _live:
            _live.remove(self)

    def _add(self, peer, message):
        with self._changed:
            self._pending[peer][-1].append(message)
            self._left += 1
            self._changed.notify_all()

    def _deliver_all(self):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._left or self._closing)
                if not self._left:
                    return
                pause = 0.0 if self._closing else self._random.random() ** 4 * _LONGEST_S  # most delays are short
            time.sleep(pause)
            with self._changed:
                self._deliver_one()
                self._changed.notify_all()

    def _deliver_one(self):
        """Deliver a piece of a random message, among those before the next fence of each peer."""
        groups = self._random.choice([groups for groups in self._pending.values() if groups[0]])
        message = self._random.choice(groups[0])
        if message.deliver_one(self._random):
            groups[0].remove(message)
            self._left -= 1
            if not groups[0] and len(groups) > 1:
                groups.pop(0)


class _Message:
    """A put: copies in any order, followed by the signal."""

    def __init__(self, copies, signal):
        self._copies = copies
        self._signal = signal

    def deliver_one(self, order):
        """Deliver a piece, and return whether it was the last."""
        if self._copies:
            ctypes.memmove(*self._copies.pop(order.randrange(len(self._copies))))
        elif self._signal is not None:
            address, value = self._signal
            ctypes.c_int64.from_address(address).value = value
            self._signal = None
        return not self._copies and self._signal is None


def reseed(seed: object) -> None:
    """Restart the random order of every network of this process with a seed."""
    for network in _live:
        network.reseed(seed)


def _seed():
    return os.environ.get(VARIABLE, "0")
