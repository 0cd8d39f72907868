"""Where launches leave what they did, while somebody records it; see tdkernels.trace."""

import contextlib

import torch

from tdkernels.lang.profile import NUM_KINDS

active = None  # the Recorder of this process; None: kernels run without a trace, and are compiled without one


class Recorder:
    """The events of one launch at a time, int64 [kinds + turns, pieces, 2]; the next launch takes the same memory.

    all_run:  whether there are as many pieces as there are places; else those that have noted nothing are none
    """

    def __init__(self):
        self.events, self.all_run = None, True
        self._memory = None

    def clear(self):
        """Forget the events, keep the memory: so that a launch that is recorded has nothing to allocate or to fill."""
        if self.events is not None:
            self.events.zero_()

    def _buffer(self, device, pieces, turns, all_run):
        self.all_run = all_run
        places = NUM_KINDS.value + turns
        if self.events is None or self.events.shape != (places, pieces, 2) or self.events.device != device:
            self._memory = torch.zeros(2 + pieces * places * 2, dtype=torch.int64, device=device)
            self._memory[0] = places
            self.events = self._memory[2:].view(pieces, places, 2).transpose(0, 1)
        return self._memory


@contextlib.contextmanager
def record(recorder):
    """Let the launches of this process leave their events in a Recorder. Compiles each kernel anew, with the clock."""
    global active
    before, active = active, recorder
    try:
        yield recorder
    finally:
        active = before


def buffer(device, pieces, turns=0, all_run=True):
    """What goes to a kernel as ``trace_ptr``: memory for the events of so many pieces of work, or None.

    ``turns``: how often, at most, a piece does something of which it notes each time; ``all_run``: there are so many
    pieces, which are else the most that the host knows of.
    """
    return None if active is None else active._buffer(device, pieces, turns, all_run)
