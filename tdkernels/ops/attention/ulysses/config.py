"""Config of the two Ulysses projections, and the heuristic for a call without a config."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tdkernels.ops.common.tile_config import Tiles, default_tiles
from tdkernels.runtime import gpu

if TYPE_CHECKING:
    import torch

TRANSPORTS = ("pull", "push")


@dataclass(frozen=True)
class UlyssesConfig:
    """Config of ``ulysses_qkv`` and ``ulysses_out``.

    Attributes:
        method: "fused" runs the overlapping kernel, "torch" an all-to-all and a GEMM in sequence.
        tiles: Tile of the GEMM, see ``Tiles``. None selects the default for the device and shape.
        transport: Only for ulysses_qkv. With "pull" a tile stays in the memory of the rank that computed it until the
            owner of its heads loads it. With "push" it is stored in the owner's memory at once, and the owner copies it
            to the output.
        lag_tiles: Only for ulysses_qkv. Number of tiles that are started before the first tile is received. 0 means one
            and a half per program.
        num_comm_sms: Only for ulysses_out. Number of programs that push concurrently. They compute tiles afterwards,
            like the others.
        chunk_tiles: Only for ulysses_out. Tile rows per chunk, which is sent with one signal.
        chunk_parts: Only for ulysses_out. Number of programs that push one chunk together.
        sources_at_once: Only for ulysses_out. Number of peers whose rows a tile of the first wave waits for before it
            multiplies them. A later tile waits for all peers at once.
    """

    method: str = "fused"
    tiles: Tiles | None = None
    transport: str = "pull"
    lag_tiles: int = 0
    num_comm_sms: int = 16
    chunk_tiles: int = 1
    chunk_parts: int = 4
    sources_at_once: int = 2

    def illegal(self, device: "torch.device", dtype: "torch.dtype") -> str | None:
        """Return why this config cannot run with a device and a dtype, or None if it can."""
        if self.method not in ("fused", "torch"):
            return f'method must be "fused" or "torch", not {self.method!r}'
        if self.method == "torch":
            return None  # the other fields are not used
        if self.transport not in TRANSPORTS:
            return f'transport must be "pull" or "push", not {self.transport!r}'
        if self.lag_tiles < 0:
            return f"lag_tiles must be at least 0, not {self.lag_tiles}"
        for name in ("num_comm_sms", "chunk_tiles", "chunk_parts", "sources_at_once"):
            if getattr(self, name) < 1:
                return f"{name} must be at least 1, not {getattr(self, name)}"
        if device.type == "cuda" and self.num_comm_sms >= gpu.num_sms(device):
            return f"num_comm_sms must leave some of the {gpu.num_sms(device)} free, not be {self.num_comm_sms}"
        return self.tiles.illegal(device, dtype) if self.tiles is not None else None


def completed(
    config: UlyssesConfig | None, rows: int, n: int, dtype: "torch.dtype", device: "torch.device"
) -> UlyssesConfig:
    """Return the config with ``tiles`` filled in. None selects the heuristic config.

    Args:
        config: The config, or None.
        rows: Rows of the GEMM on a rank.
        n: Columns that are divided into tiles: N / W for ulysses_qkv, N for ulysses_out.
        dtype: Dtype of the operands.
        device: Device of the operands.
    """
    if config is None:
        config = UlyssesConfig(num_comm_sms=2, chunk_parts=2) if device.type == "cpu" else UlyssesConfig()
    if config.method == "torch" or config.tiles is not None:
        return config
    return replace(config, tiles=default_tiles(rows, n, dtype, device))
