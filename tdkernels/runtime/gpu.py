"""Properties of the device on which kernels are launched."""

import functools
from typing import Any

import torch

# Number of SMs assumed for the interpreter: a few programs of each role are enough to exercise the protocol.
_CPU_SMS = 4
MOST_REGISTERS = 256  # of a thread

spare_sms = 0  # number of SMs that are left for kernels that run concurrently, in solo mode


@functools.cache
def _properties(index):
    return torch.cuda.get_device_properties(index)


def num_sms(device: torch.device) -> int:
    """Return the number of SMs: the programs that run at the same time if each needs a whole SM."""
    return _CPU_SMS if device.type == "cpu" else _properties(device.index).multi_processor_count


def available_sms(device: torch.device) -> int:
    """Return the number of SMs for a launch: all but ``spare_sms``."""
    return num_sms(device) - spare_sms


def max_warps(device: torch.device) -> int:
    """Return the largest number of warps of a program, which has at most 1024 threads; 32 on the CPU."""
    return 32 if device.type == "cpu" else 1024 // _properties(device.index).warp_size


def shared_memory_bytes(device: torch.device) -> int:
    """Return the maximum shared memory of a program in bytes; unlimited in the interpreter."""
    if device.type == "cpu":
        return 1 << 40
    return getattr(_properties(device.index), "shared_memory_per_block_optin", 65536)


def resident_programs(device: torch.device, tiles: Any, dtype: torch.dtype, registers: int = 1) -> int:
    """Return an estimate of how many programs with these tiles fit on the GPU at a time.

    Launching more than fit is harmless for kernels that fetch their work items from a queue. If each program has a
    fixed share of the work, those that do not fit begin late.

    Args:
        device: the device.
        tiles: a tile config with ``shared_memory_bytes(dtype)`` and ``num_warps``.
        dtype: dtype of the operands.
        registers: registers of a thread. By default they are not considered.
    """
    if device.type == "cpu":
        return _CPU_SMS
    properties = _properties(device.index)
    memory = getattr(properties, "shared_memory_per_multiprocessor", 65536)
    by_memory = memory // (tiles.shared_memory_bytes(dtype) + 1024)  # the system reserves 1 KiB per program
    threads = tiles.num_warps * properties.warp_size
    by_threads = properties.max_threads_per_multi_processor // threads
    by_registers = getattr(properties, "regs_per_multiprocessor", 65536) // (threads * registers)
    return available_sms(device) * max(1, min(by_memory, by_threads, by_registers))


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability (major, minor) on NVIDIA, and (0, 0) on other devices."""
    if device.type == "cpu" or torch.version.hip:
        return (0, 0)
    properties = _properties(device.index)
    return properties.major, properties.minor


def converts_to_e4m3(device: torch.device) -> bool:
    """Return whether Triton converts fp32 to float8_e4m3fn and float8_e5m2 in one instruction (NVIDIA sm_90 on).

    On sm_89 it converts to fp16 first and rounds that towards zero, which gives other codes.
    """
    return capability(device) >= (9, 0)


def multiplies_fp8(device: torch.device) -> bool:
    """Return whether the device multiplies float8 matrices: NVIDIA sm_89 on, AMD gfx94x and gfx95x."""
    if torch.version.hip:
        return _properties(device.index).gcnArchName.startswith(("gfx94", "gfx95"))
    return capability(device) >= (8, 9)


def multiplies_fnuz(device: torch.device) -> bool:
    """Return whether the device multiplies the "fnuz" formats of float8 instead of the OCP formats: AMD gfx94x."""
    return torch.version.hip is not None and _properties(device.index).gcnArchName.startswith("gfx94")


def e4m3_dtype(device: torch.device) -> torch.dtype:
    """Return the e4m3 format of float8 that the device multiplies."""
    fnuz = device.type == "cuda" and multiplies_fnuz(device)
    return torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn


def has_tma(device: torch.device) -> bool:
    """Return whether the device has the Tensor Memory Accelerator (NVIDIA sm_90 on)."""
    return capability(device) >= (9, 0)


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for pushes and copies that run concurrently with the current stream."""
    return torch.cuda.Stream(device)
