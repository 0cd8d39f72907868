"""Config of gemm_rs, and the heuristic that selects a config without tuning."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tdkernels.autotune.invariance import invariant_ranks
from tdkernels.ops.common import small_m_gemm
from tdkernels.ops.common.config import METHODS
from tdkernels.ops.common.specialized import launch as launch_specialized
from tdkernels.ops.common.tile_config import LARGE, Tiles, tiles_of_product
from tdkernels.ops.dense import launch_direct
from tdkernels.ops.dense.launch_direct import DIRECT_LARGE, DIRECT_MEDIUM, DIRECT_SMALL
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu

if TYPE_CHECKING:
    import torch

# Up to this many rows of all ranks, overlapping the exchange costs more than it saves.
_ONE_SHOT_ROWS = {"cpu": 16, "cuda": 512}
# The same on Hopper for operands that TMA sends. With more rows, but fewer than _ONE_SHOT_MOST_ROWS, "direct" is only
# faster if its tiles, which have rows of one rank, are full. H200 in solo mode, 64 to 1024 rows on 4 and 8 ranks: the
# kernel by these limits takes 1.02 of the time of the fastest one on average (82 cases). The limit of two ranks is from
# real runs.
_ONE_SHOT_ROWS_OF_HOPPER, _ONE_SHOT_ROWS_OF_TWO, _ONE_SHOT_MOST_ROWS = 256, 1024, 1024
# The latter for fp8 by layout. A second accumulator makes the small-M GEMM slower, but not the warp-specialized kernel.
_ONE_SHOT_MOST_ROWS_OF_FP8 = {"scaled fast": 1024, "scaled": 385, "scaled by block": 257}
# Largest number of rows for which "one_shot" is the default on two ranks in fp8, by layout, if the warp-specialized
# kernel can run. For each layout the default takes 1.02 to 1.03 of the time of the fastest config measured on average,
# at most 1.27 (H200 in solo mode, 36 cases, 128 to 1008 rows).
_ONE_SHOT_ROWS_OF_TWO_IN_FP8 = {"scaled fast": 640, "scaled": 512, "scaled by block": 192}
# Time of "direct" with a tile on more than two ranks on Hopper, in µs: the first number, plus the second one for each
# wave of tiles and 1000 columns of a rank's x. The last tile is for the warp-specialized kernel. Fitted to calls in
# solo mode on an H200 with 64 to 1024 rows on 4 and 8 ranks (72 to 84 cases each). With 257 to 2560 rows the default
# takes 1.01 of the time of the fastest kernel on average, at most 1.26 (124 cases). It is not used for more rows.
_MICROSECONDS = (DIRECT_SMALL, 19, 3.8), (DIRECT_MEDIUM, 26, 5.6), (DIRECT_LARGE, 29, 7.6)
# The same for fp8 by layout. With 256 to 2560 rows the tile by these numbers takes 1.00 to 1.01 of the time of the
# fastest of the three on average, at most 1.14 (56 to 120 cases for each layout).
_MICROSECONDS_OF_FP8 = {
    "scaled fast": ((DIRECT_SMALL, 20, 2.3), (DIRECT_MEDIUM, 28, 3.2), (DIRECT_LARGE, 29, 5.0)),
    "scaled": ((DIRECT_SMALL, 21, 3.1), (DIRECT_MEDIUM, 29, 3.8), (DIRECT_LARGE, 30, 5.4)),
    "scaled by block": ((DIRECT_SMALL, 20, 3.5), (DIRECT_MEDIUM, 29, 5.1), (DIRECT_LARGE, 30, 6.4)),
}
_MOST_ROWS_OF_MICROSECONDS = 2560


@dataclass(frozen=True)
class GemmRsConfig:
    """Config of ``gemm_rs``.

    Attributes:
        method: "fused" runs the overlapping kernel. "parts" is a pipelined GEMM: torch's GEMM computes a part of the
            rows at a time, and the copy engine sends it to the owner of the rows; not supported on several nodes.
            "torch" runs a GEMM, then a reduce-scatter.
        tiles: Tile of the GEMM, see ``Tiles``. None selects the default for the device and shape.
        transport: "forward" stages partial tiles, and other work items copy them to the owner. With "direct" the
            program that computed a tile sends it while it computes the next one, and other programs, or with
            ``warp_specialize`` other warps, add the partials. "one_shot" has one program per tile and K split, and a
            tile covers all rows, for small M. On several nodes it is always "forward".
        item_tiles: Number of tiles in a group, which is sent with one signal. Only used by "forward".
        split_k: Number of K splits of a tile, each computed by one program. Only used by "one_shot";
            ``warp_specialize`` selects its own.
        pieces: Number of chunks in which the rows of an owner are multiplied and sent. The only other field that method
            "parts" uses.
        warp_specialize: Whether different warps of a program may load, multiply, send and add, with transport "direct".
            They do so on Hopper, for tiles of 128 x 256, operands that TMA can load, and N a multiple of 16. Operands
            have 16 bits, and steps 64 elements of K. Alternatively operands are fp8 with K as the inner dimension,
            steps have 128 elements, and outputs have 16 bits. Operands of different fp8 formats are not supported with
            fast accumulation. ``num_warps`` and ``num_stages`` are not used then. Otherwise, and with ``max_ranks`` of
            the batch-invariant mode, the same config runs without it. Results are the same, apart from rounding if the
            last tiles are split along K, which is never done in the batch-invariant mode.
    """

    method: str = "fused"
    tiles: Tiles | None = None
    transport: str = "forward"
    item_tiles: int = 4
    split_k: int = 1
    pieces: int = 1
    warp_specialize: bool = False

    def illegal(self, device: "torch.device", dtype: "torch.dtype") -> str | None:
        """Return why this config cannot run with a device and a dtype, or None if it can."""
        if self.method not in METHODS:
            return f'method must be "fused", "parts" or "torch", not {self.method!r}'
        if self.method == "torch":
            return None  # uses no other field
        if self.pieces < 1:
            return f"pieces must be at least 1, not {self.pieces}"
        if self.method == "parts":
            return None  # uses no other field
        if self.transport not in ("forward", "direct", "one_shot"):
            return f'transport must be "forward", "direct" or "one_shot", not {self.transport!r}'
        for name in ("item_tiles", "split_k"):
            if getattr(self, name) < 1:
                return f"{name} must be at least 1, not {getattr(self, name)}"
        if self.tiles is None:
            return None
        sends = self.transport == "direct"
        sent = launch_direct.shared_memory_bytes(self.tiles, device, dtype) if sends else 0
        return self.tiles.illegal(device, dtype, sent)

    def variant_reason(self) -> str | None:
        """Return why a row of a result depends on the batch with this config, or None if it does not."""
        if self.method != "fused":
            return f'method must be "fused", not {self.method!r}'
        if self.transport == "forward":  # it adds this rank's partial unrounded, so a row depends on the rank it is on
            return 'transport must be "direct" or "one_shot", not "forward"'
        if invariant_ranks() and self.transport != "direct":
            return f'with max_ranks, transport must be "direct", not {self.transport!r}'
        return None


def default_config(
    rows: int, n: int, k: int, dtype: "torch.dtype", device: "torch.device", world_size: int, layout: str | None = None
) -> GemmRsConfig:
    """Return the heuristic config for an output [rows, n] of a rank, and k columns of its operands.

    ``layout``: the layout of fp8 operands, see ``scaling.layout_of``. The tiles are those of 16-bit operands.
    """
    has_direct_tiles = launch_direct.has_tiles(n, k, dtype, device, world_size, layout)
    if _suits_one_shot(rows, n, k, dtype, device, world_size, has_direct_tiles, layout):
        tiles, split_k = small_m_gemm.default_tiles(rows * world_size, n, k, dtype, device, world_size, layout)
        return GemmRsConfig(transport="one_shot", tiles=tiles, split_k=split_k)
    if has_direct_tiles and rows * world_size <= _MOST_ROWS_OF_MICROSECONDS:
        tiles = _direct_tiles(rows, n, k, world_size, layout, gpu.num_sms(device))
        return GemmRsConfig(tiles=tiles, transport="direct", warp_specialize=tiles == DIRECT_LARGE)
    # Faster than "forward" in all 8 large shapes measured on 2 H100, and on 4 and 8 ranks in solo mode. For up to two
    # waves of large tiles it takes 0.67 to 0.94 of the time with 4 and 8 ranks (solo mode, an H200, twelve cases).
    if launch_direct.suits(rows, n, k, dtype, device, world_size):
        specializes = launch_specialized.suits(LARGE, n, k, dtype, device, layout)
        tiles = launch_direct.default_tile(rows, n, k, world_size, world_size, specializes, dtype, device)
        specializes = specializes and tiles == launch_direct.DIRECT_LARGE
        return GemmRsConfig(tiles=tiles, transport="direct", warp_specialize=specializes)
    tiles = tiles_of_product(rows, n, world_size, 2, dtype, device)
    return GemmRsConfig(tiles=tiles, item_tiles=2 if device.type == "cpu" else 4)


def _suits_one_shot(rows, n, k, dtype, device, world_size, has_direct_tiles, layout):
    """Return whether "one_shot" is the default. ``has_direct_tiles``: see ``launch_direct.has_tiles``"""
    total = rows * world_size
    if world_size == 2 and dtype.itemsize == 2 and gpu.capability(device) >= (9, 0):
        return total <= _ONE_SHOT_ROWS_OF_TWO
    if world_size == 2 and dtype.itemsize == 1 and launch_specialized.suits(LARGE, n, k, dtype, device, layout):
        return total <= _ONE_SHOT_ROWS_OF_TWO_IN_FP8[layout]
    if not has_direct_tiles:
        return total <= _ONE_SHOT_ROWS[device.type]
    # With block-wise scales "direct" is faster with full tiles for fewer rows, too.
    if total <= _ONE_SHOT_ROWS_OF_HOPPER and layout != "scaled by block":
        return True
    is_full = rows % LARGE.block_m == 0 or rows == DIRECT_SMALL.block_m
    return total < _ONE_SHOT_MOST_ROWS_OF_FP8.get(layout, _ONE_SHOT_MOST_ROWS) and not is_full


def has_pairs(rows: int, world_size: int) -> bool:
    """Return whether the halves of a tile of the warp-specialized kernel may have rows of two shards of ``rows`` rows.

    These are the rows of the last tile row of each shard, if they fit in half of a tile.
    """
    return world_size > 1 and 0 < rows % LARGE.block_m <= LARGE.block_m // 2


def num_tiles_in_pairs(rows: int, n: int, world_size: int) -> int:
    """Return the number of tiles of the warp-specialized kernel if ``has_pairs``."""
    return world_size * LARGE.count(rows, n) - world_size // 2 * cdiv(n, LARGE.block_n)


def _direct_tiles(rows, n, k, world_size, layout, num_sms):
    """Return the default tile of "direct" for few rows if ``launch_direct.has_tiles``."""
    count = lambda tiles: _num_tiles(rows, n, world_size, tiles)  # noqa: E731
    return launch_direct.fastest_tile(_MICROSECONDS_OF_FP8.get(layout, _MICROSECONDS), count, k, num_sms)


def _num_tiles(rows, n, world_size, tiles):
    """Return the number of tiles of "direct"; those of DIRECT_LARGE are for the warp-specialized kernel."""
    if tiles == DIRECT_LARGE and has_pairs(rows, world_size):
        return num_tiles_in_pairs(rows, n, world_size)
    return world_size * tiles.count(rows, n)


def default_config_for(x: "torch.Tensor", weight: "torch.Tensor", world_size: int) -> GemmRsConfig:
    """Return ``default_config`` for operands [M, K / W] and [N, K / W]."""
    return default_config(x.shape[0] // world_size, *weight.shape, x.dtype, x.device, world_size)  # type: ignore[call-arg]
