"""Symmetric memory between GPUs of one host, by way of ``torch.distributed._symmetric_memory``.

Every GPU maps the memory of every other one, over NVLink or PCIe on NVIDIA and over xGMI on AMD. NVLink multicast is
not needed and never used.
"""

import torch
import torch.distributed._symmetric_memory as symm_mem

from tdkernels.symm.buffer import SymmetricBuffer


class P2PBuffer(SymmetricBuffer):
    def __init__(self, state, nbytes, device):
        super().__init__(state, nbytes, device)
        with torch.cuda.device(device):
            self._own = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
            self._own.zero_()
            torch.cuda.synchronize(device)
            self._handle = symm_mem.rendezvous(self._own, state.name)
        # No peer may write before our zeros are in place.
        state.barrier("symm.allocate")

    @property
    def addresses(self):
        return list(self._handle.buffer_ptrs)

    def tensor(self, peer):
        return self._handle.get_buffer(peer, (self.nbytes,), torch.uint8)

    def close(self):
        self._own = self._handle = None
