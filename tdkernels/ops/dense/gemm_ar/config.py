"""Config of gemm_ar, and the heuristic that selects a config without tuning."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tdkernels.autotune.invariance import invariant_ranks
from tdkernels.ops.collectives.config import saved_by_two_shots
from tdkernels.ops.common import small_m_gemm
from tdkernels.ops.common.specialized import launch as launch_specialized
from tdkernels.ops.common.tile_config import LARGE, Tiles, Wave, fastest_in_waves, tiles_of_product
from tdkernels.ops.dense import launch_direct
from tdkernels.ops.dense.launch_direct import DIRECT_LARGE, DIRECT_MEDIUM, DIRECT_SMALL
from tdkernels.runtime import gpu

if TYPE_CHECKING:
    import torch

# Up to this many rows "one_shot" is selected, which crosses the wire once instead of twice, unless it sends this many
# bytes more than "two_shot".
_ONE_SHOT_ROWS = {"cpu": 16, "cuda": 512}
_ONE_SHOT_MORE_BYTES = 4 << 20
# The same for fp8 from this many rows on, if "direct" is the alternative, see _MICROSECONDS_OF_FP8.
_LEAST_ROWS_OF_FP8, _ONE_SHOT_MORE_BYTES_OF_FP8 = 64, 2 << 20
# Largest number of rows for which "one_shot" is the default on two ranks with block-wise scales, if the
# warp-specialized kernel can run. The small-M GEMM is slower with these scales. The default takes 1.02 of the time of
# the fastest config measured on average, at most 1.25 (H200 in solo mode, 35 cases, 128 to 1008 rows). With the other
# scales, which have the limit above, it takes 1.02 and 1.03 (36 cases for each).
_ONE_SHOT_ROWS_OF_TWO_BY_BLOCK = 192
# Tiles of "direct" for more than two ranks on Hopper, and the relative time of a wave of them; the largest ones are for
# the warp-specialized kernel. H200 in solo mode, 64 to 1024 rows on 4 and 8 ranks: the tile with the shortest time in
# whole waves, or "one_shot" by the limit above, takes 1.01 of the time of the fastest kernel (78 cases, at most 1.08).
_WAVES = Wave(DIRECT_SMALL, 1.0), Wave(DIRECT_MEDIUM, 1.4), Wave(DIRECT_LARGE, 1.8)
# Times of the same tiles for fp8 by layout, as for ``launch_direct.fastest_tile``. H200 in solo mode, 64 to 2048 rows
# on 4 and 8 ranks: the tile by these numbers takes 1.00 to 1.01 of the time of the fastest of the three on average, at
# most 1.07 (35 to 102 cases for each layout).
_MICROSECONDS_OF_FP8 = {
    "scaled fast": ((DIRECT_SMALL, 23, 3.0), (DIRECT_MEDIUM, 26, 4.7), (DIRECT_LARGE, 31, 5.9)),
    "scaled": ((DIRECT_SMALL, 23, 4.2), (DIRECT_MEDIUM, 26, 5.8), (DIRECT_LARGE, 31, 6.8)),
    "scaled by block": ((DIRECT_SMALL, 24, 4.1), (DIRECT_MEDIUM, 28, 6.4), (DIRECT_LARGE, 34, 6.3)),
}


@dataclass(frozen=True)
class GemmArConfig:
    """Config of ``gemm_ar``.

    Attributes:
        method: "fused" runs the overlapping kernel, "torch" a GEMM, then an all-reduce.
        exchange: With "two_shot" one rank sums each tile and sends the sum to all ranks. With "one_shot" every rank
            receives all partials and sums every tile itself, for small M. On several nodes there is only one exchange,
            which both values select.
        tiles: Tile of the GEMM, see ``Tiles``. None selects the default for the device and shape.
        item_tiles: Number of tiles in a group, which is sent with one signal. Not used by "one_shot" on one node, nor
            by transport "direct".
        split_k: Number of K splits of a tile, each computed by one program. Only used by "one_shot" on one node.
            ``warp_specialize`` selects its own.
        transport: Of "two_shot" on one node. "forward" stages partial tiles, and other work items copy them to the
            owner. With "direct" the program that computed a tile sends it while it computes the next one, and other
            programs add the partials and send the sums.
        num_comm_sms: Minimum number of multiprocessors that add and send from the start, with transport "direct". 0
            reserves only those that the last round of tiles leaves idle. At the end all multiprocessors add and send.
        warp_specialize: Whether different warps of a program may load, multiply, send and add, with transport "direct".
            They do so for the operands for which ``GemmRsConfig.warp_specialize`` has an effect. ``num_comm_sms``, and
            ``num_warps`` and ``num_stages`` of the tiles, are not used then. Results are the same, apart from rounding
            as described there.
    """

    method: str = "fused"
    exchange: str = "two_shot"
    tiles: Tiles | None = None
    item_tiles: int = 4
    split_k: int = 1
    transport: str = "forward"
    num_comm_sms: int = 0
    warp_specialize: bool = False

    def illegal(self, device: "torch.device", dtype: "torch.dtype") -> str | None:
        """Return why this config cannot run with a device and a dtype, or None if it can."""
        if self.method not in ("fused", "torch"):
            return f'method must be "fused" or "torch", not {self.method!r}'
        if self.method == "torch":
            return None  # uses no other field
        if self.exchange not in ("two_shot", "one_shot"):
            return f'exchange must be "two_shot" or "one_shot", not {self.exchange!r}'
        if self.transport not in ("forward", "direct"):
            return f'transport must be "forward" or "direct", not {self.transport!r}'
        for name, least in (("item_tiles", 1), ("split_k", 1), ("num_comm_sms", 0)):
            if getattr(self, name) < least:
                return f"{name} must be at least {least}, not {getattr(self, name)}"
        if self.tiles is None:
            return None
        sends = self.exchange == "two_shot" and self.transport == "direct"
        sent = launch_direct.shared_memory_bytes(self.tiles, device, dtype) if sends else 0
        return self.tiles.illegal(device, dtype, sent)

    def variant_reason(self) -> str | None:
        """Return why a row of a result depends on the batch with this config, or None if it does not."""
        if self.method != "fused":
            return f'method must be "fused", not {self.method!r}'
        if invariant_ranks() and (self.exchange, self.transport) != ("two_shot", "direct"):
            return f'with max_ranks, transport must be "direct", with exchange "two_shot", not {self.transport!r}'
        return None


def default_config(
    rows: int, n: int, k: int, dtype: "torch.dtype", device: "torch.device", world_size: int, layout: str | None = None
) -> GemmArConfig:
    """Return the heuristic config for operands [rows, k] and [n, k] of a rank.

    ``layout``: the layout of fp8 operands, see ``scaling.layout_of``. The tiles are those of 16-bit operands.
    """
    has_direct_tiles = launch_direct.has_tiles(n, k, dtype, device, world_size, layout)
    if _suits_one_shot(rows, n, k, dtype, device, world_size, has_direct_tiles, layout):
        tiles, split_k = small_m_gemm.default_tiles(rows, n, k, dtype, device, world_size, layout)
        return GemmArConfig(exchange="one_shot", tiles=tiles, split_k=split_k)
    if has_direct_tiles:
        tiles = _direct_tiles(rows, n, k, layout, gpu.num_sms(device))
        return GemmArConfig(tiles=tiles, transport="direct", warp_specialize=tiles == DIRECT_LARGE)
    if launch_direct.suits(rows, n, k, dtype, device, world_size):
        specializes = launch_specialized.suits(LARGE, n, k, dtype, device, layout)
        tiles = launch_direct.default_tile(rows, n, k, 1, world_size, specializes, dtype, device)
        # Without specialization faster than "forward" in 5 of 6 shapes measured on 2 H100, by 1 to 9 %, and equal in
        # one. With more ranks these two were not compared. With specialization "direct" takes 0.81 to 1.00 of the time
        # on 4 and 8 ranks, in solo mode on an H200 (six shapes). For up to two waves of large tiles solo mode predicts
        # 0.87 to 0.95 of the time that "forward" took on 4 and 8 H200 (seven cases).
        if tiles == launch_direct.DIRECT_LARGE and (specializes or world_size == 2):
            return GemmArConfig(tiles=tiles, transport="direct", warp_specialize=specializes)
    tiles = tiles_of_product(rows, n, 1, 2, dtype, device)
    return GemmArConfig(tiles=tiles, item_tiles=2 if device.type == "cpu" else 4)


def _suits_one_shot(rows, n, k, dtype, device, world_size, has_direct_tiles, layout):
    """Return whether "one_shot" is the default. ``has_direct_tiles``: see ``launch_direct.has_tiles``"""
    if world_size == 2 and layout == "scaled by block" and launch_specialized.suits(LARGE, n, k, dtype, device, layout):
        return rows <= _ONE_SHOT_ROWS_OF_TWO_BY_BLOCK
    itemsize, most = dtype.itemsize, _ONE_SHOT_MORE_BYTES
    if dtype.itemsize == 1 and has_direct_tiles and rows >= _LEAST_ROWS_OF_FP8:
        itemsize, most = 2, _ONE_SHOT_MORE_BYTES_OF_FP8  # the output has 16 bits
    return rows <= _ONE_SHOT_ROWS[device.type] and saved_by_two_shots(rows * n * itemsize, world_size) <= most


def _direct_tiles(rows, n, k, layout, num_sms):
    """Return the default tile of "direct" if ``launch_direct.has_tiles``."""
    if layout not in _MICROSECONDS_OF_FP8:
        return fastest_in_waves(_WAVES, rows, n, num_sms)
    return launch_direct.fastest_tile(_MICROSECONDS_OF_FP8[layout], lambda tiles: tiles.count(rows, n), k, num_sms)


def default_config_for(x: "torch.Tensor", weight: "torch.Tensor", world_size: int) -> GemmArConfig:
    """Return ``default_config`` for operands [M, K / W] and [N, K / W]."""
    return default_config(x.shape[0], *weight.shape, x.dtype, x.device, world_size)  # type: ignore[call-arg]
