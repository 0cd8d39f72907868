"""Failure flags and failure records of a rank, which kernels write (``lang.failure_record``) and the host reports.

A wait that times out sets the group's flag on this device permanently. It also sets the device's flag, which the host
clears when it reports the failure. Launches that start while a flag is set are void, because their inputs may be
missing: they send no results and wait for nothing. A void launch sets the flag of its own group. Groups without a void
launch continue after the report.
"""

import weakref

import torch

from tdkernels.lang import failure_record as records

_WORDS = 8  # for the words of a record, see lang.failure_record


def host_words(count: int, device: torch.device) -> torch.Tensor:
    """Return ``count`` zeroed 64-bit words in host memory that kernels on ``device`` can write.

    They are in host memory even if torch has another default device.
    """
    return torch.zeros(count, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")


class Failure:
    """Failure flag and record of one group on one device.

    All workspaces of the group share them, so that kernels that are already queued after a failed one do not send data
    computed from missing inputs.

    Args:
        device: The device.
        error_of: A bound method that converts (record, error of another group or None) to an exception. Only a weak
            reference to it is kept.

    Attributes:
        flags: The group's three failure words on the device.
        record: The failure record in host memory, written by the kernel that failed.
        error: The exception for the record, or None.
        device: The DeviceFailure of the device.
    """

    def __init__(self, device, error_of):
        self.device = device_failure(device)
        self.flags = torch.zeros(3, dtype=torch.int64, device=device)
        self.flags[2] = self.device.host.data_ptr()
        self.record = host_words(_WORDS, device)
        self._words = self.record.numpy()
        self._error_of = weakref.WeakMethod(error_of)
        self.error = None
        self.device.failures.add(self)

    def read(self, source: Exception | None) -> None:
        """Convert the record, if any, to ``error``. For void launches, ``source`` is the error of the other group."""
        error_of = self._error_of()
        if self.error is None and self._words[0] and error_of is not None:
            self.error = error_of(tuple(int(word) for word in self._words[:6]), source)

    @property
    def is_void(self) -> bool:
        """Whether the record is only that of a void launch."""
        return self._words[0] == records.RECORD_VOID.value


class DeviceFailure:
    """Failure flag of one device, shared by all groups of this process.

    Attributes:
        flag: The failure word on the device. Launches are void while it is set.
        host: A copy of the flag in host memory. The host checks it before each launch.
        word: The same memory as ``host``, as a NumPy array.
        failures: The Failure of each group.
    """

    def __init__(self, device):
        self._device = device
        self.flag = torch.zeros(1, dtype=torch.int64, device=device)
        self.host = host_words(1, device)
        self.word = self.host.numpy()
        self.failures = weakref.WeakSet()

    def is_set(self) -> bool:
        """Return whether a launch has failed and the failure was not reported yet."""
        return self.word[0] != 0

    def report(self) -> Exception | None:
        """Read all records, clear the device's flag, and return the first failure, or None.

        Groups without a record can then launch again. This waits for the device, because launches that are still queued
        must see the flag. The capture of a CUDA graph allows no wait; in this case the flag stays set.
        """
        can_wait = self._device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
        if can_wait:
            self._synchronize()
        # Known errors were reported before, so they did not cause the void launches since then.
        new = [failure for failure in self.failures if failure.error is None]
        source = None
        for failure in sorted(new, key=lambda failure: failure.is_void):
            failure.read(source)
            source = source or failure.error
        if can_wait:
            self.flag.zero_()
            self._synchronize()
            self.word[0] = 0
        return source

    def _synchronize(self):
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


_devices: dict = {}


def device_failure(device: torch.device) -> DeviceFailure:
    """Return the DeviceFailure of a device. The first call creates it."""
    if device not in _devices:
        _devices[device] = DeviceFailure(device)
    return _devices[device]
