"""rocSHMEM runtime for transfers between AMD GPUs of several hosts.

``start`` initializes rocSHMEM once per process, collectively, and returns a ``RocshmemRuntime``, which allocates
symmetric memory. rocSHMEM is finalized when the process exits. Nothing here has run on AMD hardware: the tests run it
against a stand-in for the library (docs/guides/rocshmem.md).
"""

import atexit
import json
import sys
import threading
from collections.abc import Callable, Sequence

import torch

from tdkernels.lang import rocshmem_library
from tdkernels.lang.rocshmem_library import UNIQUE_ID_BYTES, RocshmemError

_lock = threading.Lock()
_runtime = None  # the runtime of this process, also after it was finalized


class RocshmemRuntime:
    """rocSHMEM in this process, from ``start``.

    All PEs must call a collective method in the same order and with the same arguments.

    Attributes:
        rank: This process's rank in the world.
        world_size: The number of ranks.
        pe: The PE number of this process.
        num_pes: The number of PEs, equal to ``world_size``.
        version: The version of the library.
    """

    name = "rocSHMEM"

    def __init__(self, library, rank, pes, owned):
        self.rank, self.world_size = rank, len(pes)
        self.pe, self.num_pes = pes[rank], len(pes)
        self.version = library.version
        self._library, self._pes, self._owned = library, pes, owned
        self._allocated = {}  # {address: bytes}
        self._alive = True

    def pe_of(self, rank: int) -> int:
        """Return the PE number of a rank of the world."""
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise ValueError(f"rank: expected one of the world's {self.world_size} ranks, not {rank!r}")
        return self._pes[rank]

    def malloc(self, nbytes: int) -> int:
        """Allocate ``nbytes`` bytes on every PE, not zeroed, and return the address in this process. Collective.

        Raises:
            RocshmemError: If the symmetric heap is full. Its size is fixed when rocSHMEM starts.
        """
        self._check_alive("malloc")
        if not isinstance(nbytes, int) or nbytes <= 0:
            raise ValueError(f"nbytes must be a positive integer, not {nbytes!r}")
        _synchronize()  # the library's barrier is a kernel, which must not wait for other kernels of this process
        address = self._library.malloc(nbytes)
        if not address:
            held = sum(self._allocated.values())
            raise RocshmemError(
                f"rocshmem_malloc({nbytes}) returned null with {held} bytes held before: the symmetric heap is full. "
                f"Its size is ROCSHMEM_HEAP_SIZE in bytes, 1 GiB by default, the same on all ranks."
            )
        self._allocated[address] = nbytes
        return address

    def free(self, address: int) -> None:
        """Free an allocation. Collective. After ``finalize``, which frees all memory, it does nothing."""
        if not self._alive:
            return
        if address not in self._allocated:
            raise ValueError(f"address: {address!r} is not one that malloc has returned and free has not seen")
        _synchronize()
        del self._allocated[address]
        self._library.free(address)

    def peer_address(self, address: int, pe: int) -> int:
        """Return where the memory of ``pe`` at ``address`` is mapped in this process, or 0 if it is on another host."""
        self._check_alive("peer_address")
        return address if self._checked_pe(pe) == self.pe else self._library.ptr(address, pe)

    def barrier(self) -> None:
        """Return when every PE has called this and its device has finished all work enqueued before. Collective."""
        self._check_alive("barrier")
        _synchronize()
        self._library.barrier_all()

    def put_on_stream(self, dst: int, src: int, nbytes: int, pe: int, stream: int) -> None:
        """Copy ``nbytes`` bytes at ``src`` to ``dst`` of PE ``pe``, in the order of a stream.

        When the stream has passed the copy, the data has arrived. One workgroup performs the copy, so it is slow for
        large sizes on one host.

        Args:
            dst: The destination as an address of symmetric memory in this process.
            src: The source. rocSHMEM requires that it is in symmetric memory too.
            nbytes: The number of bytes.
            pe: The destination PE.
            stream: The handle of the HIP stream as an integer.
        """
        self._check_alive("put_on_stream")
        self._library.putmem_on_stream(*self._checked_transfer(dst, src, nbytes, pe, stream))

    def get_on_stream(self, dst: int, src: int, nbytes: int, pe: int, stream: int) -> None:
        """Copy ``nbytes`` bytes at ``src`` of PE ``pe`` to ``dst``. Otherwise it is like ``put_on_stream``."""
        self._check_alive("get_on_stream")
        self._library.getmem_on_stream(*self._checked_transfer(dst, src, nbytes, pe, stream))

    def init_module(self, module: int, stream: int = 0) -> None:
        """Initialize rocSHMEM's device variables in a loaded module. It is a local operation.

        Each module has its own copy of these variables. Call this once for each module whose kernels use the primitives
        of ``tdkernels.lang.rocshmem``, before its first launch.

        Args:
            module: A hipModule_t as an integer: the ``module`` of a CompiledKernel.
            stream: The handle of a HIP stream as an integer.
        """
        self._check_alive("init_module")
        self._library.hipmodule_init(module, stream)
        _synchronize()  # if ``stream`` is 0, the library uses another stream

    def finalize(self) -> None:
        """Finalize rocSHMEM and free all its memory. Collective. Later calls do nothing.

        If the program itself has started rocSHMEM, this only frees the memory.
        """
        if not self._alive:
            return
        self.barrier()  # a peer may still read this rank's memory
        if not self._owned:
            for address in list(self._allocated):
                self.free(address)
        self._end()

    def _end(self):
        self._alive = False
        self._allocated.clear()
        if self._owned:
            self._library.finalize()

    def _end_at_exit(self):
        """Finalize without the barrier of ``finalize``, which would never return if a peer has died."""
        # After an unhandled exception, communication may be unfinished. The driver cleans up.
        if not self._alive or getattr(sys, "last_type", None) is not None:
            return
        try:
            _synchronize()
            self._end()
        except Exception as err:  # nothing catches an exception of an atexit handler
            print(f"tdkernels: rocSHMEM was not finalized: {err}", file=sys.stderr)

    def _check_alive(self, method):
        if not self._alive:
            raise RocshmemError(f"{method}: rocSHMEM was finalized in this process")

    def _checked_pe(self, pe):
        if not isinstance(pe, int) or not 0 <= pe < self.num_pes:
            raise ValueError(f"pe: expected one of {self.num_pes} PEs, not {pe!r}")
        return pe

    def _checked_transfer(self, dst, src, nbytes, pe, stream):
        if not isinstance(nbytes, int) or nbytes < 0:
            raise ValueError(f"nbytes must be an integer and not negative, not {nbytes!r}")
        for name, address in (("dst", dst), ("src", src)):
            held = self._allocated.items()
            if not any(first <= address and address + nbytes <= first + size for first, size in held):
                raise ValueError(f"{name}: the {nbytes} bytes at {address:#x} are not in symmetric memory")
        return dst, src, nbytes, self._checked_pe(pe), stream


def start(rank: int, world_size: int, exchange: Callable[[str], Sequence[str]]) -> RocshmemRuntime:
    """Return the runtime of this process. The first call starts rocSHMEM and is collective over the world.

    If the program has already started rocSHMEM on all ranks, with one PE for each rank, that instance is used. The
    current device must be that of this process. rocSHMEM itself waits for late ranks for ROCSHMEM_BOOTSTRAP_TIMEOUT
    seconds, 5 by default.

    Args:
        rank: This process's rank in the world.
        world_size: The number of ranks of the world.
        exchange: A collective function that takes a text of this rank and returns the texts of all ranks, by rank.

    Raises:
        RocshmemError: On all ranks, if rocSHMEM is missing or does not start on one of them.
        ValueError: If the rank is out of range or differs from that of an earlier call.
    """
    global _runtime
    if not 0 <= rank < world_size:
        raise ValueError(f"rank: {rank} is not one of {world_size} ranks")
    with _lock:
        if _runtime is None:
            _runtime = _start(rank, world_size, exchange)
            atexit.register(_runtime._end_at_exit)
        elif (rank, world_size) != (_runtime.rank, _runtime.world_size):
            raise ValueError(
                f"rank: rocSHMEM was started as rank {_runtime.rank} of {_runtime.world_size}, it cannot be rank "
                f"{rank} of {world_size}"
            )
        _runtime._check_alive("start")
        return _runtime


def _start(rank, world_size, exchange):
    library, offer = None, {}
    try:
        library = rocshmem_library.load()
        offer = {"version": library.version, "path": library.path, "pe": library.my_pe(), "pes": library.n_pes()}
        if rank == 0 and offer["pes"] < 1:
            offer["unique_id"] = library.get_uniqueid().hex()
    except Exception as err:  # sent to the other ranks
        offer = {"error": str(err)}
    offers = _exchanged(exchange, offer, world_size)
    adopted = _agreed(offers)
    if adopted:
        return RocshmemRuntime(library, rank, [offer["pe"] for offer in offers], owned=False)
    started = {}
    try:
        _make_device_current()
        library.init(rank, world_size, bytes.fromhex(offers[0]["unique_id"]))
        started = {"pe": library.my_pe(), "pes": library.n_pes()}
    except Exception as err:
        started = {"error": str(err)}
    everywhere = _exchanged(exchange, started, world_size)
    pes = [started.get("pe") for started in everywhere]
    _raise_errors(everywhere)
    _check_pes(pes, [started["pes"] for started in everywhere])
    return RocshmemRuntime(library, rank, pes, owned=True)


def _exchanged(exchange, fields, world_size):
    texts = exchange(json.dumps(fields))
    if len(texts) != world_size:
        raise ValueError(f"exchange: expected the texts of {world_size} ranks, not {len(texts)}")
    return [json.loads(text) for text in texts]


def _agreed(offers):
    """Return whether rocSHMEM is already running. All ranks get the same result, or raise the same error."""
    _raise_errors(offers)
    versions = [offer["version"] for offer in offers]
    if len(set(versions)) > 1:
        raise RocshmemError(f"the ranks have different versions of rocSHMEM: {_by_rank(versions)}")
    running = [offer["pes"] >= 1 for offer in offers]
    if all(running):
        _check_pes([offer["pe"] for offer in offers], [offer["pes"] for offer in offers])
        return True
    if any(running):
        states = ["started" if is_running else "not started" for is_running in running]
        raise RocshmemError(f"the program has started rocSHMEM on some ranks only: {_by_rank(states)}")
    nbytes = len(offers[0]["unique_id"]) // 2
    if nbytes != UNIQUE_ID_BYTES:
        raise RocshmemError(f"rank 0 has sent a unique id of {nbytes} bytes, rocSHMEM's have {UNIQUE_ID_BYTES}")
    return False


def _check_pes(pes, counts):
    """Check that the ranks are exactly the PEs. Allocation is collective over all PEs."""
    if any(count != len(pes) for count in counts) or sorted(pes) != list(range(len(pes))):
        found = [f"PE {pe} of {count}" for pe, count in zip(pes, counts)]
        raise RocshmemError(f"the {len(pes)} ranks of the world are not the PEs of one rocSHMEM: {_by_rank(found)}")


def _raise_errors(answers):
    errors = {rank: answer["error"] for rank, answer in enumerate(answers) if "error" in answer}
    if errors:
        rank, error = next(iter(errors.items()))
        raise RocshmemError(f"rocSHMEM does not start on rank {', '.join(map(str, errors))}. Rank {rank}: {error}")


def _by_rank(values):
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def _make_device_current():
    """Make torch set the current device, which it does lazily. rocSHMEM uses the current device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _synchronize():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
