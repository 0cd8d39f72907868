"""Symmetric memory of CPU processes on one host: anonymous shared memory.

Each rank creates an anonymous memory file (``memfd_create``) and maps those of its peers through ``/proc/<pid>/fd``.
The files have no name in /dev/shm. So nothing is left behind when a process dies, and the size of /dev/shm (64 MB in
many containers) is no limit.

Simulated nodes also share memory, but ``addresses`` is 0 for ranks of another node. Transfers to them use the emulated
network.
"""

import ctypes
import json
import mmap
import os
import secrets
import sys

import torch

from tdkernels.symm.backends.emulated_network import EmulatedNetwork
from tdkernels.symm.buffer import SymmetricBuffer
from tdkernels.symm.store_values import whole_number

_NAME = "tdkernels"  # name of the memory files in /proc
_NONCE_BYTES = 16


class ShmBuffer(SymmetricBuffer):
    """Symmetric memory in anonymous memory files that the ranks map from each other."""

    def __init__(self, state, nbytes, device):
        super().__init__(state, nbytes, device)
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            own = _create(fd, nbytes)
            nonce = own[-_NONCE_BYTES:]
            offer = {"host": _host(), "pid": os.getpid(), "fd": fd, "nonce": bytes(nonce).hex()}
            offers = [json.loads(text) for text in state.exchange("symm.allocate", json.dumps(offer))]
            try:
                self._maps = [own if r == self.rank else _open(o, nbytes, r) for r, o in enumerate(offers)]
                failure = ""
            except (OSError, ValueError) as error:
                failure = f"rank {self.rank}: {error}"
            # No rank closes its file before all ranks have opened it, and all ranks fail if one fails.
            failures = [text for text in state.exchange("symm.allocate", failure) if text]
        finally:
            os.close(fd)
        if failures:
            raise RuntimeError("cannot share memory between the ranks: " + "; ".join(failures))
        self._tensors = [torch.frombuffer(m, dtype=torch.uint8, count=nbytes) for m in self._maps]
        if self.topology.num_nodes > 1:
            self.network = EmulatedNetwork(self.rank, [tensor.data_ptr() for tensor in self._tensors])

    @property
    def addresses(self) -> list[int]:
        return [t.data_ptr() if self.topology.is_local(peer) else 0 for peer, t in enumerate(self._tensors)]

    def tensor(self, peer: int) -> torch.Tensor:
        self._check_reach(peer)
        return self._tensors[peer]

    def close(self) -> None:
        if self.network is not None:
            self.network.close()
        # A mapping is freed with the last tensor that uses it. The caller may still hold one.
        self._tensors, self._maps = [], []


def _create(fd, nbytes):
    os.ftruncate(fd, nbytes + _NONCE_BYTES)
    mapping = _map(fd, nbytes + _NONCE_BYTES)
    mapping[-_NONCE_BYTES:] = secrets.token_bytes(_NONCE_BYTES)
    return mapping


def _open(offer, nbytes, peer):
    if offer["host"] != _host():
        raise OSError(f"rank {peer} runs on another host; CPU ranks must share one")
    pid, number = (whole_number(offer.get(name), f"{name} of rank {peer}", 1 << 31) for name in ("pid", "fd"))
    path = f"/proc/{pid}/fd/{number}"
    # Check it before opening it, because opening some files, such as devices, has side effects.
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise OSError(f"{path} is not rank {peer}'s memory; do the ranks run in different containers?")
    fd = os.open(path, os.O_RDWR)
    try:
        mapping = _map(fd, nbytes + _NONCE_BYTES)
    except ValueError as error:  # shorter than expected, so it is not the offered file
        raise OSError(f"{path} is not rank {peer}'s memory: {error}") from None
    finally:
        os.close(fd)
    if bytes(mapping[-_NONCE_BYTES:]).hex() != offer["nonce"]:
        raise OSError(f"{path} is not rank {peer}'s memory; do the ranks run in different containers?")
    return mapping


def _map(fd, nbytes):
    """Map a file, shared and writable, as an ``mmap.mmap`` that keeps no duplicate of the descriptor.

    A rank has one mapping for each buffer and peer. By default each mapping keeps a descriptor open, and processes are
    often limited to 1024 descriptors.

    Raises:
        ValueError: If the file is shorter than ``nbytes``.
        OSError: If the mapping fails.
    """
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, nbytes, trackfd=False)
    if os.fstat(fd).st_size < nbytes:
        raise ValueError("the file is shorter than its mapping")
    # Anonymous memory has no descriptor. The file is mapped over it, and is unmapped with the mmap object.
    mapping = mmap.mmap(-1, nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    found = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if found != address:
        raise OSError(ctypes.get_errno(), f"mmap of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
    return mapping


_MAP_FIXED = 0x10  # the value of Linux on all architectures that torch supports
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
]


def _host():
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f.read().strip()
