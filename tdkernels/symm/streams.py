"""The order of a group's launches on one device, whatever CUDA streams they go to."""

import torch
from triton.runtime import driver


class StreamOrder:
    """Orders each launch of a group after the one before, on whatever stream that was.

    Programs of a collective kernel stay on the GPU and fill it. If two kernels of a group could run side by side, one
    rank's GPU might start the first and another's the second; then each waits for a kernel that finds no room.
    """

    def __init__(self, device):
        self._device = device
        self._last_stream = self._last_event = None

    def before(self, capturing):
        """Make the current stream wait for the last launch, and return the stream."""
        stream = self._current_stream()
        if self._last_event is not None and not capturing and stream != self._last_stream:
            stream.wait_event(self._last_event)
        return stream

    def after(self, stream):
        """Remember where the launch went; None: to the current stream."""
        self._last_stream = stream or torch.cuda.current_stream(self._device)
        if self._last_event is None:
            self._last_event = torch.cuda.Event()
        self._last_event.record(self._last_stream)

    def _current_stream(self):
        """As torch's, which takes the host several microseconds to make: mostly it is the one of the last launch."""
        last = self._last_stream
        if last is not None and driver.active.get_current_stream(self._device.index) == last.cuda_stream:
            return last
        return torch.cuda.current_stream(self._device)
