"""Trace capture: buffers in which launches store their events while a trace is recorded; see tdkernels.trace."""

import contextlib
from collections.abc import Iterator

import torch

from tdkernels.lang.profile import NUM_KINDS

active: "Recorder | None" = None  # the Recorder of this process; None: kernels are compiled and run without a trace


class Recorder:
    """The events of one launch at a time. The next launch uses the same memory.

    Attributes:
        events: int64 [kinds + turns, pieces, 2], or None before the first launch. A piece is a work item.
        all_run: whether every piece has been executed; if not, pieces without events do not exist.
        by_warps: whether different warps of a program execute pieces at the same time.
    """

    def __init__(self) -> None:
        self.events, self.all_run, self.by_warps = None, True, False
        self._memory = None

    def clear(self) -> None:
        """Clear the events but keep the memory, so that a recorded launch has nothing to allocate or to fill."""
        if self.events is not None:
            self.events.zero_()

    def _buffer(self, device, pieces, turns, all_run, by_warps):
        """Return the buffer for a launch, with its header; allocate it if the shape or device has changed."""
        self.all_run, self.by_warps = all_run, by_warps
        places = NUM_KINDS.value + turns
        if self.events is None or self.events.shape != (places, pieces, 2) or self.events.device != device:
            self._memory = torch.zeros(2 + pieces * places * 2, dtype=torch.int64, device=device)
            self._memory[0] = places
            self.events = self._memory[2:].view(pieces, places, 2).transpose(0, 1)
        return self._memory


@contextlib.contextmanager
def record(recorder: Recorder) -> Iterator[Recorder]:
    """Record the launches of this process in ``recorder`` within a ``with`` block.

    Each kernel is compiled again, with reads of the clock.
    """
    global active
    before, active = active, recorder
    try:
        yield recorder
    finally:
        active = before


def buffer(
    device: torch.device, pieces: int, turns: int = 0, all_run: bool = True, by_warps: bool = False
) -> torch.Tensor | None:
    """Return the argument ``trace_ptr`` of a kernel: memory for its events, or None if no trace is recorded.

    Args:
        device: the device of the launch.
        pieces: number of pieces (work items).
        turns: maximum number of repetitions that a piece records.
        all_run: whether there are exactly ``pieces`` pieces. False: ``pieces`` is the host's upper bound.
        by_warps: whether different warps of a program execute pieces at the same time.
    """
    return None if active is None else active._buffer(device, pieces, turns, all_run, by_warps)
