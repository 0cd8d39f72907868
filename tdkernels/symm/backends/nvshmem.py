"""NVSHMEM runtime for transfers to GPUs of other nodes, through nvshmem4py.

NVSHMEM is initialized once per process, for all ranks of ``torch.distributed``. The ranks exchange its unique id
through their store. If the program has initialized NVSHMEM before, that instance is used. Install it with
``pip install 'tdkernels[nvshmem]'``.
"""

import atexit
import glob
import importlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable

import torch
import torch.distributed as dist

from tdkernels.errors import PeerTimeoutError
from tdkernels.symm.group import GroupState, resolve_group
from tdkernels.symm.timeout import shorter_timeout

MIN_VERSION = (3, 4)
_INSTALL = "install the package nvshmem4py-cu13 (pip install 'tdkernels[nvshmem]') with an NVSHMEM of 3.4 or newer"
_INITIALIZED = 2  # NVSHMEM_STATUS_IS_INITIALIZED; higher values include it
_EXIT_TIMEOUT_S = 5.0

_runtime = None


def start(device: torch.device, heap_bytes: int) -> "Runtime":
    """Return the runtime of this process. The first call initializes it and is collective over the world.

    Args:
        device: The GPU of this process.
        heap_bytes: The size of the symmetric memory that will be allocated, in bytes.

    Raises:
        ImportError: If nvshmem4py or the NVSHMEM library is missing or too old.
        RuntimeError: If a rank of the world does not make this call within the timeout.
    """
    global _runtime
    if _runtime is None:
        _runtime = Runtime(device, heap_bytes)
    return _runtime


class Runtime:
    """NVSHMEM in this process.

    Attributes:
        pe: The PE number of this process.
        num_pes: The number of PEs.
        version: The version of the library.
        owned: Whether this library has initialized NVSHMEM and must finalize it.
    """

    name = "NVSHMEM"

    def __init__(self, device: torch.device, heap_bytes: int):
        self._core, self._bindings = _modules()
        self.version = _checked_version(self._core)
        self._library = device_library(torch.cuda.get_device_capability(device))
        self._world = GroupState(resolve_group(None), "tdkernels/nvshmem")
        self.owned = int(self._core.init_status()) < _INITIALIZED
        if self.owned:
            self._init(device, heap_bytes)
        self.pe, self.num_pes = self._core.my_pe(), self._core.n_pes()

    def _init(self, device, heap_bytes):
        from cuda.core import Device

        # NVLink multicast is not needed, and is not available on every host.
        os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
        # If the heap cannot grow, it must have room for the initial allocation.
        os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(heap_bytes + (64 << 20)))
        rank = dist.get_rank()
        uid = self._core.get_unique_id(empty=rank != 0)
        own = bytes(uid._data.view("u1")).hex() if rank == 0 else ""
        try:
            texts = self._world.exchange("NVSHMEM", own)
        except PeerTimeoutError as error:
            raise RuntimeError(
                "NVSHMEM is initialised by all ranks of torch.distributed together, when the first group across nodes "
                f"is used, and rank {error.peer} did not take part: let every rank call an operator on such a group"
            ) from error
        uid._data.view("u1")[:] = list(bytes.fromhex(texts[0]))
        gpu = Device(device.index)
        gpu.set_current()
        self._core.init(device=gpu, uid=uid, rank=rank, nranks=dist.get_world_size(), initializer_method="uid")
        atexit.register(self.finalize)

    def malloc(self, nbytes: int) -> int:
        """Allocate ``nbytes`` on all PEs and return the address in this process. Collective over all PEs."""
        address = self._bindings.malloc(nbytes)
        if not address:
            raise MemoryError(f"NVSHMEM has no {nbytes >> 20} MiB of symmetric memory; see NVSHMEM_SYMMETRIC_SIZE")
        return address

    def free(self, address: int) -> None:
        """Free an allocation. Collective over all PEs."""
        self._bindings.free(address)

    def peer_address(self, address: int, pe: int) -> int:
        """Return where the memory of ``pe`` at a symmetric address is mapped in this process, or 0 if it is not."""
        return self._bindings.ptr(address, pe) or 0

    def barrier(self) -> None:
        """Wait for all PEs."""
        self._bindings.barrier_all()

    def init_module(self, module: int) -> None:
        """Initialize the device library that is linked into a loaded module (a CUmodule)."""
        self._bindings.cumodule_init(module)

    def device_library(self) -> dict[str, str]:
        """Return {name: path} of the libraries that kernels are linked with."""
        return {"nvshmem": self._library}

    def finalize(self) -> None:
        """Finalize NVSHMEM if this library has initialized it and all ranks of the world end.

        Finalization waits for all PEs. If a rank has died, it is skipped, so that the other ranks can end.
        """
        if not self.owned:
            return
        self.owned = False
        try:
            with shorter_timeout(_EXIT_TIMEOUT_S):
                self._world.exchange("NVSHMEM", json.dumps("end"))
            torch.cuda.synchronize()
            self._core.finalize()
        except Exception:  # a rank or the store is gone, so finalization would not return
            return


def installed_version() -> str:
    """Return the version of the NVSHMEM library without initializing it.

    Raises:
        ImportError: If nvshmem4py or the library is missing or too old.
    """
    return _checked_version(_modules()[0])


def _modules():
    """Import nvshmem.core and nvshmem.bindings."""
    try:
        return importlib.import_module("nvshmem.core"), importlib.import_module("nvshmem.bindings")
    except (ImportError, RuntimeError, OSError) as error:
        raise ImportError(f"groups across nodes need nvshmem4py, which does not import ({error}): {_INSTALL}") from None


def _checked_version(core):
    """Return the version of the library, or raise ImportError if it does not load or is too old."""
    try:
        version = str(core.get_version().libnvshmem_version)
    except Exception as error:  # nvshmem4py's loader has its own exception types
        raise ImportError(f"NVSHMEM's library does not load ({error}): {_INSTALL}") from error
    if tuple(int(n) for n in re.findall(r"\d+", version)[:2]) < MIN_VERSION:
        raise ImportError(f"NVSHMEM {version} is too old: {_INSTALL}")
    return version


def device_library(capability: tuple[int, int], folders: Iterable[str] | None = None) -> str:
    """Return the path of NVSHMEM's device library (bitcode) for a GPU with this compute capability.

    Up to version 3.4, NVSHMEM has one file for all architectures. Later versions have one for each architecture.
    """
    own = f"libnvshmem_device_sm_{capability[0]}{capability[1]}.bc"
    for folder in _folders() if folders is None else folders:
        for name in (own, "libnvshmem_device.bc"):
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                return path
    raise ImportError(f"NVSHMEM's device library ({own} or libnvshmem_device.bc) was not found: {_INSTALL}")


def _folders():
    """Yield the folders that may contain NVSHMEM's libraries."""
    home = os.environ.get("NVSHMEM_HOME")
    if home:
        yield os.path.join(home, "lib")
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec else ():
        yield from glob.glob(os.path.join(root, "nvshmem", "lib"))
    yield "/usr/lib/x86_64-linux-gnu/nvshmem/13"
