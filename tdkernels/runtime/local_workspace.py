"""Zeroed private words for launches without communication, which have no workspace.

They are the counters of ``lang.is_last_arriver`` and of work queues. Every kernel that uses the words resets them to
zero. Launches that may run at the same time must not share words. Therefore each stream has its own, and so does each
launch captured in a CUDA graph, since the stream of the replay is not known.
"""

import threading

import torch
from triton.runtime import driver

from tdkernels.rounding import round_up

_SLAB = 1 << 16  # words per allocation; each allocation takes a launch
_LINE = 16  # words of a cache line

_slabs: dict = {}  # device -> (zeros, number of words in use)
_full: list = []  # earlier slabs: captured graphs, which hold no reference, may use their words
_of_stream: dict = {}  # (device, stream) -> words
_lock = threading.Lock()  # for all of these


def _take(device, count):
    """Return ``count`` unused words of the device's slab; allocate a new slab if they do not fit. Needs the lock."""
    zeros, taken = _slabs.get(device, (None, 0))
    if zeros is None or taken + count > len(zeros):
        if zeros is not None:
            _full.append(zeros)
        zeros, taken = torch.zeros(max(_SLAB, count), dtype=torch.int64, device=device), 0
        torch.cuda.current_stream(device).synchronize()  # other streams use words of this slab, too
    _slabs[device] = zeros, taken + count
    return zeros[taken : taken + count]


def local_flags(device: torch.device, count: int) -> torch.Tensor:
    """Return at least ``count`` zeroed 64-bit words for a launch on the current stream."""
    if device.type == "cpu":
        return torch.zeros(count, dtype=torch.int64, device=device)
    if torch.cuda.is_current_stream_capturing():
        return _of_captured_launch(device, round_up(count, _LINE))  # a model may have thousands of such launches
    count = round_up(count, 8 * _LINE)
    key = device, driver.active.get_current_stream(device.index)
    words = _of_stream.get(key)
    if words is None or len(words) < count:
        with _lock, torch.inference_mode(False):
            _of_stream[key] = words = _take(device, count)
    return words


def _of_captured_launch(device, count):
    """Return words of its own for a launch that is captured in a graph."""
    with _lock:
        zeros, taken = _slabs.get(device, ((), 0))
        if taken + count <= len(zeros):
            return _take(device, count)
    return torch.zeros(count, dtype=torch.int64, device=device)  # the graph itself zeroes them at each replay
