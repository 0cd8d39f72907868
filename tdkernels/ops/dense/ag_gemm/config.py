"""The config of ag_gemm and its default."""

from dataclasses import dataclass

from tdkernels.ops.common import small_m_gemm
from tdkernels.ops.common.config import METHODS
from tdkernels.ops.common.tile_config import Tiles, tiles_of_product
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu

# From here on one copy a peer is faster than programs that push: it takes no multiprocessor (4 H200).
_LARGE_SHARD_BYTES = 64 << 20
# Up to this many rows of all ranks, reading the weight takes most of the time, so it is read once.
_ONE_SHOT_ROWS = {"cpu": 16, "cuda": 256}


@dataclass(frozen=True)
class AgGemmConfig:
    """How ``ag_gemm`` runs.

    Attributes:
        method: "fused"; "parts": torch's GEMM of a part of the rows at a time, as the copy engine brings them; or
            "torch": a plain all-gather, then a plain GEMM
        tiles: the tile of the product, see ``Tiles``; None takes the default for the device and shape
        transport: "push" (by programs); "copy_engine"; "one_shot": by programs, and nothing is multiplied before all of
            it is there, for few rows; in a group on several nodes it is always push
        num_comm_sms: programs that push at the same time, before they multiply like the others; not for copy_engine
        chunk_tiles: tile rows that travel together under one signal; not for one_shot
        split_k: programs that share the K of one tile; one_shot only
        pieces: in which a shard travels and is multiplied; parts only, which takes none of the others
    """

    method: str = "fused"
    tiles: Tiles | None = None
    transport: str = "push"
    num_comm_sms: int = 24
    chunk_tiles: int = 1
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
        if self.transport not in ("push", "copy_engine", "one_shot"):
            return f'transport must be "push", "copy_engine" or "one_shot", not {self.transport!r}'
        if self.num_comm_sms < 1:
            return f"num_comm_sms must be at least 1, not {self.num_comm_sms}"
        if device.type == "cuda" and self.num_comm_sms >= gpu.num_sms(device):
            return f"num_comm_sms must leave some of the {gpu.num_sms(device)} free, not be {self.num_comm_sms}"
        for name in ("chunk_tiles", "split_k"):
            if getattr(self, name) < 1:
                return f"{name} must be at least 1, not {getattr(self, name)}"
        return self.tiles.illegal(device, dtype) if self.tiles is not None else None


def default_config(rows, n, k, dtype, device, world_size, num_nodes=1):
    """The config for operands [rows, K] and [n, K] of a shape that is not tuned."""
    if rows * world_size <= _ONE_SHOT_ROWS[device.type] and num_nodes == 1:
        tiles, split_k = small_m_gemm.default_tiles(rows * world_size, n, k, dtype, device)
        num_comm = 2 if device.type == "cpu" else 24
        return AgGemmConfig(tiles=tiles, transport="one_shot", num_comm_sms=num_comm, split_k=split_k)
    tiles = tiles_of_product(rows, n, world_size, 0.5, dtype, device)
    if device.type == "cpu":
        return AgGemmConfig(tiles=tiles, num_comm_sms=2)
    if rows * k * dtype.itemsize >= _LARGE_SHARD_BYTES and num_nodes == 1:
        return AgGemmConfig(tiles=tiles, transport="copy_engine", chunk_tiles=cdiv(rows, tiles.block_m))
    return AgGemmConfig(tiles=tiles, num_comm_sms=24)


def default_config_for(x, weight, world_size):
    """``default_config`` of operands [M / W, K] and [N / W, K]."""
    return default_config(x.shape[0], *weight.shape, x.dtype, x.device, world_size)
