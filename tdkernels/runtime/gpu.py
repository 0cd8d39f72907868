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


def resident_programs(device, tiles, dtype):
    """How many programs with this tile may be on the GPU at a time; more than fit do no harm to who takes tickets."""
    if device.type == "cpu":
        return _CPU_SMS
    properties = _properties(device.index)
    memory = getattr(properties, "shared_memory_per_multiprocessor", 65536)
    by_memory = memory // (tiles.shared_memory_bytes(dtype) + 1024)  # the system keeps a KiB of each program's
    by_threads = properties.max_threads_per_multi_processor // (tiles.num_warps * properties.warp_size)
    return num_sms(device) * max(1, min(by_memory, by_threads))


def capability(device):
    """(major, minor) on NVIDIA; (0, 0) on anything else."""
    if device.type == "cpu" or torch.version.hip:
        return (0, 0)
    properties = _properties(device.index)
    return properties.major, properties.minor


def converts_to_e4m3(device):
    """Whether it has instructions that make float8_e4m3fn of fp32."""
    return capability(device) >= (8, 9)


def has_tma(device):
    """Whether the bulk tensor copy engine is there (NVIDIA sm_90 on)."""
    return capability(device) >= (9, 0)


@functools.cache
def side_stream(device):
    """A stream for pushes and copies that run beside the current stream."""
    return torch.cuda.Stream(device)
