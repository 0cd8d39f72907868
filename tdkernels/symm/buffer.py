"""Interface of symmetric memory."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tdkernels.symm.group import GroupState


class SymmetricBuffer(ABC):
    """``nbytes`` bytes on every rank of a group. All ranks can read and write the memory of every rank.

    ``allocate`` returns one.

    Attributes:
        rank (int): This process's rank in the group.
        world_size (int): The number of ranks, W.
        nbytes (int): The size on each rank in bytes.
        device (torch.device): The device of the memory.
        topology (Topology): The ranks on each node.
        network (EmulatedNetwork | None): The transport of interpreted kernels to ranks on other nodes, or None.
    """

    network = None

    def __init__(self, state: "GroupState", nbytes: int, device: torch.device):
        self._state = state
        self.topology = state.topology
        self.rank, self.world_size = state.rank, state.world_size
        self.nbytes, self.device = nbytes, device

    @property
    @abstractmethod
    def addresses(self) -> list[int]:
        """The address of each rank's memory in this process: W integers, 0 for a rank on another node."""

    @abstractmethod
    def tensor(self, peer: int) -> torch.Tensor:
        """Return the memory of rank ``peer`` as a uint8 tensor of [nbytes]. A copy to it is a transfer.

        Args:
            peer: A rank on this node.

        Raises:
            ValueError: If the rank is on another node.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the memory of this rank. It is a local operation. No rank may use the buffer afterwards."""

    @property
    def pes(self) -> list[int]:
        """The PE number of each rank in the network library: W integers."""
        return list(range(self.world_size))

    def _check_reach(self, peer):
        if not self.topology.is_local(peer):
            raise ValueError(f"peer {peer} is on another node than rank {self.rank}: its memory cannot be mapped here")

    def address_table(self) -> torch.Tensor:
        """Return the addresses as an int64 tensor of [W] on the device, for a kernel."""
        return torch.tensor(self.addresses, dtype=torch.int64, device=self.device)

    def barrier(self) -> None:
        """Return when every rank has called this and its device has finished all work enqueued before. Collective.

        Raises:
            PeerTimeoutError: If a rank does not call it within the timeout.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._state.barrier("SymmetricBuffer.barrier")
