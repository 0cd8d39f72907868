"""The tile of a dense operator's product: part of every config, and its default for a device."""

from dataclasses import dataclass

import torch

from tdkernels.rounding import cdiv, round_up
from tdkernels.runtime import gpu


@dataclass(frozen=True)
class Tiles:
    """A program computes block_m x block_n outputs at a time, by steps of block_k; group_m tile rows go together."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 4

    def illegal(self, device, dtype, more_bytes=0):
        """Why no program can have this tile, and more_bytes of shared memory beside it; None when one can."""
        for name in ("block_m", "block_n", "block_k"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                return f"{name} must be a power of two of at least 16, not {size}"
        if self.num_warps not in (1, 2, 4, 8, 16):
            return f"num_warps must be 1, 2, 4, 8 or 16, not {self.num_warps}"
        if self.group_m < 1 or self.num_stages < 1:
            return f"group_m and num_stages must be at least 1, not {self.group_m} and {self.num_stages}"
        needed = self.shared_memory_bytes(dtype) + more_bytes
        available = gpu.shared_memory_bytes(device)
        if needed > available:
            what = "the stages" if not more_bytes else "the stages and a tile on its way out"
            return f"{what} need {needed} bytes of shared memory, {device} has {available}"
        return None

    def shared_memory_bytes(self, dtype):
        """What the stages of the main loop take; the epilogue reuses it."""
        return self.num_stages * (self.block_m + self.block_n) * self.block_k * dtype.itemsize

    def constants(self):
        """The tile as a kernel's constexpr arguments."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
        }

    def count(self, rows, n):
        """How many of them a product [rows, n] has."""
        return cdiv(rows, self.block_m) * cdiv(n, self.block_n)

    @property
    def reach(self):
        """What share of the tensor cores' rate a tile reaches: the larger it is, the less it loads for each flop."""
        # 128 x 256 keeps those of Hopper busy.
        return min(1.0, self.block_m * self.block_n / (self.block_m + self.block_n) / 85.0) ** 0.5

    def waves_take(self, rows, n, num_sms):
        """How long a product [rows, n] takes by large tiles, to be compared: whole waves of them."""
        return cdiv(self.count(rows, n), num_sms) * self.block_m * self.block_n / self.reach

    def busy_share(self, shards, rows, n, num_sms):
        """What share of the multiprocessors' waves has a tile, of ``shards`` products [rows, n]."""
        count = shards * self.count(rows, n)
        return count / max(round_up(count, num_sms), 1)

    def options(self):
        """The tile as launch options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


# What keeps the tensor cores of Hopper busy.
LARGE = Tiles(128, 256, 64, num_warps=8, num_stages=4)


def default_tiles(rows, n, dtype, device):
    """A sensible tile for a product of which a rank sees ``rows`` rows of a shard and ``n`` columns."""
    if device.type == "cpu":
        return Tiles(64, 64, 64, num_warps=1, num_stages=1)
    if dtype == torch.float32:
        # Exact fp32 has no tensor cores: small tiles keep the accumulators in registers.
        return Tiles(64, 64, 32, num_warps=4, num_stages=2)
    if torch.version.hip:
        return Tiles(128, 128, 64, num_warps=8, num_stages=2)
    if gpu.capability(device) < (9, 0):
        return Tiles(128, 128, 64, num_warps=8, num_stages=3)
    if rows <= 64:
        return Tiles(64, 128, 64, num_warps=4, num_stages=5)
    if n <= 128:
        return Tiles(128, 128, 64, num_warps=8, num_stages=5)
    return LARGE


def tiles_of_product(rows, n, shards, waves, dtype, device):
    """``default_tiles`` of ``shards`` times so many rows; smaller ones if there are no more than so many waves of them.

    In half a wave every other multiprocessor has none, and what the last of two sends has nothing to hide behind.
    """
    tiles = default_tiles(rows, n, dtype, device)
    if tiles != LARGE or shards * LARGE.count(rows, n) > waves * gpu.num_sms(device):
        return tiles
    return Tiles(128, 128, 64, num_warps=8, num_stages=5)
