"""Launch the kernel that converts fp8 rows back to floating point."""

import torch

from tdkernels.ops.common.fp8_groups import GROUP
from tdkernels.ops.common.gemm_operands import aligned
from tdkernels.ops.quantize.kernel_dequantize import dequantize_rows_kernel
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu
from tdkernels.runtime.kernel_launch import Launch, launch_cached, local_workspace_of, output_spec

_ROWS = 64  # of a program: a thread converts 32 elements


def rows_by_block(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return codes [R, K] in e4m3 times their scales [R, ceil(K / 128)], in ``dtype``."""
    operands = codes.contiguous().view(torch.uint8), scale.contiguous()
    workspace = local_workspace_of(codes.device)
    key = "dequantize rows", dtype
    return launch_cached(workspace, key, operands, lambda *of: _prepare(workspace, of, dtype))[0]


def _prepare(workspace, operands, dtype):
    codes, scale = operands
    rows, columns = codes.shape
    y = output_spec(codes, rows, columns, dtype=dtype)
    constants = {"CONVERTS": gpu.converts_to_e4m3(codes.device), "ALIGNED": aligned(columns), "BLOCK_R": _ROWS}
    grid = (cdiv(rows, _ROWS) * cdiv(columns, GROUP.value),)
    args = codes, scale, y, rows, columns
    return Launch(workspace, dequantize_rows_kernel, grid, args, {**constants, "num_warps": 8}, operands, [y], [])
