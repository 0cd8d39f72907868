"""Where launches leave what they did, while somebody records it; see tdkernels.trace."""

import contextlib

import torch

from tdkernels.lang._trace import NUM_KINDS

_recorder = None  # of this process; None: kernels run without a trace, and are compiled without one


class Recorder:
    """The events of one launch at a time, int64 [kinds + turns, programs, 2]; the next launch takes the same memory."""

    def __init__(self):
        self.events = None

    def clear(self):
        """Forget the events, keep the memory: so that a launch that is recorded has nothing to allocate or to fill."""
        if self.events is not None:
            self.events.zero_()

    def _buffer(self, device, programs, turns):
        shape = (NUM_KINDS.value + turns, programs, 2)
        if self.events is None or self.events.shape != shape or self.events.device != device:
            self.events = torch.zeros(shape, dtype=torch.int64, device=device)
        return self.events


@contextlib.contextmanager
def record(recorder):
    """Let the launches of this process leave their events in a Recorder. Compiles each kernel anew, with the clock."""
    global _recorder
    before, _recorder = _recorder, recorder
    try:
        yield recorder
    finally:
        _recorder = before


def buffer(device, programs, turns=0):
    """What goes to a kernel as ``trace_ptr``: memory for the events of so many programs, or None if nobody records.

    ``turns``: how often, at most, a program does something of which it notes each time.
    """
    return None if _recorder is None else _recorder._buffer(device, programs, turns)
