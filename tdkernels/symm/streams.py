"""Order of a group's launches on one device, across CUDA streams."""

import torch
from triton.runtime import driver

from tdkernels.symm.agreement import poll


class StreamOrder:
    """Make each launch of a group wait for the previous one, even if that is on another stream.

    The programs of a collective kernel fill the GPU until the kernel ends. If two kernels of a group could run
    concurrently, one rank might start the first kernel and another rank the second. Then each waits for a kernel that
    cannot start: a deadlock.
    """

    def __init__(self, device):
        self._device = device
        self._last_stream = self._last_event = None

    def before(self, capturing: bool) -> torch.cuda.Stream:
        """Make the current stream wait for the last launch, unless a CUDA graph is captured. Return the stream."""
        stream = self._current_stream()
        if self._last_event is not None and not capturing and stream != self._last_stream:
            stream.wait_event(self._last_event)
        return stream

    def after(self, stream: torch.cuda.Stream | None) -> None:
        """Record the launch on ``stream``. None means the current stream."""
        self._last_stream = stream or torch.cuda.current_stream(self._device)
        if self._last_event is None:
            self._last_event = torch.cuda.Event()
        self._last_event.record(self._last_stream)

    def wait_for_last(self, until: float) -> None:
        """Wait on the host until the launches have ended, or until a time of ``time.monotonic``.

        It does not wait for replays of CUDA graphs. It must not be called during capture. On the CPU it does not wait.
        """
        if self._last_event is not None:
            poll(self._last_event.query, until)

    def _current_stream(self):
        """Return the current stream. It is usually that of the last launch.

        ``torch.cuda.current_stream`` takes several microseconds, because it creates an object.
        """
        last = self._last_stream
        if last is not None and driver.active.get_current_stream(self._device.index) == last.cuda_stream:
            return last
        return torch.cuda.current_stream(self._device)
