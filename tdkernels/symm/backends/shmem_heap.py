"""Symmetric memory of GPUs on several nodes: sub-allocation from one heap of NVSHMEM (NVIDIA) or rocSHMEM (AMD).

These libraries allocate collectively over all processes, but a group may contain only some of them. So each process
allocates one large segment of ``TDKERNELS_HEAP_MB`` at the start. The ranks of a group then agree on an offset at which
the segment is free on all of them. The libraries only require that the offset is the same on all ranks. If there is no
room, a group of all processes allocates another segment, and any other group raises MemoryError.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tdkernels.lang import device_library as _device_library
from tdkernels.rounding import round_up
from tdkernels.symm.buffer import SymmetricBuffer
from tdkernels.symm.group import GroupState, resolve_group
from tdkernels.symm.store_values import whole_number

VARIABLE = "TDKERNELS_HEAP_MB"
DEFAULT_MB = 2048
_ALIGN = 512
_SPARE = 64 << 20  # for the library's own data in the heap

_heaps: dict = {}  # by device


def heap_bytes() -> int:
    """Return the size of the heap on each GPU in bytes.

    Raises:
        ValueError: If the environment variable is not a positive integer.
    """
    text = os.environ.get(VARIABLE, str(DEFAULT_MB))
    try:
        megabytes = int(text)
    except ValueError:
        megabytes = 0
    if megabytes < 1:
        raise ValueError(f"{VARIABLE} must be a positive number of MiB, not {text!r}")
    return megabytes << 20


def first_fit(taken: Iterable[list[int]], nbytes: int, size: int) -> int | None:
    """Return the lowest offset of ``nbytes`` free bytes in a segment of ``size`` bytes, or None if there is none.

    ``taken`` are the used intervals [start, stop), which may overlap.
    """
    start = 0
    for first, last in sorted(taken):
        if first - start >= nbytes:
            break
        start = max(start, last)
    return start if start + nbytes <= size else None


def _checked(peer, offer):
    """Validate a rank's offer from the store, since addresses are computed from it.

    Return its PE and, for each segment, (size, used intervals). Raise ValueError unless all are integers in range.
    """
    what = f"a segment of the heap of rank {peer}"
    segments = [
        (whole_number(size, what), [[whole_number(end, what) for end in interval] for interval in taken])
        for size, taken in offer["pieces"]
    ]
    return whole_number(offer["pe"], f"pe of rank {peer}", 1 << 31), segments


@dataclass
class _Segment:
    """One segment of the heap: an allocation of the library on all processes. ``taken``: the used intervals here."""

    base: int
    size: int
    taken: list = field(default_factory=list)


class Heap:
    """The segments of this process.

    Args:
        runtime: The runtime of NVSHMEM or rocSHMEM.
        size: The size of a segment in bytes.
    """

    def __init__(self, runtime: Any, size: int):
        self.runtime = runtime
        self._segments = [_Segment(runtime.malloc(size), size)]

    def take(self, state: GroupState, nbytes: int) -> tuple[int, list[int]]:
        """Allocate memory at an offset that is free on all ranks of a group. Collective over the group.

        Returns:
            The address in this process, and the PE of each rank.

        Raises:
            MemoryError: On every rank, if no such offset exists.
        """
        nbytes = round_up(nbytes, _ALIGN)
        here = {"pe": self.runtime.pe, "pieces": [[segment.size, segment.taken] for segment in self._segments]}
        texts = state.exchange("symm.allocate", json.dumps(here))
        pes, segments = zip(*[_checked(peer, json.loads(text)) for peer, text in enumerate(texts)], strict=True)
        segment, start = self._place(segments, nbytes)
        segment.taken.append((start, start + nbytes))
        return segment.base + start, list(pes)

    def _place(self, segments_of_ranks, nbytes):
        """Return (segment, offset) of the first free space on all these ranks. Allocate a segment if necessary."""
        for segment, of_ranks in zip(self._segments, zip(*segments_of_ranks, strict=True), strict=True):
            size = min(size for size, _ in of_ranks)
            start = first_fit([interval for _, taken in of_ranks for interval in taken], nbytes, size)
            if start is not None:
                return segment, start
        if len(segments_of_ranks) < self.runtime.num_pes:  # the allocation of a segment needs all processes
            raise MemoryError(
                f"no {nbytes >> 20} MiB are free in the symmetric heap on all ranks of the group; set {VARIABLE} to "
                f"more than {self._segments[0].size >> 20}, on every rank"
            )
        size = max(nbytes, self._segments[0].size)
        self._segments.append(_Segment(self.runtime.malloc(size), size))
        return self._segments[-1], 0

    def give_back(self, address: int) -> None:
        """Free an allocation in this process. It is a local operation."""
        for segment in self._segments:
            segment.taken = [interval for interval in segment.taken if segment.base + interval[0] != address]


def heap_for(device: torch.device) -> Heap:
    """Return the heap of a device. The first call initializes the library and is collective over the world."""
    if device not in _heaps:
        size = heap_bytes()
        runtime, library = _start_rocshmem(size) if torch.version.hip else _start_nvshmem(device, size)
        _device_library.provide(library, runtime.init_module)
        _heaps[device] = Heap(runtime, size)
    return _heaps[device]


def _start_nvshmem(device, size):
    """Start NVSHMEM. Return the runtime and the libraries that kernels are linked with."""
    from tdkernels.symm.backends import nvshmem

    runtime = nvshmem.start(device, size)
    return runtime, runtime.device_library()


def _start_rocshmem(size):
    """Start rocSHMEM, with results as ``_start_nvshmem``. This was never run on AMD hardware."""
    from tdkernels.lang.rocshmem import device_library
    from tdkernels.symm.backends import rocshmem

    library = device_library()
    os.environ.setdefault("ROCSHMEM_HEAP_SIZE", str(size + _SPARE))
    world = GroupState(resolve_group(None), "tdkernels/rocshmem")
    return rocshmem.start(world.rank, world.world_size, partial(world.exchange, "rocSHMEM")), library


class HeapBuffer(SymmetricBuffer):
    """Symmetric memory in the heap of NVSHMEM or rocSHMEM."""

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
        # No peer may write before this rank's memory is zeroed.
        failures = [text for text in state.exchange("symm.allocate", failure) if text]
        if failures:
            self._heap.give_back(self._own)
            raise RuntimeError("; ".join(failures))

    def _address_of(self, peer):
        """Return the address of the buffer of ``peer`` in this process, or 0 if the peer is on another node."""
        if peer == self.rank:
            return self._own
        return self._heap.runtime.peer_address(self._own, self._pes[peer]) if self.topology.is_local(peer) else 0

    def _out_of_reach(self):
        """Return an error text if a buffer on this node cannot be mapped, otherwise an empty string."""
        missing = [p for p, address in enumerate(self._addresses) if self.topology.is_local(p) and not address]
        if not missing:
            return ""
        library = self._heap.runtime.name
        return f"rank {self.rank} cannot map the memory of rank {missing[0]} of its own node: {library} has no address"

    @property
    def addresses(self) -> list[int]:
        return list(self._addresses)

    @property
    def pes(self) -> list[int]:
        return list(self._pes)

    def tensor(self, peer: int) -> torch.Tensor:
        self._check_reach(peer)
        return torch.as_tensor(_Bytes(self._addresses[peer], self.nbytes), device=self.device)

    def close(self) -> None:
        if self._heap is not None:
            self._heap.give_back(self._own)
        self._heap = None


class _Bytes:
    """Memory on a GPU with the CUDA array interface, from which torch makes a tensor."""

    def __init__(self, address, nbytes):
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
