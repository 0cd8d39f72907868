"""Tile of a GEMM: part of every config, and the heuristics that select it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from tdkernels.autotune.invariance import invariant_ranks
from tdkernels.rounding import cdiv, round_up
from tdkernels.runtime import gpu

SPECIALIZED_TILE = 128, 256  # the only tile of the warp-specialized kernels: M, N
PUSHED_BYTES = 64 << 10  # that a program of these kernels pushes at a time, to all peers together
PUSHED_ROWS = 4  # that it loads at a time: a piece has a multiple of them
PUSHED_ROW_BYTES = 2 << 10  # bytes of a row that a program loads at a time
STEP_BYTES = 128  # of a row of an operand in a step of K, with these kernels: 64 elements of 16 bits, or 128 of fp8
_LEAST_BLOCK_K_OF_FP8 = 32  # an instruction of the tensor cores multiplies 32 elements


@dataclass(frozen=True)
class Tiles:
    """Tile of a GEMM, and the launch options that depend on it.

    Attributes:
        block_m: Rows of the output per tile; a power of two of at least 16, as block_n and block_k.
        block_n: Columns of the output per tile.
        block_k: Step of the main loop.
        group_m: Number of tile rows that are computed together, so that their operands stay in the L2 cache.
        num_warps: Warps per program: 1, 2, 4, 8 or 16.
        num_stages: Stages of the software pipeline of the main loop.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 4

    def illegal(self, device: torch.device, dtype: torch.dtype, more_bytes: int = 0) -> str | None:
        """Return why this tile cannot run with a device and a dtype, or None if it can.

        ``more_bytes`` is the shared memory that the kernel needs in addition to the stages.
        """
        for name in ("block_m", "block_n", "block_k"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                return f"{name} must be a power of two of at least 16, not {size}"
        if dtype.itemsize == 1 and self.block_k < _LEAST_BLOCK_K_OF_FP8:
            return f"block_k must be at least {_LEAST_BLOCK_K_OF_FP8} for {dtype}, not {self.block_k}"
        if self.num_warps not in (1, 2, 4, 8, 16):
            return f"num_warps must be 1, 2, 4, 8 or 16, not {self.num_warps}"
        if self.group_m < 1 or self.num_stages < 1:
            return f"group_m and num_stages must be at least 1, not {self.group_m} and {self.num_stages}"
        needed = self.shared_memory_bytes(dtype) + more_bytes
        available = gpu.shared_memory_bytes(device)
        if needed > available:
            what = "the stages" if not more_bytes else "the stages and a tile that is being sent"
            return f"{what} need {needed} bytes of shared memory, {device} has {available}"
        return None

    def shared_memory_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of shared memory for the stages of the main loop. The epilogue reuses them."""
        return self.num_stages * (self.block_m + self.block_n) * self.block_k * dtype.itemsize

    def constants(self) -> dict[str, int]:
        """Return the tile as constexpr arguments of a kernel."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
        }

    def count(self, rows: int, n: int) -> int:
        """Return the number of tiles of an output [rows, n]."""
        return cdiv(rows, self.block_m) * cdiv(n, self.block_n)

    @property
    def reach(self) -> float:
        """Estimate the share of the peak tensor core rate: a larger tile loads fewer bytes per flop."""
        # A tile of 128 x 256 saturates the tensor cores of Hopper.
        return min(1.0, self.block_m * self.block_n / (self.block_m + self.block_n) / 85.0) ** 0.5

    def busy_share(self, shards: int, rows: int, n: int, num_sms: int) -> float:
        """Return the share of SMs that have a tile, over all waves of ``shards`` GEMMs with output [rows, n]."""
        count = shards * self.count(rows, n)
        return count / max(round_up(count, num_sms), 1)

    def options(self) -> dict[str, Any]:
        """Return the launch options of the tile."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def num_parts(chunk_rows: int, slice_bytes: int, world_size: int, slices: int = 1, num_workers: int = 1) -> int:
    """Return the number of parts in which a slice of a chunk is pushed, as ``push.parts_of_slice`` does.

    Rows are divided only for several ``num_workers``.
    """
    rows = PUSHED_BYTES // (slice_bytes * max(world_size - 1, 1)) // PUSHED_ROWS * PUSHED_ROWS
    parts = cdiv(chunk_rows, max(rows, PUSHED_ROWS))
    across = max(num_workers // max(slices * parts, 1), 1)
    return parts * cdiv(slice_bytes, round_up(cdiv(slice_bytes, across), PUSHED_ROW_BYTES))


def scaled_tiles(tiles: Tiles, layout: str, device: torch.device) -> Tiles:
    """Return the tile for fp8 operands that corresponds to a tile for 16-bit operands.

    A step of the main loop has at least 128 elements of K. If products are added to a second accumulator, as for
    block-wise scales and without fast accumulation, a thread has registers for half as many elements.

    Args:
        tiles: The tile for 16-bit operands.
        layout: See ``scaling.layout_of``.
        device: The device.
    """
    if device.type == "cpu":
        return tiles
    tiles = replace(tiles, block_k=max(tiles.block_k, 128))
    if layout == "scaled fast" or tiles.block_m * tiles.block_n <= 64 * 32 * tiles.num_warps:
        return tiles
    if tiles.block_m * tiles.block_n <= 64 * 32 * 8:
        return replace(tiles, num_warps=8)
    return replace(tiles, block_m=min(tiles.block_m, 128), block_n=min(tiles.block_n, 128), num_warps=8, num_stages=4)


def specialized_tiles(tiles: Tiles, dtype: torch.dtype) -> Tiles:
    """Return the tile of the warp-specialized kernels for a dtype, given the one for 16-bit operands."""
    return replace(tiles, block_k=STEP_BYTES // dtype.itemsize)


def scaled_candidates(tiles: Sequence[Tiles], layout: str, device: torch.device) -> list[Tiles]:
    """Return the tiles for fp8 operands that correspond to candidate tiles for 16-bit operands.

    Without fast accumulation there is also a tile with steps of 256 elements of K, whose products are added to the
    second accumulator half as often.
    """
    found = [scaled_tiles(one, layout, device) for one in tiles]
    return list(dict.fromkeys([*found, *(with_wide_steps(one, layout, device) for one in found)]))


def with_wide_steps(tiles: Tiles, layout: str, device: torch.device) -> Tiles:
    """Return the tile with steps of 256 elements of K instead of 128 if these are faster, otherwise the tile itself.

    They are for large tiles without fast accumulation on Hopper. ``gemm_rs`` with transport "direct" takes 0.79 to 0.82
    of the time with them on 4 H200 (three shapes), ``ag_gemm`` 0.86 in solo mode (8192 x 57344 x 8192, W = 8).
    """
    is_large = (tiles.block_m, tiles.block_n, tiles.block_k, tiles.num_warps) == (128, 128, 128, 8)
    if layout != "scaled" or not is_large or device.type != "cuda" or gpu.capability(device)[0] != 9:
        return tiles
    return replace(tiles, block_k=256, num_stages=3)


# Saturates the tensor cores of Hopper.
LARGE = Tiles(128, 256, 64, num_warps=8, num_stages=4)
MEDIUM = Tiles(128, 128, 64, num_warps=8, num_stages=5)


class Wave(NamedTuple):
    """A tile, and the time of its waves.

    Attributes:
        tiles: The tile.
        time: Relative time of a wave.
        per_sm: Tiles on an SM in a wave.
        one_wave_only: Whether the tile is not used for several waves.
    """

    tiles: Tiles
    time: float
    per_sm: int = 1
    one_wave_only: bool = False


def fastest_in_waves(waves: Iterable[Wave], rows: int, n: int, num_sms: int) -> Tiles:
    """Return the tile with the shortest time in whole waves, for an output [rows, n]."""

    def time(one):
        count = cdiv(one.tiles.count(rows, n), num_sms * one.per_sm)
        return math.inf if one.one_wave_only and count > 1 else count * one.time

    return min(waves, key=time).tiles


def default_tiles(rows: int, n: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Return the heuristic tile for a GEMM with ``rows`` rows per shard and ``n`` columns on a rank."""
    if device.type == "cpu":
        return Tiles(64, 64, 64, num_warps=1, num_stages=1)
    if dtype == torch.float32:
        # Exact fp32 does not use tensor cores: small tiles keep the accumulators in registers.
        return Tiles(64, 64, 32, num_warps=4, num_stages=2)
    if torch.version.hip:
        return Tiles(128, 128, 64, num_warps=8, num_stages=2)
    if gpu.capability(device) < (9, 0):
        return Tiles(128, 128, 64, num_warps=8, num_stages=3)
    if rows <= 64:
        return Tiles(64, 128, 64, num_warps=4, num_stages=5)
    if n <= 128:
        return MEDIUM
    return LARGE


# Tiles of the batch-invariant mode on Hopper for operands in 16 bits. An element of the output has the same bits in all
# of them: wgmma adds steps of 16 elements of K to it, one after the other, whatever the size of the tile.
# ``test_tiles_of_the_mode_give_the_same_bits`` compares them. LARGE has too few registers for a reduction tree.
_ALIKE_SMALL = Tiles(64, 64, 64, num_warps=4, num_stages=6)
_ALIKE_MEDIUM = Tiles(128, 128, 64, num_warps=8, num_stages=5)


def invariant_tiles(
    dtype: torch.dtype, device: torch.device, layout: str | None = None, rows: int = 0, n: int = 0, shards: int = 1
) -> Tiles:
    """Return the tile of the batch-invariant mode: for all shapes the same, or one with the same bits.

    Args:
        dtype: Dtype of the operands.
        device: The device.
        layout: The layout of fp8 operands, see ``scaling.layout_of``, or None.
        rows: Rows of the output of a shard. 0 if they are not known: the tile is the same for all shapes.
        n: Columns of the output.
        shards: Number of shards.
    """
    if rows and _has_alike_tiles(dtype, device, layout):
        if rows <= _ALIKE_SMALL.block_m:
            return _ALIKE_SMALL
        fills_gpu = shards * LARGE.count(rows, n) >= gpu.num_sms(device)
        return LARGE if fills_gpu and not invariant_ranks() else _ALIKE_MEDIUM
    tiles = for_tree(default_tiles(128, 128, dtype, device), dtype, device)
    return tiles if layout is None else scaled_tiles(tiles, layout, device)


def _has_alike_tiles(dtype, device, layout):
    """Return whether the tiles above give the same bits. Other GPUs and fp8 were not compared."""
    return layout is None and dtype.itemsize == 2 and device.type == "cuda" and gpu.capability(device) == (9, 0)


def for_tree(tiles: Tiles, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Return the tile, with ``max_ranks`` of the mode for fp32 with 8 warps instead of 4.

    fp32 nodes of the reduction tree take as many registers as an accumulator. With 4 warps and 8 leaves, ptxas for
    sm_90 spills 904 bytes per thread in ``gemm_rs``, with 8 warps 44.
    """
    is_narrow = invariant_ranks() > 0 and dtype == torch.float32 and device.type != "cpu"
    return replace(tiles, num_warps=8) if is_narrow else tiles


def tiles_of_product(
    rows: int, n: int, shards: int, waves: float, dtype: torch.dtype, device: torch.device
) -> Tiles:
    """Return ``default_tiles`` for ``shards`` GEMMs of ``rows`` rows, or a smaller tile for at most ``waves`` waves.

    With half a wave, every other SM has no tile. With two waves, the communication of the second wave overlaps with
    nothing.
    """
    tiles = default_tiles(rows, n, dtype, device)
    if tiles != LARGE or shards * LARGE.count(rows, n) > waves * gpu.num_sms(device):
        return tiles
    return MEDIUM
