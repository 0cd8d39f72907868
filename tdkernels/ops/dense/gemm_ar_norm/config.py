"""Config of gemm_ar_rms_norm and gemm_ar_layer_norm, and the heuristic that selects a config without tuning."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tdkernels.autotune.invariance import invariant_ranks, is_batch_invariant
from tdkernels.ops.collectives.norm.config import ROW_PROGRAMS
from tdkernels.ops.common import small_m_gemm
from tdkernels.ops.common.tile_config import Tiles, for_tree

if TYPE_CHECKING:
    import torch

METHODS = "fused", "separate", "torch"
# Bytes of a row per warp that stay in registers: 32 elements of 16 bits per thread. A longer row is read again from
# memory. (In bf16 with 8 ranks, bias, LayerNorm and fp8, ptxas for sm_90 then uses 254 registers and spills none; 32
# elements of fp32 per thread spill.)
_BYTES_PER_WARP = 2048
# Warps of the heuristic tiles if these, and no fewer, keep a row in registers: 33.4 instead of 37.6 us with 4 warps for
# 1 x 8192 x 8192, 34.7 instead of 38.3 for 32 rows. Where 4 warps suffice, 8 are slower: 15.9 instead of 15.2 us for
# 1 x 4096 x 4096. (2 H100, bf16, CUDA graphs; operands of 32 bits were not measured.)
_WARPS_OF_LONG_ROWS = 8
# Up to this many rows method "fused" is selected. With more, a GEMM of torch has the higher rate. (An estimate. "fused"
# is at least as fast as "separate" for all measured sizes: up to 64 rows of N = 4096, up to 32 of N = 8192; 2 H100.)
_FUSED_ROWS = {"cpu": 16, "cuda": 64}


@dataclass(frozen=True)
class GemmArNormConfig:
    """Config of ``gemm_ar_rms_norm`` and ``gemm_ar_layer_norm``.

    Attributes:
        method: "fused" runs one kernel of this library, for small M. "separate" runs torch's GEMM, then the kernel of
            ``all_reduce_rms_norm`` with the config that is known for it. "torch" runs torch's GEMM, the all-reduce of
            torch.distributed, an addition and torch's norm.
        tiles: Tile of the GEMM, see ``Tiles``. None selects the default for the device and shape.
        split_k: Number of K splits of a tile, each computed by one program.
        row_programs: Number of programs that add and normalize a row. Each adds the whole row and stores its share of
            the columns. Not used for rows of more than 2 KiB per warp.
        num_programs: Maximum number of programs that add and normalize rows.
    """

    method: str = "fused"
    tiles: Tiles | None = None
    split_k: int = 1
    row_programs: int = 1
    num_programs: int = 128

    def illegal(self, device: "torch.device", dtype: "torch.dtype") -> str | None:
        """Return why this config cannot run with a device and a dtype, or None if it can."""
        if self.method not in METHODS:
            return f'method must be "fused", "separate" or "torch", not {self.method!r}'
        if self.method != "fused":
            return None  # they use no other field
        if self.row_programs not in ROW_PROGRAMS:
            return f"row_programs must be 1, 2, 4 or 8, not {self.row_programs}"
        for name in ("split_k", "num_programs"):
            if getattr(self, name) < 1:
                return f"{name} must be at least 1, not {getattr(self, name)}"
        return None if self.tiles is None else self.tiles.illegal(device, dtype)

    def variant_reason(self) -> str | None:
        """Return why a row of a result depends on the batch with this config, or None if it does not."""
        if self.method != "fused":
            return f'method must be "fused", not {self.method!r}'
        if invariant_ranks() and self.split_k > 1:
            return f"with max_ranks, split_k must be 1, not {self.split_k}"
        return None


def registers_hold(num_warps: int, dtype: "torch.dtype") -> int:
    """Return the number of elements of a row that stay in registers."""
    return num_warps * _BYTES_PER_WARP // dtype.itemsize


def default_config(rows: int, n: int, k: int, dtype: "torch.dtype", device: "torch.device") -> GemmArNormConfig:
    """Return the heuristic config for operands [rows, k] and [n, k] of a rank."""
    if rows > _FUSED_ROWS[device.type]:
        return GemmArNormConfig("separate")
    return fused_config(rows, n, k, dtype, device)


def fused_config(rows: int, n: int, k: int, dtype: "torch.dtype", device: "torch.device") -> GemmArNormConfig:
    """Return the heuristic config of method "fused", for any number of rows; arguments as for ``default_config``."""
    tiles, split_k = small_m_gemm.default_tiles(rows, n, k, dtype, device)
    is_long = registers_hold(tiles.num_warps, dtype) < n <= registers_hold(_WARPS_OF_LONG_ROWS, dtype)
    if is_long and dtype.itemsize == 2 and device.type != "cpu":
        tiles = replace(tiles, num_warps=_WARPS_OF_LONG_ROWS)
    return GemmArNormConfig("fused", tiles, split_k, num_programs=4 if device.type == "cpu" else 128)


def invariant_config(dtype: "torch.dtype", device: "torch.device") -> GemmArNormConfig:
    """Return the config of the batch-invariant mode: the same for all shapes."""
    tiles, _ = small_m_gemm.default_tiles(64, 64, 1, dtype, device)
    return GemmArNormConfig("fused", for_tree(tiles, dtype, device), num_programs=4 if device.type == "cpu" else 128)


def completed(
    config: GemmArNormConfig, rows: int, n: int, k: int, dtype: "torch.dtype", device: "torch.device"
) -> GemmArNormConfig:
    """Return the config with tiles: its own, those of the batch-invariant mode, or the default ones."""
    if config.method != "fused" or config.tiles is not None:
        return config
    if is_batch_invariant():
        return replace(config, tiles=invariant_config(dtype, device).tiles)
    return replace(config, tiles=fused_config(rows, n, k, dtype, device).tiles)
