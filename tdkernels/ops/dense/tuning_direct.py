"""Tiles that the tuner tries for transport "direct"."""

import torch

from tdkernels.ops.common.gemm_space import tile_space
from tdkernels.ops.common.tile_config import Tiles
from tdkernels.ops.dense.launch_direct import DIRECT_LARGE, DIRECT_MEDIUM, DIRECT_SMALL
from tdkernels.runtime import gpu


def candidate_tiles(device: torch.device, dtype: torch.dtype) -> list[Tiles]:
    """Return candidate tiles that leave shared memory for one tile that is being sent."""
    if device.type == "cpu" or dtype.itemsize > 2 or not gpu.has_tma(device):
        return tile_space(device, dtype)
    return [
        DIRECT_LARGE,
        Tiles(256, 128, 64, num_warps=8, num_stages=3),
        DIRECT_MEDIUM,
        DIRECT_SMALL,
    ]
