"""The interface of symmetric memory."""

from abc import ABC, abstractmethod

import torch


class SymmetricBuffer(ABC):
    """``nbytes`` bytes on every rank of a group, each rank's part readable and writable by all the others.

    Made by ``allocate``. ``rank``, ``world_size``, ``device`` and ``nbytes`` are plain attributes, and so are
    ``topology``, which says who is on our node, and ``network``, by which an interpreted kernel reaches the others.
    """

    network = None

    def __init__(self, state, nbytes, device):
        self._state = state
        self.topology = state.topology
        self.rank, self.world_size = state.rank, state.world_size
        self.nbytes, self.device = nbytes, device

    @property
    @abstractmethod
    def addresses(self):
        """Where this process reaches each rank's part: a list of W integers, 0 for a rank on another node."""

    @abstractmethod
    def tensor(self, peer):
        """The part of rank ``peer``, on our node, as a uint8 tensor of [nbytes]; a copy to it is a transfer."""

    @abstractmethod
    def close(self):
        """Give the memory back; local. No rank may use it any more."""

    @property
    def pes(self):
        """What the network calls each rank: a list of W integers."""
        return list(range(self.world_size))

    def _check_reach(self, peer):
        if not self.topology.is_local(peer):
            raise ValueError(f"peer {peer} is on another node than rank {self.rank}: its memory cannot be mapped here")

    def address_table(self):
        """The addresses as an int64 tensor of [W] on the device, for a kernel."""
        return torch.tensor(self.addresses, dtype=torch.int64, device=self.device)

    def barrier(self):
        """Return when every rank has come here and its device has done all the work enqueued before; collective."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._state.barrier("SymmetricBuffer.barrier")
