"""The config of gemm_rs and its default."""

from dataclasses import dataclass

from tdkernels.ops.common import small_m_gemm
from tdkernels.ops.common.config import METHODS
from tdkernels.ops.common.tile_config import Tiles, tiles_of_product
from tdkernels.ops.dense.gemm_rs import launch_direct
from tdkernels.runtime import gpu

# Up to this many rows of all ranks, hiding the exchange costs more than it saves.
_ONE_SHOT_ROWS = {"cpu": 16, "cuda": 512}
_ONE_SHOT_ROWS_OF_TWO = 1024  # of two ranks on Hopper; of more it has not been measured


@dataclass(frozen=True)
class GemmRsConfig:
    """How ``gemm_rs`` runs.

    Attributes:
        method: "fused"; "parts": torch's GEMM of a part of the rows at a time, which the copy engine brings to their
            owner; or "torch": a plain GEMM, then a plain reduce-scatter; several nodes know no parts
        tiles: the tile of the product, see ``Tiles``; None takes the default for the device and shape
        transport: "forward": partial tiles are staged and sent on by other programs; "direct": they are sent from where
            they were computed, while the next one is; "one_shot": by programs of one tile each, with all rows in it,
            for few rows; a group on several nodes always forwards
        item_tiles: tiles that are forwarded together under one signal; forward only
        split_k: programs that share the K of one tile; one_shot only
        pieces: in which the rows of an owner are multiplied and travel; parts only, which takes none of the others
    """

    method: str = "fused"
    tiles: Tiles | None = None
    transport: str = "forward"
    item_tiles: int = 4
    split_k: int = 1
    pieces: int = 1

    def illegal(self, device, dtype):
        """Why this config cannot run on a device with a dtype; None when it can."""
        if self.method not in METHODS:
            return f'method must be "fused", "parts" or "torch", not {self.method!r}'
        if self.method == "torch":
            return None  # takes none of the rest
        if self.pieces < 1:
            return f"pieces must be at least 1, not {self.pieces}"
        if self.method == "parts":
            return None  # takes no others
        if self.transport not in ("forward", "direct", "one_shot"):
            return f'transport must be "forward", "direct" or "one_shot", not {self.transport!r}'
        for name in ("item_tiles", "split_k"):
            if getattr(self, name) < 1:
                return f"{name} must be at least 1, not {getattr(self, name)}"
        if self.tiles is None:
            return None
        return self.tiles.illegal(device, dtype, launch_direct.shared_memory_bytes(self, device, dtype))


def default_config(rows, n, k, dtype, device, world_size):
    """The config for rows of an output [rows, n] of a shape that is not tuned."""
    of_two = world_size == 2 and gpu.capability(device) >= (9, 0)
    if rows * world_size <= (_ONE_SHOT_ROWS_OF_TWO if of_two else _ONE_SHOT_ROWS[device.type]):
        tiles, split_k = small_m_gemm.default_tiles(rows * world_size, n, k, dtype, device)
        return GemmRsConfig(transport="one_shot", tiles=tiles, split_k=split_k)
    tiles = tiles_of_product(rows, n, world_size, 2, dtype, device)
    return GemmRsConfig(tiles=tiles, item_tiles=2 if device.type == "cpu" else 4)


def default_config_for(x, weight, world_size):
    """``default_config`` of operands [M, K / W] and [N, K / W]."""
    return default_config(x.shape[0] // world_size, *weight.shape, x.dtype, x.device, world_size)
