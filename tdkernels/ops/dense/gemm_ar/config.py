"""The config of gemm_ar and its default."""

from dataclasses import dataclass

from tdkernels.ops.common import small_m_gemm
from tdkernels.ops.common.tile_config import Tiles, tiles_of_product

# Up to so many rows each rank sums everything itself, which takes one way over the wire and not two, unless it sends so
# many bytes more than in two shots.
_ONE_SHOT_ROWS = {"cpu": 16, "cuda": 512}
_ONE_SHOT_MORE_BYTES = 4 << 20


@dataclass(frozen=True)
class GemmArConfig:
    """How ``gemm_ar`` runs.

    Attributes:
        method: "fused", or "torch": a plain GEMM, then a plain all-reduce
        exchange: "two_shot": each tile is summed by one rank, which sends the sum to all; "one_shot": every rank gets
            all partials and sums everything itself, for few rows; a group on several nodes has but one way
        tiles: the tile of the product, see ``Tiles``; None takes the default for the device and shape
        item_tiles: tiles that are forwarded together under one signal; not for one_shot on one node
        split_k: programs that share the K of one tile; one_shot on one node only
    """

    method: str = "fused"
    exchange: str = "two_shot"
    tiles: Tiles | None = None
    item_tiles: int = 4
    split_k: int = 1

    def illegal(self, device, dtype):
        """Why this config cannot run on a device with a dtype; None when it can."""
        if self.method not in ("fused", "torch"):
            return f'method must be "fused" or "torch", not {self.method!r}'
        if self.method == "torch":
            return None  # takes none of the rest
        if self.exchange not in ("two_shot", "one_shot"):
            return f'exchange must be "two_shot" or "one_shot", not {self.exchange!r}'
        for name in ("item_tiles", "split_k"):
            if getattr(self, name) < 1:
                return f"{name} must be at least 1, not {getattr(self, name)}"
        return self.tiles.illegal(device, dtype) if self.tiles is not None else None


def default_config(rows, n, k, dtype, device, world_size):
    """The config for a product [rows, k] x [n, k] of a rank, of a shape that is not tuned."""
    more = (world_size - 1) * (world_size - 2) * rows * n * dtype.itemsize // world_size
    if rows <= _ONE_SHOT_ROWS[device.type] and more <= _ONE_SHOT_MORE_BYTES:
        tiles, split_k = small_m_gemm.default_tiles(rows, n, k, dtype, device)
        return GemmArConfig(exchange="one_shot", tiles=tiles, split_k=split_k)
    tiles = tiles_of_product(rows, n, 1, 2, dtype, device)
    return GemmArConfig(tiles=tiles, item_tiles=2 if device.type == "cpu" else 4)


def default_config_for(x, weight, world_size):
    """``default_config`` of operands [M, K / W] and [N, K / W]."""
    return default_config(x.shape[0], *weight.shape, x.dtype, x.device, world_size)
