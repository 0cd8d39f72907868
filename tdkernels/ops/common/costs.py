"""Cost models of GEMMs and transfers, for the tuner."""

import math
from typing import TYPE_CHECKING

import torch

from tdkernels.ops.common.tile_config import Tiles

if TYPE_CHECKING:
    from tdkernels.autotune.hardware import Hardware

# Share of a link's peak rate that programs and copy engines reach, and the number of programs it takes (H200).
_PUSH_SHARE, _COPY_SHARE, _PROGRAMS_A_LINK = 0.88, 0.8, 8
_COLLECTIVE_SHARE = 0.85
_LAUNCH_S = 20e-6
SIGNAL_S = 3e-6  # from a store to a peer until the peer has seen the signal


def product_s(
    m: int, n: int, k: int, dtype: torch.dtype, tiles: Tiles, num_sms: int, hardware: "Hardware"
) -> tuple[float, float]:
    """Estimate (seconds of a GEMM with these tiles on ``num_sms`` SMs, seconds of one tile)."""
    per_sm = hardware.flops / hardware.num_sms * tiles.reach
    tile_s = 2.0 * tiles.block_m * tiles.block_n * k / per_sm
    waves = tiles.count(m, n) / num_sms
    return max(math.ceil(waves) * tile_s, (n * k + m * k + m * n) * dtype.itemsize / hardware.memory), tile_s


def vendor_s(m: int, n: int, k: int, dtype: torch.dtype, hardware: "Hardware") -> float:
    """Estimate the seconds of a GEMM of the vendor library."""
    return max(2.0 * m * n * k / hardware.flops, (n * k + m * k + m * n) * dtype.itemsize / hardware.memory)


def sequence_s(m: int, n: int, k: int, wire_bytes: float, dtype: torch.dtype, hardware: "Hardware") -> float:
    """Estimate the seconds of the torch baseline: a collective and a GEMM in sequence."""
    return vendor_s(m, n, k, dtype, hardware) + collective_s(wire_bytes, hardware)


def collective_s(wire_bytes: float, hardware: "Hardware") -> float:
    """Estimate the seconds of a collective of torch.distributed."""
    return wire_bytes / (_COLLECTIVE_SHARE * hardware.link) + _LAUNCH_S


def parts_s(count: int, product: float, wire: float, received: float, hardware: "Hardware") -> float:
    """Estimate the seconds of a pipelined GEMM: ``count`` GEMMs, overlapped with transfers one step ahead or behind.

    Args:
        count: Number of GEMMs.
        product: Seconds of all GEMMs.
        wire: Seconds of all transfers.
        received: Bytes that were received and are read again.
        hardware: Rates of the device.
    """
    return max(product, wire) + min(product, wire) / count + count * _LAUNCH_S + received / hardware.memory


def push_rate(programs: int, hardware: "Hardware") -> float:
    """Estimate the bytes per second that this number of pushing programs reaches."""
    return _PUSH_SHARE * hardware.link * min(1.0, programs / _PROGRAMS_A_LINK)


def copy_rate(hardware: "Hardware") -> float:
    """Estimate the bytes per second of the copy engines, over all peers."""
    return _COPY_SHARE * hardware.link
