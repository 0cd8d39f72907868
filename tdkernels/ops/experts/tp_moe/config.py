"""The config of tp_moe and its default."""

from dataclasses import dataclass

import torch

from tdkernels.ops.common.tile_config import Tiles, default_tiles
from tdkernels.ops.experts.tp_moe.kernel_ag_gemm import BLOCK_TOKENS
from tdkernels.ops.experts.tp_moe.kernel_route import MAX_STAGES
from tdkernels.runtime import gpu


@dataclass(frozen=True)
class MoeTpConfig:
    """How ``moe_ag_gemm``, ``moe_gemm_rs`` and ``tp_moe`` run.

    Attributes:
        method: "fused", or "torch": plain collectives and torch's grouped product
        tiles: the tile of the products, see ``Tiles``; None takes the default for the device and shape
        num_comm_sms: programs that push tokens at the same time, before they multiply like the others
        chunk_rows: tokens that travel together under one signal, a multiple of 16
        stages: how often the experts' weights are gone through, 1 to 8: once for our own tokens, the other times for
            those of the others, in parts; 0: as often as pays, by the number of rows an expert has
    """

    method: str = "fused"
    tiles: Tiles | None = None
    num_comm_sms: int = 16
    chunk_rows: int = 256
    stages: int = 0

    def illegal(self, device, dtype):
        """Why this config cannot run on a device with a dtype; None when it can."""
        if self.method not in ("fused", "torch"):
            return f'method must be "fused" or "torch", not {self.method!r}'
        if self.method == "torch":
            known = device.type == "cpu" or dtype == torch.bfloat16 and gpu.has_tma(device)
            return None if known else f'method "torch" needs bfloat16 and sm_90 or sm_100, not {dtype} on {device}'
        if self.num_comm_sms < 1:
            return f"num_comm_sms must be at least 1, not {self.num_comm_sms}"
        if device.type == "cuda" and self.num_comm_sms >= gpu.num_sms(device):
            return f"num_comm_sms must leave some of the {gpu.num_sms(device)} free, not be {self.num_comm_sms}"
        if self.chunk_rows < 16 or self.chunk_rows % BLOCK_TOKENS:
            return f"chunk_rows must be a multiple of {BLOCK_TOKENS}, not {self.chunk_rows}"
        if not 0 <= self.stages <= MAX_STAGES.value:
            return f"stages must be 0 to {MAX_STAGES.value}, not {self.stages}"
        return self.tiles.illegal(device, dtype) if self.tiles is not None else None


def default_config(tokens, choices, experts, n, dtype, device):
    """The config for ``tokens`` of ``choices`` of ``experts`` experts, weights of n rows; not tuned."""
    tiles = default_tiles(tokens * choices // experts, n, dtype, device)
    if device.type == "cpu":
        return MoeTpConfig(tiles=tiles, num_comm_sms=2, chunk_rows=16)
    return MoeTpConfig(tiles=tiles)
