"""Symmetric memory between GPUs of one host, by way of ``torch.distributed._symmetric_memory``.

Every GPU maps the memory of every other one, over NVLink or PCIe on NVIDIA and over xGMI on AMD. NVLink multicast is
not needed and never used.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed import distributed_c10d as c10d

from tdkernels.symm.buffer import SymmetricBuffer


class P2PBuffer(SymmetricBuffer):
    def __init__(self, state, nbytes, device):
        super().__init__(state, nbytes, device)
        with torch.cuda.device(device):
            self._own = _empty(nbytes, device)
            self._own.zero_()
            torch.cuda.synchronize(device)
            _catch_up(state, device)
            self._handle = _rendezvous(self._own, state.name)
        # No peer may write before our zeros are in place.
        state.barrier("symm.allocate")

    @property
    def addresses(self):
        return list(self._handle.buffer_ptrs)

    def tensor(self, peer):
        return self._handle.get_buffer(peer, (self.nbytes,), torch.uint8)

    def close(self):
        self._own = self._handle = None


def _empty(nbytes, device):
    try:
        return symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError:
        torch.cuda.empty_cache()  # the memory may be there, kept by torch's own allocator, which this is not
        return symm_mem.empty(nbytes, dtype=torch.uint8, device=device)


# ---- torch numbers the exchanges of its rendezvous for each process, not for each group. So ranks of a group that have
# met in other groups a different number of times wait for each other's numbers for ever. ----

_meetings = 0  # how often this process has met anybody
_alone = None  # a group of this process only, under the name of _ALONE
_ALONE = "tdkernels.alone"


def _rendezvous(tensor, group_name):
    global _meetings
    _meetings += 1
    return symm_mem.rendezvous(tensor, group_name)


def _catch_up(state, device):
    """Meet nobody until this process has met as often as that of its peers which has met most often."""
    most = max(int(text) for text in state.exchange("symm.allocate", str(_meetings)))
    if _meetings < most:
        _know_alone()
    while _meetings < most:
        _rendezvous(symm_mem.empty(8, dtype=torch.uint8, device=device), _ALONE)


def _know_alone():
    """Make a rendezvous find a group of the name _ALONE, in which there is only this process.

    It is none that torch.distributed counts: by the number of its groups it names those of a DeviceMesh, and ranks of
    different numbers, of which some have had to catch up, would wait for each other in one of them for ever.
    """
    global _alone
    if _alone is None:
        _alone = dist.ProcessGroup(dist.HashStore(), 0, 1)
        _alone._set_group_name(_ALONE)
    try:
        c10d._resolve_process_group(_ALONE)
    except RuntimeError:  # not yet, or not since torch.distributed was shut down
        c10d._register_process_group(_ALONE, _alone)
