"""Copies between tensors that the host enqueues with one call of the CUDA driver.

Without the batch, each copy is a call of torch's ``copy_``. A CUDA graph cannot capture a batch, and drivers before
CUDA 13 and ROCm do not have this function. In these cases the copies are enqueued one by one.
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
_ALL_FROM_FIRST = (ctypes.c_size_t * 1)(0)  # the attributes apply to all copies from number 0 on


@functools.cache
def _batch_function() -> Any:
    """Return cuMemcpyBatchAsync of the driver, or None if it has none."""
    if torch.version.cuda is None:
        return None
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), "cuMemcpyBatchAsync_v2", None)
    except OSError:
        return None


def copy_all(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Enqueue copies on the current stream. They are executed in any order, after earlier work and before later work.

    Args:
        copies: List of (destination, source), contiguous and with the same number of bytes.
    """
    if len(copies) < 2 or not _enqueued(copies):
        for destination, source in copies:
            destination.copy_(source, non_blocking=True)


def _enqueued(copies):
    """Enqueue the copies as a batch. Return whether this was possible."""
    function = _batch_function() if copies[0][0].is_cuda else None
    if function is None or torch.cuda.is_current_stream_capturing():
        return False
    count = len(copies)
    addresses, sizes = ctypes.c_uint64 * count, ctypes.c_size_t * count
    destinations = addresses(*[destination.data_ptr() for destination, _ in copies])
    sources = addresses(*[source.data_ptr() for _, source in copies])
    nbytes = sizes(*[source.nbytes for _, source in copies])
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    # If the driver refuses the batch, for example on a virtual GPU, the copies are repeated one by one.
    return not function(
        destinations, sources, nbytes, ctypes.c_size_t(count), ctypes.byref(_IN_STREAM_ORDER), _ALL_FROM_FIRST,
        ctypes.c_size_t(1), stream,
    )
