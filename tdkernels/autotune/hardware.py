"""What a device can do at best: for the order in which configs are tried, and for the floors that explain() shows."""

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Hardware:
    """Rates of one device.

    Attributes:
        flops: per second, in the dtype asked for, as a large product of a library reaches them
        memory: bytes per second
        link: bytes per second to and from the peers, each way
        num_sms: multiprocessors
        measured: whether the rates were measured on such a device, or guessed from its properties
    """

    flops: float
    memory: float
    link: float
    num_sms: int
    measured: bool


# flops of 16-bit types, memory, link. cuBLAS at 8192 cubed, a device-to-device copy and copies round a ring of 4 GPUs.
_MEASURED = {"NVIDIA H200": (790e12, 4.3e12, 380e9)}

# GPUs of which nothing is shipped, by what stands for them: as many multiprocessors of the same kind, as many links.
KIN = {"NVIDIA H100 80GB HBM3": "NVIDIA H200"}

# 16-bit flops of a multiprocessor a cycle, of which a library reaches about four fifths; by compute capability.
_FLOPS_PER_CYCLE = {8: 2048, 9: 4096, 10: 8192, 12: 2048}
_REACHED = 0.8
_LINK_GUESS = 200e9


@functools.cache
def hardware(device, dtype):
    """The rates of a device for a dtype."""
    if device.type == "cpu":
        # Made up: so many programs at a time, and computation and wire about as slow as each other.
        return Hardware(1e9, 1e10, 1e8, 4, measured=False)
    properties = torch.cuda.get_device_properties(device)
    known = _MEASURED.get(properties.name)
    flops, memory, link = known or _guess(properties)
    if dtype == torch.float32:
        flops /= 16  # without tensor cores
    return Hardware(flops, memory, link, properties.multi_processor_count, measured=known is not None)


def _guess(properties):
    """From what torch says of a device; what it does not say, or says is 0, is taken for a middling GPU's."""

    def of(name, otherwise):
        return getattr(properties, name, 0) or otherwise

    per_cycle = properties.multi_processor_count * _FLOPS_PER_CYCLE.get(properties.major, 2048)
    flops = per_cycle * of("clock_rate", 1.5e6) * 1e3
    memory = 2 * of("memory_clock_rate", 1e6) * 1e3 * of("memory_bus_width", 4096) / 8  # twice a clock
    kin = _MEASURED.get(KIN.get(properties.name))
    return flops * _REACHED, memory * _REACHED, kin[2] if kin else _LINK_GUESS
