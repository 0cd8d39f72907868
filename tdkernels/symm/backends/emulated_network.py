"""A network between CPU processes that is as bad as a network may be: late, and in any order.

What a rank puts is taken from its memory when it is delivered, not when it is put: in pieces, after random delays, in
random order, as far as the rules of NVSHMEM and rocSHMEM allow: a signal comes after the data of its own put and in no
other order; ``fence`` keeps what was put before it ahead of what is put after it, for each peer; ``quiet`` returns when
all has been delivered. An operator that relies on more than these rules fails on it, sooner or later. The order is that
of ``TDKERNELS_NETWORK_SEED``, else 0, and of ``reseed``.
"""

import ctypes
import os
import random
import threading
import time
from itertools import pairwise

VARIABLE = "TDKERNELS_NETWORK_SEED"
_PIECES = 3  # a put comes in up to so many
_LONGEST_S = 0.002  # from one delivery to the next
_WORD = 8

_live: list = []  # of this process, as long as they are open


class EmulatedNetwork:
    """One rank's way to its peers; delivers on a thread of its own.

    Args:
        rank: ours
        bases: where each rank's part of a symmetric buffer is mapped here, [W]
    """

    def __init__(self, rank, bases):
        self.rank = rank
        self._bases = bases
        self._random = random.Random(f"{_seed()}/{rank}")
        self._pending = {peer: [[]] for peer in range(len(bases))}  # for each peer, what lies between two fences
        self._left = 0
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._deliver_all, name="tdkernels network", daemon=True)
        self._thread.start()
        _live.append(self)

    def put(self, dst, src, num_bytes, peer, signal=None, value=0):
        """Copy to where ``peer`` keeps what we keep at address dst; then set the word at address ``signal``, if any."""
        offset = self._bases[peer] - self._bases[self.rank]
        with self._changed:
            cuts = [self._random.randrange(num_bytes + 1) // _WORD * _WORD for _ in range(_PIECES - 1)]
        cuts = sorted({0, num_bytes, *cuts})
        copies = [(dst + offset + first, src + first, last - first) for first, last in pairwise(cuts)]
        self._add(peer, _Message(copies, None if signal is None else (signal + offset, value)))

    def set_signal(self, signal, value, peer):
        """Set the word that ``peer`` keeps where we keep ``signal``."""
        self._add(peer, _Message([], (signal + self._bases[peer] - self._bases[self.rank], value)))

    def fence(self):
        """Deliver nothing that comes after before what has come so far, to the same peer."""
        with self._changed:
            for groups in self._pending.values():
                if groups[-1]:
                    groups.append([])

    def quiet(self):
        """Return when everything has been delivered."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left)

    def reseed(self, seed):
        with self._changed:
            self._random = random.Random(f"{seed}/{self.rank}")

    def close(self):
        """Deliver what is left and stop."""
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
                pause = 0.0 if self._closing else self._random.random() ** 4 * _LONGEST_S  # most are short
            time.sleep(pause)
            with self._changed:
                self._deliver_one()
                self._changed.notify_all()

    def _deliver_one(self):
        """A piece of any message before the next fence of any peer."""
        groups = self._random.choice([groups for groups in self._pending.values() if groups[0]])
        message = self._random.choice(groups[0])
        if message.deliver_one(self._random):
            groups[0].remove(message)
            self._left -= 1
            if not groups[0] and len(groups) > 1:
                groups.pop(0)


class _Message:
    """A put: copies in any order, then the signal."""

    def __init__(self, copies, signal):
        self._copies = copies
        self._signal = signal

    def deliver_one(self, order):
        """Deliver a piece; whether it was the last."""
        if self._copies:
            ctypes.memmove(*self._copies.pop(order.randrange(len(self._copies))))
        elif self._signal is not None:
            address, value = self._signal
            ctypes.c_int64.from_address(address).value = value
            self._signal = None
        return not self._copies and self._signal is None


def reseed(seed):
    """Begin the random order of every network of this process anew."""
    for network in _live:
        network.reseed(seed)


def _seed():
    return os.environ.get(VARIABLE, "0")
