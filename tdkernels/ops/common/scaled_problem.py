"""Tuning problems of GEMM operators with scaled fp8 operands. Their layouts are ``scaling.LAYOUTS``."""

from typing import TYPE_CHECKING

import torch

from tdkernels.ops.common.scaling import (
    CODE_MULTIPLE,
    FP8,
    LAYOUTS,
    Scales,
    layout_of,
    multiplies_blocks,
    quantize_ref,
)

if TYPE_CHECKING:
    from tdkernels.autotune.problem import Problem

# Flops of a rank from which on torch's GEMM, one shard at a time, is faster than the kernel without fast accumulation
# or with block-wise scales. The kernel reaches 0.6 to 0.7 of torch's rate then (H200), but launching the GEMMs takes
# the host 0.4 ms. In CUDA graphs, six calls with 1.7e11 to 2.8e11 flops took 0.64 to 0.80 of the kernel's time (gemm_rs
# on 4 H200, ag_gemm on 8).
_TORCH_FLOPS = 1.5e11
# The same for the warp-specialized kernels with block-wise scales. Calls with 2.4e11 to 9.6e11 flops took 0.78 to 0.96
# of the time of the pipelined form, one with 1.9e12 flops 1.08 (4 H100). With row-wise scales all took less: 0.77 to
# 0.95.
_TORCH_FLOPS_BY_BLOCK = 1.2e12


def is_scaled(problem: "Problem") -> bool:
    """Return whether the operands of a problem are fp8 with scales."""
    return problem.layout in LAYOUTS


def has_blocks(problem: "Problem") -> bool:
    """Return whether the scales of a problem are block-wise."""
    return problem.layout == layout_of("block", False)


def out_bytes(problem: "Problem") -> int:
    """Return the bytes per element of the output of a problem."""
    return torch.bfloat16.itemsize if is_scaled(problem) else problem.torch_dtype.itemsize


def why_not_scaled(problem: "Problem", k: int) -> str | None:
    """Return why a problem is invalid if it is scaled, or why its layout and its dtype do not fit together, or None.

    ``k``: the K of a rank.
    """
    if is_scaled(problem) and problem.torch_dtype in FP8:
        if problem.num_nodes > 1:
            return 'on several nodes float8 operands support only method "torch", so there is nothing to tune'
        return f"K of a rank must be a multiple of {CODE_MULTIPLE} for float8, not {k}" if k % CODE_MULTIPLE else None
    if is_scaled(problem) == (problem.torch_dtype in FP8):
        return None
    if is_scaled(problem):
        return f'layout "{problem.layout}" is for float8_e4m3fn and float8_e5m2, not {problem.dtype}'
    return f"layout must be one of {', '.join(LAYOUTS)} for {problem.dtype}, not {problem.layout!r}"


def prefers_torch_gemm(
    problem: "Problem", m: int, n: int, k: int, device: torch.device, specializes: bool = False
) -> bool:
    """Return whether torch's GEMM is the default for operands [m, k] and [n, k] of a rank.

    ``specializes``: whether a warp-specialized kernel is the alternative
    """
    if device.type == "cpu" or problem.layout == layout_of("row", True) or specializes and not has_blocks(problem):
        return False
    if 2.0 * m * n * k < (_TORCH_FLOPS_BY_BLOCK if specializes else _TORCH_FLOPS):
        return False
    if n % CODE_MULTIPLE:  # torch's GEMM does not support it
        return False
    return multiplies_blocks(m // problem.world_size, k, device) if has_blocks(problem) else True


def torch_dequantizes(problem: "Problem", n: int, k: int, device: torch.device) -> bool:
    """Return whether method "torch" dequantizes operands with ``n`` and ``k`` of a rank on a GPU.

    See ``scaled_linear``. It also does so if x and the weight are float8_e5m2, but the format of the weight is not a
    property of a problem.
    """
    if not is_scaled(problem):
        return False
    return n % CODE_MULTIPLE != 0 or has_blocks(problem) and not multiplies_blocks(problem.shape[0], k, device)


def scales_of(problem: "Problem", scale_x: torch.Tensor, scale_w: torch.Tensor) -> Scales:
    """Return the Scales of the operands of a problem."""
    kind = "block" if has_blocks(problem) else "row"
    return Scales(scale_x, scale_w, kind, torch.bfloat16, problem.layout == layout_of("row", True))


def quantized_operands(
    x: torch.Tensor, weight: torch.Tensor, problem: "Problem"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (x, weight, scale_x, scale_w) of a problem for fp32 operands. A weight is in e4m3, as in training."""
    scaling = "block" if has_blocks(problem) else "row"
    x, scale_x = quantize_ref(x, scaling, problem.torch_dtype)
    weight, scale_w = quantize_ref(weight, scaling, FP8[0], weight=True)
    return x, weight, scale_x, scale_w
