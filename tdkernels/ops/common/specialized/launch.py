"""Shared by launchers of warp-specialized kernels: checks of operands, constants, and tensor descriptors."""

from typing import Any

import torch

from tdkernels.lang.tested_versions import triton_is_tested
from tdkernels.ops.common.gemm_operands import tma_fits
from tdkernels.ops.common.scaling import LAYOUTS, Scales
from tdkernels.ops.common.tile_config import LARGE, SPECIALIZED_TILE, STEP_BYTES
from tdkernels.runtime import gpu
from tdkernels.runtime.gluon import descriptor

_BLOCK_M, _BLOCK_N = SPECIALIZED_TILE


def suits(
    tiles: Any, n: int, k: int, dtype: torch.dtype, device: torch.device, layout: str | None = None
) -> bool:
    """Return whether a warp-specialized kernel can be the default for a GEMM whose default tile is ``tiles``.

    ``layout``: the layout of fp8 operands, see ``scaling.layout_of``. ``tiles`` are those of 16-bit operands.
    """
    fits = n % 16 == 0 and tiles == LARGE
    if dtype.itemsize == 2:
        fits = fits and k % 8 == 0
    else:
        fits = fits and dtype.itemsize == 1 and k % 16 == 0 and layout in LAYOUTS
    return fits and gpu.capability(device) == (9, 0) and triton_is_tested()


def is_enabled(config: Any) -> bool:
    """Return whether a config allows a warp-specialized kernel, and has its tile for 16-bit or fp8 operands."""
    tiles = config.tiles
    is_tile = (tiles.block_m, tiles.block_n) == SPECIALIZED_TILE and tiles.block_k in (STEP_BYTES // 2, STEP_BYTES)
    return config.warp_specialize and is_tile


def supports(x: torch.Tensor, weight: torch.Tensor, config: Any, scales: Scales | None = None) -> bool:
    """Return whether the dense warp-specialized kernels can multiply these operands on this device."""
    if not is_enabled(config) or config.tiles.block_k * x.itemsize != STEP_BYTES:
        return False
    if gpu.capability(x.device) != (9, 0) or weight.shape[0] % 16:
        return False
    return (scales is None or _supports_scaled(x, weight, scales)) and tma_fits(x, weight) and triton_is_tested()


def _supports_scaled(x, weight, scales):
    """Return whether the kernels support scaled operands: with K as the inner dimension, and outputs in 16 bits."""
    return supports_formats(x, weight, scales) and weight.stride(1) == 1


def supports_formats(x: torch.Tensor, weight: torch.Tensor, scales: Scales) -> bool:
    """Return whether the kernels support the dtypes of scaled operands and of the output.

    They do not support different fp8 formats with fast accumulation, which were not tested.
    """
    same = x.dtype == weight.dtype or x.itemsize == weight.itemsize and promotes(scales)
    return same and scales.out_dtype.itemsize == 2


def promotes(scales: Scales) -> bool:
    """Return whether each step of K is added to a second accumulator."""
    return scales.kind == "block" or not scales.use_fast_accum


def scale_constants(scales: Scales | None) -> dict[str, Any]:
    """Return the constants of a kernel for scaled operands."""
    if scales is None:
        return {}
    by_row = scales.kind == "row"
    return {
        "SCALING": scales.kind, "X_STEP": int(by_row and scales.x.numel() > 1),
        "W_STEP": int(by_row and scales.weight.numel() > 1), "PROMOTE": promotes(scales),
    }


def rows_descriptor(x: torch.Tensor, planes: int, rows: int, plane_stride: int) -> Any:
    """Return a descriptor of [planes, rows, K] for memory that begins at x [..., K]; strides are in elements."""
    k = x.shape[-1]
    return descriptor(x, [planes, rows, k], [plane_stride, k, 1], [1, _BLOCK_M // 2, STEP_BYTES // x.itemsize])


def weight_descriptor(weight: torch.Tensor, is_kn: bool) -> Any:
    """Return a descriptor of a weight [N, K] in its memory layout, which is [K, N] if ``is_kn``."""
    block_k = STEP_BYTES // weight.itemsize
    if is_kn:
        return descriptor(weight, weight.shape[::-1], [weight.stride(1), 1], [block_k, _BLOCK_N // 2])
    return descriptor(weight, weight.shape, [weight.stride(0), 1], [_BLOCK_N // 2, block_k])
