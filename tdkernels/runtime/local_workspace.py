"""Zeroed private words for launches without peers, which have no workspace: ``lang.is_last_arriver`` counts in them.

Whoever uses them leaves zeros. Launches that may run at the same time must not share any: those of a stream have their
own, and so has each launch that a CUDA graph keeps, since nobody knows where it will be replayed.
"""

import torch

from tdkernels.rounding import round_up

_SLAB = 1 << 16  # words that are made at a time; making them takes a launch

_slabs: dict = {}  # device -> (zeros, how many of them are given away)
_of_stream: dict = {}  # (device, stream) -> words


def _take(device, count):
    zeros, taken = _slabs.get(device, (None, 0))
    if zeros is None or taken + count > len(zeros):
        zeros, taken = torch.zeros(max(_SLAB, count), dtype=torch.int64, device=device), 0
        torch.cuda.current_stream(device).synchronize()  # words of it go to other streams, too
    _slabs[device] = zeros, taken + count
    return zeros[taken : taken + count]


def local_flags(device, count):
    """``count`` words of zero for a launch on the current stream."""
    count = round_up(count, 128)
    if device.type == "cpu":
        return torch.zeros(count, dtype=torch.int64, device=device)
    if torch.cuda.is_current_stream_capturing():
        zeros, taken = _slabs.get(device, ((), 0))
        if taken + count > len(zeros):
            return torch.zeros(count, dtype=torch.int64, device=device)  # by the graph itself, at each replay
        return _take(device, count)
    key = device, torch.cuda.current_stream(device).cuda_stream
    words = _of_stream.get(key)
    if words is None or len(words) < count:
        with torch.inference_mode(False):
            _of_stream[key] = words = _take(device, count)
    return words
