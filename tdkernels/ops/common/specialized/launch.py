"""What the launchers of the warp-specialized kernels share: the operands that these support, and their descriptors."""

from typing import Any

import torch

from tdkernels.lang.tested_versions import triton_is_tested
from tdkernels.ops.common.gemm_operands import tma_fits
from tdkernels.ops.common.tile_config import LARGE, SPECIALIZED_TILE
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.gluon import descriptor

_BLOCK_M, _BLOCK_N, _BLOCK_K = SPECIALIZED_TILE


def suits(tiles: Any, n: int, k: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a warp-specialized kernel can be the default for a GEMM whose default tile is ``tiles``."""
    fits = dtype.itemsize == 2 and n % 16 == 0 and k % 8 == 0 and tiles == LARGE
    return fits and gpu.capability(device) == (9, 0) and triton_is_tested()


def is_enabled(config: Any) -> bool:
    """Return whether a config allows a warp-specialized kernel, and has its tile."""
    tiles = config.tiles
    return config.warp_specialize and (tiles.block_m, tiles.block_n, tiles.block_k) == SPECIALIZED_TILE


def supports(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the warp-specialized kernels can multiply these operands on this device."""
    if gpu.capability(x.device) != (9, 0) or x.itemsize != 2 or weight.shape[0] % 16 or recorder.active is not None:
        return False
    return tma_fits(x, weight) and triton_is_tested()


def rows_descriptor(x: torch.Tensor, planes: int, rows: int, plane_stride: int) -> Any:
    """Return a descriptor of [planes, rows, K] for memory that begins at x [..., K]; strides are in elements."""
    k = x.shape[-1]
    return descriptor(x, [planes, rows, k], [plane_stride, k, 1], [1, _BLOCK_M // 2, _BLOCK_K])


def weight_descriptor(weight: torch.Tensor, is_kn: bool) -> Any:
    """Return a descriptor of a weight [N, K] in its memory layout, which is [K, N] if ``is_kn``."""
    if is_kn:
        return descriptor(weight, weight.shape[::-1], [weight.stride(1), 1], [_BLOCK_K, _BLOCK_N // 2])
    return descriptor(weight, weight.shape, [weight.stride(0), 1], [_BLOCK_N // 2, _BLOCK_K])
