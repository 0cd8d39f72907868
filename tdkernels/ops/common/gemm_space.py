"""Candidate tiles and configs of GEMM operators, for the tuner."""

from typing import Any

import torch

from tdkernels.ops.common.tile_config import Tiles
from tdkernels.runtime import gpu

# Minimum flops per chunk of a shard. With fewer, the GPU takes less time than the host needs for a wait and a GEMM
# (2 H200).
_PIECE_FLOPS = 1e11


def in_parts(config_class: Any, m: int, n: int, k: int, world_size: int) -> list[Any]:
    """Return configs of method "parts" for a GEMM of a rank. A chunk must take the GPU longer than the host."""
    flops = 2.0 * m * n * k / world_size
    numbers = [pieces for pieces in (1, 2, 4) if pieces == 1 or flops / pieces >= _PIECE_FLOPS]
    return [config_class(method="parts", pieces=pieces) for pieces in numbers]


def tile_space(device: torch.device, dtype: torch.dtype) -> list[Tiles]:
    """Return candidate tiles for a device, which may or may not be legal."""
    if device.type == "cpu":
        return [Tiles(64, 64, 64, num_warps=1, num_stages=1), Tiles(32, 64, 64, num_warps=1, num_stages=1)]
    if dtype == torch.float32:
        return [Tiles(m, n, 32, num_warps=4, num_stages=2) for m, n in ((64, 64), (128, 64), (64, 128), (32, 64))]
    if torch.version.hip or gpu.capability(device) < (9, 0):
        stages = 2 if torch.version.hip else 3
        sizes = ((128, 256), (128, 128), (64, 256), (64, 128), (64, 64), (128, 64))
        return [Tiles(m, n, 64, num_warps=8 if m * n >= 128 * 128 else 4, num_stages=stages) for m, n in sizes]
    return [
        Tiles(128, 256, 64, num_warps=8, num_stages=4),
        Tiles(128, 256, 64, num_warps=8, num_stages=3),
        Tiles(256, 128, 64, num_warps=8, num_stages=3),
        Tiles(128, 128, 64, num_warps=8, num_stages=5),
        Tiles(128, 128, 64, num_warps=4, num_stages=4),
        Tiles(64, 256, 64, num_warps=4, num_stages=4),
        Tiles(64, 128, 64, num_warps=4, num_stages=5),
        Tiles(64, 128, 128, num_warps=4, num_stages=4),
        Tiles(64, 64, 64, num_warps=4, num_stages=6),
        Tiles(64, 64, 128, num_warps=4, num_stages=5),
    ]
