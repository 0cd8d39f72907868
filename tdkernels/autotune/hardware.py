"""Peak rates of a device. The cost models use them to rank configs, and ``explain`` to show lower bounds."""

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Hardware:
    """Rates of one device.

    Attributes:
        flops: Flops per second in the requested dtype, as a library's GEMM reaches them at large sizes.
        memory: Memory bandwidth in bytes per second.
        link: Bandwidth to and from the peers in bytes per second, for each direction.
        num_sms: Number of multiprocessors.
        measured: True if the rates were measured on this GPU model, False if they are estimated from its properties.
    """

    flops: float
    memory: float
    link: float
    num_sms: int
    measured: bool


# (flops of 16-bit dtypes, memory, link), measured with cuBLAS at M = N = K = 8192, a device-to-device copy, and copies
# around a ring of 4 GPUs.
_MEASURED = {"NVIDIA H200": (790e12, 4.3e12, 380e9)}

# {GPU without shipped tables: similar GPU whose tables are used instead}. Both have the same number of the same
# multiprocessors, and the same number of links.
KIN = {"NVIDIA H100 80GB HBM3": "NVIDIA H200"}

# 16-bit flops per cycle of one multiprocessor, by compute capability. A library reaches about four fifths of them.
_FLOPS_PER_CYCLE = {8: 2048, 9: 4096, 10: 8192, 12: 2048}
_REACHED = 0.8
_LINK_GUESS = 200e9


@functools.cache
def hardware(device: torch.device, dtype: torch.dtype) -> Hardware:
    """Return the rates of a device for a dtype."""
    if device.type == "cpu":
        # Arbitrary values: 4 concurrent programs, and computation about as slow as communication.
        return Hardware(1e9, 1e10, 1e8, 4, measured=False)
    properties = torch.cuda.get_device_properties(device)
    known = _MEASURED.get(properties.name)
    flops, memory, link = known or _guess(properties)
    if dtype == torch.float32:
        flops /= 16  # without tensor cores
    if dtype.itemsize == 1:
        flops *= 2
    return Hardware(flops, memory, link, properties.multi_processor_count, measured=known is not None)


def _guess(properties):
    """Estimate (flops, memory, link) from torch's device properties.

    If a property is missing or 0, use the value of a mid-range GPU.
    """

    def of(name, otherwise):
        return getattr(properties, name, 0) or otherwise

    per_cycle = properties.multi_processor_count * _FLOPS_PER_CYCLE.get(properties.major, 2048)
    flops = per_cycle * of("clock_rate", 1.5e6) * 1e3
    memory = 2 * of("memory_clock_rate", 1e6) * 1e3 * of("memory_bus_width", 4096) / 8  # double data rate
    kin = _MEASURED.get(KIN.get(properties.name))
    return flops * _REACHED, memory * _REACHED, kin[2] if kin else _LINK_GUESS
