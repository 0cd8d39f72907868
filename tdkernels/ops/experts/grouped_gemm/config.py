"""Config of group_gemm, and the heuristic that selects a config without tuning."""

from dataclasses import dataclass, replace

import torch

from tdkernels.ops.common.specialized.launch import suits
from tdkernels.ops.common.tile_config import LARGE, Tiles, default_tiles, invariant_tiles
from tdkernels.runtime import gpu


@dataclass(frozen=True)
class GroupGemmConfig:
    """Config of ``group_gemm``.

    Attributes:
        method: "fused" is one Triton kernel. "torch" is torch's grouped GEMM, which needs bf16 on an NVIDIA GPU with
            sm_90 or sm_100 and does not synchronize with the host; on CPU it is one matmul per group.
        tiles: Tile of the GEMM, see ``Tiles``. None selects the default for the device and shape, which a call without
            a config may combine with ``warp_specialize``. In the weight gradient dw (layout "dw" of the tuner) block_m
            and block_n are along N and K, and block_k is along the rows.
        warp_specialize: Whether different warps of a program may load, multiply and store. They do so on Hopper, for
            operands that TMA can load, weights of adjacent experts, N a multiple of 8, or of 16 with "swiglu", and
            without "swiglu_interleaved". Tiles are 128 x 256 x 64 for 16-bit operands. For weights that are stored as
            [K, N], K must be a multiple of 64. For fp8 operands tiles are 128 x 256 x 128, outputs have 16 bits, and
            with block-wise scales and "swiglu" N / 2 is a multiple of 128. Without fast accumulation there are at most
            512 experts, with it both operands have one format. The weight gradient needs 16-bit operands and N and K
            that are multiples of 8. ``num_warps`` and ``num_stages`` are not used then. Otherwise the same config runs
            without it. Results are the same.
    """

    method: str = "fused"
    tiles: Tiles | None = None
    warp_specialize: bool = False

    def illegal(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why this config cannot run with a device and a dtype, or None if it can."""
        if self.method not in ("fused", "torch"):
            return f'method must be "fused" or "torch", not {self.method!r}'
        if self.method == "torch":
            known = device.type == "cpu" or dtype == torch.bfloat16 and gpu.has_tma(device)
            return None if known else f'method "torch" needs bfloat16 and sm_90 or sm_100, not {dtype} on {device}'
        return self.tiles.illegal(device, dtype) if self.tiles is not None else None

    def variant_reason(self) -> str | None:
        """Return why a row of a result depends on the batch with this config, or None if it does not."""
        return None if self.method == "fused" else f'method must be "fused", not {self.method!r}'


def invariant_config(dtype: torch.dtype, device: torch.device, layout: str | None = None) -> GroupGemmConfig:
    """Return the config of the batch-invariant mode. ``layout`` is that of fp8 operands (``Scales.layout``), or None.
    """
    return GroupGemmConfig(tiles=invariant_tiles(dtype, device, layout))


def default_config(
    rows: int, n: int, k: int, groups: int, dtype: torch.dtype, device: torch.device, layout: str | None = None
) -> GroupGemmConfig:
    """Return the heuristic config for ``rows`` rows in all, ``groups`` groups and weights [n, k].

    ``layout``: the layout of fp8 operands, see ``scaling.layout_of``. The tiles are those of 16-bit operands.
    """
    if num_waves(rows, n, groups, device) > 1 and suits(LARGE, n, k, dtype, device, layout):
        return GroupGemmConfig(tiles=LARGE, warp_specialize=True)
    return GroupGemmConfig(tiles=default_tiles(rows // groups, n, dtype, device))


def num_waves(rows: int, n: int, groups: int, device: torch.device) -> float:
    """Return the number of tiles of the warp-specialized kernel over the number of multiprocessors.

    With fewer tiles than multiprocessors, small tiles are faster. With more, that kernel is faster for groups of any
    size: the time of a few rows is that of reading the weights, and its tiles read each weight once.

    Arguments are those of ``default_config``. The number is 0 on devices without CUDA, and if n is at most half of the
    columns of a tile.
    """
    if device.type != "cuda" or n <= LARGE.block_n // 2:
        return 0.0
    # If there are fewer rows than groups, assume that each row belongs to another group.
    return min(groups, rows) * LARGE.count(max(rows // groups, 1), n) / gpu.num_sms(device)


def completed(
    config: GroupGemmConfig | None, rows: int, n: int, k: int, groups: int, dtype: torch.dtype, device: torch.device,
    layout: str | None = None,
) -> GroupGemmConfig:
    """Return the config with tiles, or ``default_config`` if it is None. The other arguments are as there."""
    default = default_config(rows, n, k, groups, dtype, device, layout)
    return with_tiles_of(default, config, default_tiles(rows // groups, n, dtype, device))


def with_tiles_of(default: GroupGemmConfig, config: GroupGemmConfig | None, portable: Tiles) -> GroupGemmConfig:
    """Return a config with tiles: its own, or else those of ``default``, or ``default`` itself if there is no config.

    ``portable``: the tiles if the default is warp-specialized and the config is not
    """
    if config is None:
        return default
    if config.tiles is not None:
        return config
    return replace(config, tiles=portable if default.warp_specialize and not config.warp_specialize else default.tiles)
