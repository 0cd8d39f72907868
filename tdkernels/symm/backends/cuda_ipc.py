"""Symmetric memory of GPUs on one host, allocated with ``torch.distributed._symmetric_memory``.

Every GPU maps the memory of all others, over NVLink or PCIe on NVIDIA and over xGMI on AMD. NVLink multicast is neither
needed nor used.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed import distributed_c10d as c10d

from tdkernels.symm.buffer import SymmetricBuffer


class P2PBuffer(SymmetricBuffer):
    """Symmetric memory that torch maps between the GPUs of one host."""

    def __init__(self, state, nbytes, device):
        super().__init__(state, nbytes, device)
        with torch.cuda.device(device):
            self._own = _empty(nbytes, device)
            self._own.zero_()
            torch.cuda.synchronize(device)
            _equalize_rendezvous_counts(state, device)
            self._handle = _rendezvous(self._own, state.name)
        # No peer may write before this rank's memory is zeroed.
        state.barrier("symm.allocate")

    @property
    def addresses(self) -> list[int]:
        return list(self._handle.buffer_ptrs)

    def tensor(self, peer: int) -> torch.Tensor:
        return self._handle.get_buffer(peer, (self.nbytes,), torch.uint8)

    def close(self) -> None:
        self._own = self._handle = None


def _empty(nbytes, device):
    try:
        return symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError:
        torch.cuda.empty_cache()  # torch's caching allocator, which is another one, may hold free memory
        return symm_mem.empty(nbytes, dtype=torch.uint8, device=device)


# torch numbers the rendezvous of each process, not those of each group. If the ranks of a group have taken part in a
# different number of rendezvous in other groups, they wait for each other's numbers forever. So a rank with a lower
# number first makes rendezvous in a group that contains only itself.

_num_rendezvous = 0  # in this process
_single_group = None  # a group of this process only, registered as _SINGLE_GROUP_NAME
_SINGLE_GROUP_NAME = "tdkernels.alone"


def _rendezvous(tensor, group_name):
    global _num_rendezvous
    _num_rendezvous += 1
    return symm_mem.rendezvous(tensor, group_name)


def _equalize_rendezvous_counts(state, device):
    """Make rendezvous in the single-process group until this process has made as many as each of its peers."""
    most = max(int(text) for text in state.exchange("symm.allocate", str(_num_rendezvous)))
    if _num_rendezvous < most:
        _register_single_group()
    while _num_rendezvous < most:
        _rendezvous(symm_mem.empty(8, dtype=torch.uint8, device=device), _SINGLE_GROUP_NAME)


def _register_single_group():
    """Register a group that contains only this process, so that a rendezvous finds it by name.

    It is not created with ``new_group``, because torch.distributed would count it and names the groups of a DeviceMesh
    by its count. If the counts differ between ranks, they wait for each other in such a group forever.
    """
    global _single_group
    if _single_group is None:
        _single_group = dist.ProcessGroup(dist.HashStore(), 0, 1)
        _single_group._set_group_name(_SINGLE_GROUP_NAME)
    try:
        c10d._resolve_process_group(_SINGLE_GROUP_NAME)
    except RuntimeError:  # not registered yet, or torch.distributed was shut down since
        c10d._register_process_group(_SINGLE_GROUP_NAME, _single_group)
