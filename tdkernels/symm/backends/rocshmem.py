"""rocSHMEM as the transport between AMD GPUs of several hosts: started once a process, ended when it exits.

``start`` makes the runtime of this process, on all ranks together; ``RocshmemRuntime`` is what symmetric memory is made
of. Nothing here has run on AMD hardware: the tests run it against a stand-in for the library (docs/rocshmem.md).
"""

import atexit
import json
import sys
import threading

import torch

from tdkernels.lang import rocshmem_library
from tdkernels.lang.rocshmem_library import UNIQUE_ID_BYTES, RocshmemError

_lock = threading.Lock()
_runtime = None  # of this process, also when it has been finalized


class RocshmemRuntime:
    """rocSHMEM in this process. Made by ``start``.

    ``pe``, ``num_pes`` and ``version`` are plain attributes. Methods that are collective are so over all PEs, in the
    same order, with the same arguments.
    """

    name = "rocSHMEM"

    def __init__(self, library, rank, pes, owned):
        self.rank, self.world_size = rank, len(pes)
        self.pe, self.num_pes = pes[rank], len(pes)
        self.version = library.version
        self._library, self._pes, self._owned = library, pes, owned
        self._allocated = {}  # bytes by address
        self._alive = True

    def pe_of(self, rank):
        """The PE that rank ``rank`` of the world is."""
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise ValueError(f"rank: expected one of the world's {self.world_size} ranks, not {rank!r}")
        return self._pes[rank]

    def malloc(self, nbytes):
        """The address of ``nbytes`` bytes on every PE, not zeroed; collective.

        Raises:
            RocshmemError: when the symmetric heap, whose size is fixed when rocSHMEM starts, has no room
        """
        self._check_alive("malloc")
        if not isinstance(nbytes, int) or nbytes <= 0:
            raise ValueError(f"nbytes must be a positive integer, not {nbytes!r}")
        _synchronize()  # the library's own barrier is a kernel, which must not wait for others of this process
        address = self._library.malloc(nbytes)
        if not address:
            held = sum(self._allocated.values())
            raise RocshmemError(
                f"rocshmem_malloc({nbytes}) returned null with {held} bytes held before: the symmetric heap is full. "
                f"Its size is ROCSHMEM_HEAP_SIZE in bytes, 1 GiB by default, the same on all ranks."
            )
        self._allocated[address] = nbytes
        return address

    def free(self, address):
        """Give the memory at ``address`` back; collective. After ``finalize`` it does nothing: all was given back."""
        if not self._alive:
            return
        if address not in self._allocated:
            raise ValueError(f"address: {address!r} is not one that malloc has returned and free has not seen")
        _synchronize()
        del self._allocated[address]
        self._library.free(address)

    def peer_address(self, address, pe):
        """Where this process reaches what ``pe`` has at ``address``, or 0 when it does not, as on another host."""
        self._check_alive("peer_address")
        return address if self._checked_pe(pe) == self.pe else self._library.ptr(address, pe)

    def barrier(self):
        """Return when every PE has come here and its device has done all the work enqueued before; collective."""
        self._check_alive("barrier")
        _synchronize()
        self._library.barrier_all()

    def put_on_stream(self, dst, src, nbytes, pe, stream):
        """Copy ``nbytes`` bytes at ``src`` to ``dst`` of PE ``pe``, in the order of a stream, given as an integer.

        Both are addresses of symmetric memory in this process: rocSHMEM asks it of the source too. When the stream has
        passed, the bytes are there. One workgroup moves them, so this is no way to move many on one host.
        """
        self._check_alive("put_on_stream")
        self._library.putmem_on_stream(*self._checked_transfer(dst, src, nbytes, pe, stream))

    def get_on_stream(self, dst, src, nbytes, pe, stream):
        """Copy ``nbytes`` bytes at ``src`` of PE ``pe`` to ``dst``; otherwise as ``put_on_stream``."""
        self._check_alive("get_on_stream")
        self._library.getmem_on_stream(*self._checked_transfer(dst, src, nbytes, pe, stream))

    def init_module(self, module, stream=0):
        """Make a loaded module of kernels ready to use the words of ``tdkernels.lang.rocshmem``; local.

        A module has a copy of rocSHMEM's device variables of its own, which the library fills. Once for each module,
        before its first launch. ``module`` is a hipModule_t as an integer: the ``module`` of a CompiledKernel.
        """
        self._check_alive("init_module")
        self._library.hipmodule_init(module, stream)
        _synchronize()  # for stream 0 the library takes another one

    def finalize(self):
        """End rocSHMEM and give all its memory back; collective. Later calls do nothing.

        Where the program had started rocSHMEM, it goes on: then the memory is given back, and that is all.
        """
        if not self._alive:
            return
        self.barrier()  # a peer may still read what we have
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
        """``finalize`` without its barrier: a peer that is gone would let this process wait for ever."""
        # A process that dies of an exception leaves in the middle of something; its driver cleans up.
        if not self._alive or getattr(sys, "last_type", None) is not None:
            return
        try:
            _synchronize()
            self._end()
        except Exception as err:  # an exception here has no one to catch it
            print(f"tdkernels: rocSHMEM was not ended in order: {err}", file=sys.stderr)

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


def start(rank, world_size, exchange):
    """The runtime of this process; the first call is collective over the world and starts rocSHMEM.

    Where the program has started it, on all ranks and with as many PEs as there are ranks, that one is taken. The
    device of this process must be the current one. rocSHMEM itself waits for late ranks for
    ROCSHMEM_BOOTSTRAP_TIMEOUT seconds, 5 by default.

    Args:
        rank, world_size: of this process in the world
        exchange: called with a text on every rank, returns the list of all ranks' texts, by rank

    Returns:
        RocshmemRuntime

    Raises:
        RocshmemError: on all ranks, when rocSHMEM is missing or does not start on one of them
        ValueError
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
    except Exception as err:  # the others have to hear of it
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
    """Whether rocSHMEM is running already; every rank comes to the same answer, or the same error."""
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
    """Each rank must be a PE of its own, and there must be no others: allocation is collective over all PEs."""
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
    """rocSHMEM takes the device that is current; torch makes it so as late as it can."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _synchronize():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
