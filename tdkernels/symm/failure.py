"""That a wait of this rank has given up: one pair of flags and one record for all that a group launches on a device.

For the group, not for a workspace: where one operator has no result, the next one, which was launched before the host
could know, has nothing to compute with, and must not send to others what comes out.
"""

import torch

_WORDS = 8  # see lang._signal for what a record holds


def host_words(count, device):
    """Words of zero in the memory of the host, whatever device is the default one, that a kernel can write to."""
    return torch.zeros(count, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")


class Failure:
    """Attributes: ``flags``, the device's words; ``record``, what the host can read; ``error``, what it was read as."""

    def __init__(self, device):
        self.flags = torch.zeros(2, dtype=torch.int64, device=device)
        self.record = host_words(_WORDS, device)
        self._words = self.record.numpy()
        self.error = None

    def words(self):
        """(kind, peer, address of a signal, expected, seen, address of a workspace's state), or None."""
        return tuple(int(word) for word in self._words[:6]) if self._words[0] else None
