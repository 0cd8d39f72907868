"""Symmetric memory of GPUs on several nodes: parts of one heap that NVSHMEM (NVIDIA) or rocSHMEM (AMD) has made.

Such a library allocates for all its processes at once, while our groups may be any of them. So each process takes one
large piece at the beginning, ``TDKERNELS_HEAP_MB``, and a group agrees on a place in it that is free on all its ranks:
what is at the same distance from the beginning is the same to the library, which is all that it asks for. A group of
all processes takes a further piece when there is no room left.
"""

import json
import os
from dataclasses import dataclass, field
from functools import partial

import torch

from tdkernels.lang import device_library as _device_library
from tdkernels.rounding import round_up
from tdkernels.symm.buffer import SymmetricBuffer
from tdkernels.symm.group import GroupState, resolve_group
from tdkernels.symm.store_values import whole_number

VARIABLE = "TDKERNELS_HEAP_MB"
DEFAULT_MB = 2048
_ALIGN = 512
_SPARE = 64 << 20  # for what the library itself keeps in its memory

_heaps: dict = {}  # by device


def heap_bytes():
    """Bytes of the heap on each GPU.

    Raises:
        ValueError: when the variable is not a positive integer
    """
    text = os.environ.get(VARIABLE, str(DEFAULT_MB))
    try:
        megabytes = int(text)
    except ValueError:
        megabytes = 0
    if megabytes < 1:
        raise ValueError(f"{VARIABLE} must be a positive number of MiB, not {text!r}")
    return megabytes << 20


def first_fit(taken, nbytes, size):
    """The lowest place for ``nbytes`` beside intervals [start, stop) that may overlap; None if there is none."""
    start = 0
    for first, last in sorted(taken):
        if first - start >= nbytes:
            break
        start = max(start, last)
    return start if start + nbytes <= size else None


def _checked(peer, offer):
    """(PE, [(size, intervals taken) of each piece]) that a rank has put into the store; from them follow addresses.

    Raises:
        ValueError: unless all are integers in range
    """
    what = f"a piece of the heap of rank {peer}"
    pieces = [
        (whole_number(size, what), [[whole_number(end, what) for end in interval] for interval in taken])
        for size, taken in offer["pieces"]
    ]
    return whole_number(offer["pe"], f"pe of rank {peer}", 1 << 31), pieces


@dataclass
class _Piece:
    """One allocation of the library, the same on all its processes, and which intervals of it are taken here."""

    base: int
    size: int
    taken: list = field(default_factory=list)


class Heap:
    """This process's pieces of the library's memory."""

    def __init__(self, runtime, size):
        self.runtime = runtime
        self._pieces = [_Piece(runtime.malloc(size), size)]

    def take(self, state, nbytes):
        """(address of a place that is free on all ranks of a group, their numbers in the library); collective.

        Raises:
            MemoryError: on every rank when there is none
        """
        nbytes = round_up(nbytes, _ALIGN)
        here = {"pe": self.runtime.pe, "pieces": [[piece.size, piece.taken] for piece in self._pieces]}
        texts = state.exchange("symm.allocate", json.dumps(here))
        pes, pieces = zip(*[_checked(peer, json.loads(text)) for peer, text in enumerate(texts)], strict=True)
        piece, start = self._place(pieces, nbytes)
        piece.taken.append((start, start + nbytes))
        return piece.base + start, list(pes)

    def _place(self, pieces_of_ranks, nbytes):
        """(piece, offset) of the first place that is free on all these ranks, in a new piece if need be."""
        for piece, of_ranks in zip(self._pieces, zip(*pieces_of_ranks, strict=True), strict=True):
            size = min(size for size, _ in of_ranks)
            start = first_fit([interval for _, taken in of_ranks for interval in taken], nbytes, size)
            if start is not None:
                return piece, start
        if len(pieces_of_ranks) < self.runtime.num_pes:  # others would have to come to the allocation, too
            raise MemoryError(
                f"no {nbytes >> 20} MiB are free in the symmetric heap on all ranks of the group; set {VARIABLE} to "
                f"more than {self._pieces[0].size >> 20}, on every rank"
            )
        size = max(nbytes, self._pieces[0].size)
        self._pieces.append(_Piece(self.runtime.malloc(size), size))
        return self._pieces[-1], 0

    def give_back(self, address):
        for piece in self._pieces:
            piece.taken = [interval for interval in piece.taken if piece.base + interval[0] != address]


def heap_for(device):
    """The heap of a device; made, and the library initialised, when all ranks of the world first ask for it."""
    if device not in _heaps:
        size = heap_bytes()
        runtime, library = _start_rocshmem(size) if torch.version.hip else _start_nvshmem(device, size)
        _device_library.provide(library, runtime.init_module)
        _heaps[device] = Heap(runtime, size)
    return _heaps[device]


def _start_nvshmem(device, size):
    """(the runtime, what kernels are linked with)"""
    from tdkernels.symm.backends import nvshmem

    runtime = nvshmem.start(device, size)
    return runtime, runtime.device_library()


def _start_rocshmem(size):
    """As ``_start_nvshmem``; never run on AMD hardware."""
    from tdkernels.lang.rocshmem import device_library
    from tdkernels.symm.backends import rocshmem

    library = device_library()
    os.environ.setdefault("ROCSHMEM_HEAP_SIZE", str(size + _SPARE))
    world = GroupState(resolve_group(None), "tdkernels/rocshmem")
    return rocshmem.start(world.rank, world.world_size, partial(world.exchange, "rocSHMEM")), library


class HeapBuffer(SymmetricBuffer):
    def __init__(self, state, nbytes, device):
        super().__init__(state, nbytes, device)
        with torch.cuda.device(device):
            self._heap = heap_for(device)
            self._own, self._pes = self._heap.take(state, nbytes)
            self._addresses = [self._address_of(peer) for peer in range(self.world_size)]
            failure = self._out_of_reach()
            if not failure:
                self.tensor(self.rank).zero_()
                torch.cuda.synchronize(device)
        # No peer may write before our zeros are in place.
        failures = [text for text in state.exchange("symm.allocate", failure) if text]
        if failures:
            self._heap.give_back(self._own)
            raise RuntimeError("; ".join(failures))

    def _address_of(self, peer):
        """Where we reach the buffer of ``peer``; 0 where we do not, or are not to."""
        if peer == self.rank:
            return self._own
        return self._heap.runtime.peer_address(self._own, self._pes[peer]) if self.topology.is_local(peer) else 0

    def _out_of_reach(self):
        missing = [p for p, address in enumerate(self._addresses) if self.topology.is_local(p) and not address]
        if not missing:
            return ""
        library = self._heap.runtime.name
        return f"rank {self.rank} cannot map the memory of rank {missing[0]} of its own node: {library} has no address"

    @property
    def addresses(self):
        return list(self._addresses)

    @property
    def pes(self):
        return list(self._pes)

    def tensor(self, peer):
        self._check_reach(peer)
        return torch.as_tensor(_Bytes(self._addresses[peer], self.nbytes), device=self.device)

    def close(self):
        if self._heap is not None:
            self._heap.give_back(self._own)
        self._heap = None


class _Bytes:
    """Memory on a GPU as torch takes it from another library."""

    def __init__(self, address, nbytes):
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
