"""What a launcher has to know of the device it launches on."""

import functools

import torch

# What the interpreter is told; a few programs of each role are enough to exercise the protocol.
_CPU_SMS = 4


@functools.cache
def _properties(index):
    return torch.cuda.get_device_properties(index)


def num_sms(device):
    """Programs that run at the same time when each needs a whole multiprocessor."""
    return _CPU_SMS if device.type == "cpu" else _properties(device.index).multi_processor_count


def shared_memory_bytes(device):
    """Shared memory that one program may have; no limit in the interpreter."""
    if device.type == "cpu":
        return 1 << 40
    return getattr(_properties(device.index), "shared_memory_per_block_optin", 65536)


def capability(device):
    """(major, minor) on NVIDIA; (0, 0) on anything else."""
    if device.type == "cpu" or torch.version.hip:
        return (0, 0)
    properties = _properties(device.index)
    return properties.major, properties.minor


def has_tma(device):
    """Whether the bulk tensor copy engine is there (NVIDIA sm_90 on)."""
    return capability(device) >= (9, 0)


@functools.cache
def side_stream(device):
    """A stream for pushes and copies that run beside the current stream."""
    return torch.cuda.Stream(device)
