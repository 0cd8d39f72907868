"""Copies to several places that the host enqueues with one call of the CUDA driver.

A CUDA graph cannot capture a batch, and drivers before CUDA 13 and ROCm do not have this function. In these cases the
copies are enqueued one by one.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [
        ("source_access_order", ctypes.c_int), ("source_hint", _Location), ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    ]


# The sources are read in stream order. The locations follow from the addresses.
_IN_STREAM_ORDER = _Attributes(1)
_FROM_FIRST = (ctypes.c_size_t * 1)(0)  # the attributes apply to all copies from number 0 on


@functools.cache
def _batch_function() -> Any:
    """Return cuMemcpyBatchAsync of the driver, or None if it has none."""
    if torch.version.cuda is None:
        return None
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), "cuMemcpyBatchAsync_v2", None)
    except OSError:
        return None


class CopyBatch:
    """Copies to fixed destinations. They are executed in any order.

    The arguments of the driver are built once: building them takes the host longer than the call.

    Args:
        destinations: Contiguous tensors.
    """

    def __init__(self, destinations: Sequence[torch.Tensor]) -> None:
        self._destinations = list(destinations)
        count = len(self._destinations)
        self._sources = (ctypes.c_uint64 * count)()
        self._arguments = (
            (ctypes.c_uint64 * count)(*[one.data_ptr() for one in self._destinations]),
            self._sources,
            (ctypes.c_size_t * count)(*[one.nbytes for one in self._destinations]),
            ctypes.c_size_t(count), ctypes.byref(_IN_STREAM_ORDER), _FROM_FIRST, ctypes.c_size_t(1),
        )

    def __len__(self) -> int:
        """Return the number of copies."""
        return len(self._destinations)

    def enqueue(self, sources: Sequence[torch.Tensor], stream: torch.cuda.Stream) -> None:
        """Enqueue the copies after earlier work of the current stream and before later work.

        Args:
            sources: For each destination a contiguous tensor with the same shape and dtype.
            stream: The current stream.
        """
        function = _batch_function()
        if function is not None and not torch.cuda.is_current_stream_capturing():
            for number, source in zip(range(len(self)), sources, strict=True):
                self._sources[number] = source.data_ptr()
            if function(*self._arguments, ctypes.c_void_p(stream.cuda_stream)) == 0:
                return
            # The driver has refused the batch, for example on a virtual GPU.
        for destination, source in zip(self._destinations, sources, strict=True):
            destination.copy_(source, non_blocking=True)
