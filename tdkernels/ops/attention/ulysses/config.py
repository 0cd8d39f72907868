"""How the two Ulysses projections run, and which config a call without one gets."""

from dataclasses import dataclass, replace

from tdkernels.ops.common.tile_config import Tiles, default_tiles
from tdkernels.runtime import gpu

TRANSPORTS = ("pull", "push")


@dataclass(frozen=True)
class UlyssesConfig:
    """How ``ulysses_qkv`` and ``ulysses_out`` run.

    Attributes:
        method: "fused", or "torch": a plain all-to-all and a plain GEMM
        tiles: the tile of the product, see ``Tiles``; None takes the default for the device and shape

    Of ulysses_qkv:
    Attributes:
        transport: "pull": a tile stays where it was computed until the rank that has its heads takes it from there;
            "push": it is stored at that rank at once, and copied there
        lag_tiles: tiles that are begun before the first one is taken; 0: one and a half for each program

    Of ulysses_out:
    Attributes:
        num_comm_sms: programs that push at the same time, before they multiply like the others
        chunk_tiles: tile rows that travel together under one signal
        chunk_parts: programs that push one chunk together
        sources_at_once: of how many peers a tile of the first wave waits for the rows, before it multiplies them; a
            later tile waits for all at once
    """

    method: str = "fused"
    tiles: Tiles | None = None
    transport: str = "pull"
    lag_tiles: int = 0
    num_comm_sms: int = 16
    chunk_tiles: int = 1
    chunk_parts: int = 4
    sources_at_once: int = 2

    def illegal(self, device, dtype):
        """Why this config cannot run on a device with a dtype; None when it can."""
        if self.method not in ("fused", "torch"):
            return f'method must be "fused" or "torch", not {self.method!r}'
        if self.method == "torch":
            return None  # takes none of the rest
        if self.transport not in TRANSPORTS:
            return f'transport must be "pull" or "push", not {self.transport!r}'
        if self.lag_tiles < 0:
            return f"lag_tiles must not be negative, as {self.lag_tiles} is"
        for name in ("num_comm_sms", "chunk_tiles", "chunk_parts", "sources_at_once"):
            if getattr(self, name) < 1:
                return f"{name} must be at least 1, not {getattr(self, name)}"
        if device.type == "cuda" and self.num_comm_sms >= gpu.num_sms(device):
            return f"num_comm_sms must leave some of the {gpu.num_sms(device)} free, not be {self.num_comm_sms}"
        return self.tiles.illegal(device, dtype) if self.tiles is not None else None


def completed(config, rows, n, dtype, device):
    """The config of a product of a rank's ``rows``, tiles of which lie within n columns."""
    if config is None:
        config = UlyssesConfig(num_comm_sms=2, chunk_parts=2) if device.type == "cpu" else UlyssesConfig()
    if config.method == "torch" or config.tiles is not None:
        return config
    return replace(config, tiles=default_tiles(rows, n, dtype, device))
