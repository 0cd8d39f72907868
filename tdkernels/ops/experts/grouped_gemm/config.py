"""The config of group_gemm and its default."""

from dataclasses import dataclass

import torch

from tdkernels.ops.common.tile_config import Tiles, default_tiles
from tdkernels.runtime import gpu


@dataclass(frozen=True)
class GroupGemmConfig:
    """How ``group_gemm`` runs.

    Attributes:
        method: "fused": one kernel; or "torch": torch's grouped product where it has one (bf16 on NVIDIA's sm_90 and
            sm_100, which does not wait for the host), on CPU ranks a product for each group
        tiles: the tile of the product, see ``Tiles``; None takes the default for the device and shape. Of a gradient dw
            (tuner's layout "dw") block_m and block_n are of N and K, block_k of rows
    """

    method: str = "fused"
    tiles: Tiles | None = None

    def illegal(self, device, dtype):
        """Why this config cannot run on a device with a dtype; None when it can."""
        if self.method not in ("fused", "torch"):
            return f'method must be "fused" or "torch", not {self.method!r}'
        if self.method == "torch":
            known = device.type == "cpu" or dtype == torch.bfloat16 and gpu.has_tma(device)
            return None if known else f'method "torch" needs bfloat16 and sm_90 or sm_100, not {dtype} on {device}'
        return self.tiles.illegal(device, dtype) if self.tiles is not None else None


def default_config(rows, n, dtype, device):
    """The config for a product [rows, n] a group of a shape that is not tuned."""
    return GroupGemmConfig(tiles=default_tiles(rows, n, dtype, device))
