"""NVSHMEM, by way of nvshmem4py: what reaches the GPUs of other nodes.

It is initialised once a process, for all ranks of ``torch.distributed``, by a unique id that goes through their store;
or adopted as it is, where the program has initialised it before. Needs ``pip install 'tdkernels[nvshmem]'``.
"""

import atexit
import glob
import importlib
import importlib.util
import json
import os
import re

import torch
import torch.distributed as dist

from tdkernels.errors import PeerTimeoutError
from tdkernels.symm.group import GroupState, resolve_group
from tdkernels.symm.timeout import shorter_timeout

MIN_VERSION = (3, 4)
_INSTALL = "install the package nvshmem4py-cu13 (pip install 'tdkernels[nvshmem]') with an NVSHMEM of 3.4 or newer"
_INITIALIZED = 2  # NVSHMEM_STATUS_IS_INITIALIZED; more is initialised further
_EXIT_TIMEOUT_S = 5.0

_runtime = None


def start(device, heap_bytes):
    """The runtime of this process on its GPU; collective over the world the first time.

    Raises:
        ImportError: when nvshmem4py or a library of NVSHMEM is missing or too old
        RuntimeError: when not all ranks of the world come to this call
    """
    global _runtime
    if _runtime is None:
        _runtime = Runtime(device, heap_bytes)
    return _runtime


class Runtime:
    """NVSHMEM in this process. ``pe`` and ``num_pes`` are its number for us and how many of us it knows."""

    name = "NVSHMEM"

    def __init__(self, device, heap_bytes):
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

        # NVLink multicast is not needed, and not every host may use it.
        os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
        # Where the heap does not grow by itself it must have room for what we take of it at once.
        os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(heap_bytes + (64 << 20)))
        rank = dist.get_rank()
        uid = self._core.get_unique_id(empty=rank != 0)
        own = bytes(uid._data.view("u1")).hex() if rank == 0 else ""
        try:
            texts = self._world.exchange("NVSHMEM", own)
        except PeerTimeoutError as error:
            raise RuntimeError(
                "NVSHMEM is initialised by all ranks of torch.distributed together, when the first group across nodes "
                f"is used, and rank {error.peer} did not come: let every rank call an operator on such a group"
            ) from error
        uid._data.view("u1")[:] = list(bytes.fromhex(texts[0]))
        gpu = Device(device.index)
        gpu.set_current()
        self._core.init(device=gpu, uid=uid, rank=rank, nranks=dist.get_world_size(), initializer_method="uid")
        atexit.register(self.finalize)

    def malloc(self, nbytes):
        """The address of ``nbytes`` on each of the library's processes; collective over all of them."""
        address = self._bindings.malloc(nbytes)
        if not address:
            raise MemoryError(f"NVSHMEM has no {nbytes >> 20} MiB of symmetric memory; see NVSHMEM_SYMMETRIC_SIZE")
        return address

    def free(self, address):
        """Collective, as ``malloc``."""
        self._bindings.free(address)

    def peer_address(self, address, pe):
        """Where we reach what ``pe`` has at our address; 0 if we do not."""
        return self._bindings.ptr(address, pe) or 0

    def barrier(self):
        self._bindings.barrier_all()

    def init_module(self, module):
        """Make a loaded module (a CUmodule) with the device library in it know the library's state."""
        self._bindings.cumodule_init(module)

    def device_library(self):
        """{name: path} of what kernels are linked with."""
        return {"nvshmem": self._library}

    def finalize(self):
        """Shut the library down, if it is ours and all ranks of the world end; else leave it to the system.

        It waits for everybody, and a rank that has died must not keep the others from ending.
        """
        if not self.owned:
            return
        self.owned = False
        try:
            with shorter_timeout(_EXIT_TIMEOUT_S):
                self._world.exchange("NVSHMEM", json.dumps("end"))
            torch.cuda.synchronize()
            self._core.finalize()
        except Exception:  # a rank or its store has gone: there is nobody to finalise with
            return


def installed_version():
    """The version of NVSHMEM's library, as text; initialises nothing.

    Raises:
        ImportError
    """
    return _checked_version(_modules()[0])


def _modules():
    """nvshmem.core and nvshmem.bindings."""
    try:
        return importlib.import_module("nvshmem.core"), importlib.import_module("nvshmem.bindings")
    except (ImportError, RuntimeError, OSError) as error:
        raise ImportError(f"groups across nodes need nvshmem4py, which does not import ({error}): {_INSTALL}") from None


def _checked_version(core):
    """The version of the library, as text."""
    try:
        version = str(core.get_version().libnvshmem_version)
    except Exception as error:  # of the loader's own kinds
        raise ImportError(f"NVSHMEM's library does not load ({error}): {_INSTALL}") from error
    if tuple(int(n) for n in re.findall(r"\d+", version)[:2]) < MIN_VERSION:
        raise ImportError(f"NVSHMEM {version} is too old: {_INSTALL}")
    return version


def device_library(capability, folders=None):
    """The path of the device functions as bitcode, for a GPU of this capability.

    NVSHMEM has one file for all up to 3.4, and since then one for each architecture.
    """
    own = f"libnvshmem_device_sm_{capability[0]}{capability[1]}.bc"
    for folder in _folders() if folders is None else folders:
        for name in (own, "libnvshmem_device.bc"):
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                return path
    raise ImportError(f"NVSHMEM's device library ({own} or libnvshmem_device.bc) is not to be found: {_INSTALL}")


def _folders():
    """Where NVSHMEM's libraries may lie."""
    home = os.environ.get("NVSHMEM_HOME")
    if home:
        yield os.path.join(home, "lib")
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec else ():
        yield from glob.glob(os.path.join(root, "nvshmem", "lib"))
    yield "/usr/lib/x86_64-linux-gnu/nvshmem/13"
