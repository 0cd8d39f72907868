"""Launch the warp-specialized kernel of group_gemm."""

from typing import Any

import torch

from tdkernels.lang.tested_versions import triton_is_tested
from tdkernels.ops.common.gemm_operands import scale_pointers
from tdkernels.ops.common.scaling import BLOCK, Scales
from tdkernels.ops.common.specialized import launch as specialized
from tdkernels.ops.common.tile_config import SPECIALIZED_TILE, STEP_BYTES
from tdkernels.ops.experts.grouped_gemm.layout import MemoryLayout, tma_fits
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime import gpu
from tdkernels.runtime.gluon import descriptor, optional_kernel
from tdkernels.runtime.local_workspace import local_flags

_BLOCK_M, _BLOCK_N = SPECIALIZED_TILE
_LEAST_EXPERTS = 32  # a group for each lane of a warp
# Experts for whose groups the threads of a warp have registers; with two accumulators they have fewer.
_MOST_EXPERTS, _MOST_EXPERTS_WITH_TWO_SUMS = 1024, 512


@optional_kernel("group_gemm: the warp-specialized kernel")
def kernel() -> Any:
    from tdkernels.ops.experts.grouped_gemm.specialized.kernel import group_gemm_specialized_kernel

    return group_gemm_specialized_kernel


def supports(
    x: torch.Tensor, w: torch.Tensor, layout: MemoryLayout, activation: str | None, config: Any,
    scales: Scales | None = None,
) -> bool:
    """Return whether a warp-specialized kernel multiplies x [R, K] by a weight w.

    ``layout`` is the ``memory_layout`` of w. The planes must be adjacent, because they are read as one matrix.
    """
    (planes, n, (stride_plane, stride_w), is_kn), k = layout, x.shape[1]
    if not tma_fits(k, w, stride_plane, stride_w, is_kn, config.tiles):
        return False
    if not specialized.is_enabled(config) or activation not in (None, "swiglu"):
        return False
    if gpu.capability(x.device) != (9, 0) or x.itemsize > 2 or config.tiles.block_k * x.itemsize != STEP_BYTES:
        return False
    if scales is not None and not _supports_scaled(x, w, planes, n, scales):
        return False
    if n % 8:
        return False
    if planes > 1 and stride_plane != (k if is_kn else n) * stride_w or planes * max(n, k) >= 1 << 31:
        return False
    return triton_is_tested() and kernel() is not None


def experts_of_warp(experts: int) -> int:
    """Return EXPERTS, the number of groups that the threads of a warp hold: a power of two, at least one per lane."""
    return max(next_power_of_2(experts), _LEAST_EXPERTS)


def has_registers(experts: int, scales: Scales | None) -> bool:
    """Return whether the threads of a warp of ``group_gemm`` have registers for the groups of all experts."""
    has_two_sums = scales is not None and specialized.promotes(scales)
    return experts <= (_MOST_EXPERTS_WITH_TWO_SUMS if has_two_sums else _MOST_EXPERTS)


def _supports_scaled(x, w, planes, n, scales):
    """Return whether the kernel supports scaled operands. ``n`` is the N of a plane."""
    # Each plane of an expert must start at a block boundary.
    has_whole_blocks = scales.kind != "block" or planes == w.shape[0] or n % BLOCK == 0
    return specialized.supports_formats(x, w, scales) and has_whole_blocks


def output_descriptor(y: torch.Tensor) -> Any:
    """Return the descriptor of an output [R, N] for a quarter of a tile. It may be an ``output_spec``."""
    rows, n = getattr(y, "sizes", y.shape)
    return descriptor(y, [1, rows, n], [rows * n, n, 1], [1, _BLOCK_M // 2, _BLOCK_N // 2])


def work_counter(device: torch.device) -> torch.Tensor:
    """Return the counter of a launch's work queue. It belongs to a stream or a captured launch, see ``local_flags``."""
    return local_flags(device, 1).view(torch.int32)[:1]


def arguments(
    x: torch.Tensor, rows: int, w: torch.Tensor, layout: MemoryLayout, splits: torch.Tensor,
    counter: torch.Tensor, y: torch.Tensor, pre: torch.Tensor | None, config: Any, scales: Scales | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (arguments, constants) of the kernel for operands that ``supports`` accepts.

    ``rows`` is their number, which may be a ``Rows``. ``counter`` is from ``work_counter``.
    """
    k, experts = x.shape[1], w.shape[0]
    x_desc = specialized.rows_descriptor(x, 1, rows, rows * k)
    operands = x_desc, weight_descriptor(w, layout), *scale_pointers(scales)
    args = *operands, splits, counter, *outputs(y, pre), experts, rows, layout[1], k, config.tiles.group_m
    constants = product_constants(w, layout, scales)
    return args, {"EXPERTS": experts_of_warp(experts), "PAIR": layout[0] > experts, **constants}


def weight_descriptor(w: torch.Tensor, layout: MemoryLayout) -> Any:
    """Return the descriptor of a weight, all of whose planes are one matrix. ``layout``: as for ``supports``."""
    (planes, n, (_, stride_w), is_kn), k = layout, w.shape[2]
    block_k = STEP_BYTES // w.itemsize
    if is_kn:
        return descriptor(w, [planes * k, n], [stride_w, 1], [block_k, _BLOCK_N // 2])
    return descriptor(w, [planes * n, k], [stride_w, 1], [_BLOCK_N // 2, block_k])


def outputs(y: torch.Tensor, pre: torch.Tensor | None) -> tuple[Any, ...]:
    """Return the arguments of a kernel for its output and for the input of SwiGLU, which may be None."""
    return y, output_descriptor(y), *((None, None) if pre is None else (pre, output_descriptor(pre)))


def product_constants(
    w: torch.Tensor, layout: MemoryLayout, scales: Scales | None
) -> dict[str, Any]:
    """Return the constants of a kernel for the products, and the launch options. ``layout``: as for ``supports``.

    The scales of the weight may be one for each expert.
    """
    constants = {"W_IS_KN": layout[3], "num_warps": 4}
    if scales is None:
        return constants
    step, expert_step = weight_scale_steps(scales, w.shape[0])
    return constants | specialized.scale_constants(scales) | {"W_STEP": step, "EXPERT_STEP": expert_step}


def weight_scale_steps(scales: Scales, experts: int) -> tuple[int, int]:
    """Return ``w_scale_step`` and ``expert_scale_step`` of ``GroupedProduct``."""
    number, by_row = scales.weight.numel(), scales.kind == "row"
    return int(by_row and number > experts), int(by_row and number == experts > 1)


def num_programs(rows: int, experts: int, layout: MemoryLayout, device: torch.device) -> int:
    """Return the number of programs: at most one for each multiprocessor."""
    planes, n = layout[:2]
    tiles_n = cdiv(n, _BLOCK_N // 2 if planes > experts else _BLOCK_N)
    return min((rows // _BLOCK_M + min(experts, rows)) * tiles_n, gpu.available_sms(device))
