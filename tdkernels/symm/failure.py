"""Failures on a device, as the kernels leave them (``lang.failure_record``) and the host reports them.

A wait that gives up marks its group for good, on this device, and the device until the host has reported the failure.
Launches that start in between are void: what they would compute from may be missing. A group of which a launch was void
is marked, too. Other groups go on after the report.
"""

import weakref

import torch

from tdkernels.lang import failure_record as records

_WORDS = 8  # see lang.failure_record for what a record holds


def host_words(count, device):
    """Words of zero in the memory of the host, whatever device is the default one, that a kernel can write to."""
    return torch.zeros(count, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")


class Failure:
    """The failure of one group on one device.

    Attributes:
        flags: the group's words on the device.
        record: what the kernel that failed has left, in the host's memory.
        error: the exception that it was read as, or None.
        device: the DeviceFailure.
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

    def read(self, source):
        """Turn a record into ``error``; ``source`` is the error of another group, for launches that were void."""
        error_of = self._error_of()
        if self.error is None and self._words[0] and error_of is not None:
            self.error = error_of(tuple(int(word) for word in self._words[:6]), source)

    @property
    def is_void(self):
        """Whether the record says no more than that a launch was void."""
        return self._words[0] == records.RECORD_VOID.value


class DeviceFailure:
    """What all groups of this process share on one device.

    Attributes:
        flag: the device's word; launches are void while it is set.
        host, word: the same for the host, which looks at it before each launch.
        failures: the Failure of each group.
    """

    def __init__(self, device):
        self._device = device
        self.flag = torch.zeros(1, dtype=torch.int64, device=device)
        self.host = host_words(1, device)
        self.word = self.host.numpy()
        self.failures = weakref.WeakSet()

    def is_set(self):
        """Whether a launch has failed that was not reported yet."""
        return self.word[0] != 0

    def report(self):
        """Read all records, let groups without one go on, and return the first failure, or None.

        Waits for the device: launches that are still queued have to find the flag. Not while a CUDA graph is captured,
        which allows no wait; then the flag stays set.
        """
        can_wait = self._device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
        if can_wait:
            self._synchronize()
        # Errors that are known already were reported: they are not the cause of launches that were void since.
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


def device_failure(device):
    """Return the DeviceFailure of a device; made on first use."""
    if device not in _devices:
        _devices[device] = DeviceFailure(device)
    return _devices[device]
