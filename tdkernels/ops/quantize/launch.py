"""Launch the kernels that quantize a matrix to fp8."""

from typing import Any

import torch

from tdkernels.ops.common.fp8_codes import format_for
from tdkernels.ops.common.gemm_operands import aligned
from tdkernels.ops.common.scaling import BLOCK
from tdkernels.ops.quantize.kernel import (
    ALL_TENSOR,
    COLUMN,
    ROW,
    TILE,
    quantize_columns_kernel,
    quantize_rows_kernel,
    quantize_tiles_kernel,
)
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime import gpu
from tdkernels.runtime.kernel_launch import Launch, launch_cached, local_workspace_of, output_spec

_MOST_OF_ROW = 16384  # elements of a row that a program holds in registers, 32 per thread
_ELEMENTS = 8192  # that a program holds if rows are shorter, or longer
_COLUMNS = 32  # of a program that quantizes whole columns: rows are then read in pieces of 64 bytes
_MOST_OF_COLUMN = 256
_PER_WARP = 1024  # elements


def by_row(x: torch.Tensor, dtype: torch.dtype, transpose: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [rows, K], or x.T if ``transpose``, with a scale per row: return (codes, scale)."""
    return _launch(("quantize rows", dtype, transpose), (x,), _prepare_rows, dtype, transpose)


def by_block(
    x: torch.Tensor, dtype: torch.dtype, weight: bool, transpose: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [rows, K], or x.T if ``transpose``, with block-wise scales: return (codes, scale)."""
    axis = TILE.value if weight else COLUMN.value if transpose else ROW.value
    key = "quantize blocks", dtype, weight, transpose
    return _launch(key, (x,), _prepare_tiles, dtype, axis, transpose)


def by_tensor(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, transpose: bool) -> torch.Tensor:
    """Return the codes of x [rows, K], or of x.T if ``transpose``, for a given scale of one element."""
    key = "quantize by a given scale", dtype, transpose
    return _launch(key, (x, scale), _prepare_tiles, dtype, ALL_TENSOR.value, transpose)[0]


def _launch(key, operands, prepare, dtype, *options) -> Any:
    """Launch the kernel that ``prepare`` selects; return the codes in ``dtype``, and the computed scales if any."""
    workspace = local_workspace_of(operands[0].device)
    codes, *scales = launch_cached(
        workspace, key, operands, lambda *of: prepare(workspace, of, dtype, *options), _ready
    )
    return codes.view(dtype), *scales


def _ready(x, *scale):
    """Return the operands, x with contiguous rows."""
    return x if x.stride(1) == 1 else x.contiguous(), *scale


def _constants(x, dtype, transpose, block_r, block_c):
    """Return the arguments that all kernels have."""
    sizes = (x.shape[1], x.stride(0), x.shape[0]) if transpose else (x.shape[1], x.stride(0))
    form = format_for(dtype, gpu.converts_to_e4m3(x.device))
    warps = min(max(block_r * block_c // _PER_WARP, 4), 16)
    return {"FORMAT": form, "ALIGNED": aligned(*sizes), "BLOCK_R": block_r, "BLOCK_C": block_c, "num_warps": warps}


def _codes_of(x, transpose):
    rows, columns = x.shape
    return output_spec(x, *((columns, rows) if transpose else (rows, columns)), dtype=torch.uint8)


def _prepare_rows(workspace, operands, dtype, transpose):
    (x,) = operands
    rows, columns = x.shape
    codes = _codes_of(x, transpose)
    scale = output_spec(x, codes.shape[0], 1, dtype=torch.float32)
    if transpose:
        one_pass = rows <= _MOST_OF_COLUMN
        block_r, block_c = min(next_power_of_2(rows), _MOST_OF_COLUMN), _COLUMNS
        kernel, grid = quantize_columns_kernel, cdiv(columns, block_c)
    else:
        one_pass = columns <= _MOST_OF_ROW
        block_c = next_power_of_2(columns) if one_pass else _ELEMENTS
        block_r = max(_ELEMENTS // 2 // block_c, 1)
        kernel, grid = quantize_rows_kernel, cdiv(rows, block_r)
    constants = {**_constants(x, dtype, transpose, block_r, block_c), "ONE_PASS": one_pass}
    args = x, codes, scale, rows, columns, x.stride(0)
    return Launch(workspace, kernel, (grid,), args, constants, operands, [codes, scale], [])


def _prepare_tiles(workspace, operands, dtype, axis, transpose):
    x, *given = operands
    rows, columns = x.shape
    codes = _codes_of(x, transpose)
    block_r = BLOCK if axis in (COLUMN.value, TILE.value) else BLOCK // 2
    block_c = BLOCK if axis != COLUMN.value else BLOCK // 2
    outputs = [codes]
    if axis != ALL_TENSOR.value:
        height = cdiv(codes.shape[0], BLOCK) if axis == TILE.value else codes.shape[0]
        outputs.append(output_spec(x, height, cdiv(codes.shape[1], BLOCK), dtype=torch.float32))
    constants = {**_constants(x, dtype, transpose, block_r, block_c), "AXIS": axis, "TRANSPOSE": transpose}
    args = x, codes, (given or outputs[1:])[0], rows, columns, x.stride(0)
    grid = (cdiv(rows, block_r) * cdiv(columns, block_c),)
    return Launch(workspace, quantize_tiles_kernel, grid, args, constants, operands, outputs, [])
