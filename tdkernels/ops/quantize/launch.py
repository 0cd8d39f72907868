"""Launch the kernels that quantize a matrix to fp8."""

from typing import Any

import torch

from tdkernels.ops.common.fp8_codes import format_for
from tdkernels.ops.common.gemm_operands import aligned
from tdkernels.ops.common.scaling import BLOCK
from tdkernels.ops.quantize.kernel import (
    COLUMN,
    GIVEN,
    MATRIX,
    ROW,
    TILE,
    WHOLE_COLUMN,
    largest_kernel,
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
# Of largest_kernel, for the whole matrix and by column: rows and columns of a tile, programs per SM.
_LARGEST = {False: (64, 128, 2), True: (32, 128, 8)}
# Of quantize_tiles_kernel, by AXIS and TRANSPOSE: rows and columns of a tile, warps. Of 2 to 28 that were timed on an
# H200 for each, these are the fastest.
_TILES = {
    (ROW.value, False): (BLOCK // 4, BLOCK, 4),
    (COLUMN.value, True): (BLOCK, BLOCK // 2, 4),
    (TILE.value, False): (BLOCK, BLOCK, 8),
    (TILE.value, True): (BLOCK, BLOCK, 8),
    (GIVEN.value, False): (32, 256, 4),
    (GIVEN.value, True): (64, 64, 8),
    (MATRIX.value, False): (32, 256, 4),
    (MATRIX.value, True): (64, 64, 8),
    (WHOLE_COLUMN.value, True): (32, 128, 4),
}
# Argument AXIS of quantize_tiles_kernel: scaling and weight of quantize_fp8.
_KIND = {
    ROW.value: ("block", False), COLUMN.value: ("block", False), TILE.value: ("block", True),
    MATRIX.value: ("tensor", False), WHOLE_COLUMN.value: ("row", False),
}


def scale_shape(rows: int, k: int, scaling: str, weight: bool = False) -> tuple[int, int]:
    """Return the shape of the scale of [rows, k]."""
    if scaling == "block":
        return (cdiv(rows, BLOCK) if weight else rows, cdiv(k, BLOCK))
    return (rows, 1) if scaling == "row" else (1, 1)


def by_row(x: torch.Tensor, dtype: torch.dtype, transpose: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [rows, K], or x.T if ``transpose``, with a scale per row: return (codes, scale)."""
    if transpose and x.shape[0] > _MOST_OF_COLUMN:
        return _by_largest(x, dtype, WHOLE_COLUMN.value, transpose)
    return _launch(("quantize rows", dtype, transpose), (x,), _prepare_rows, dtype, transpose)


def by_block(
    x: torch.Tensor, dtype: torch.dtype, weight: bool, transpose: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [rows, K], or x.T if ``transpose``, with block-wise scales: return (codes, scale)."""
    axis = TILE.value if weight else COLUMN.value if transpose else ROW.value
    return _by_tiles((x,), dtype, axis, transpose)


def by_tensor(x: torch.Tensor, dtype: torch.dtype, transpose: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [rows, K], or x.T if ``transpose``, with one scale: return (codes, scale)."""
    return _by_largest(x, dtype, MATRIX.value, transpose)


def by_given_scale(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, transpose: bool) -> torch.Tensor:
    """Return the codes of x [rows, K], or of x.T if ``transpose``, for a given scale of one element."""
    return _by_tiles((x, scale), dtype, GIVEN.value, transpose)[0]


def largest_magnitude(x: torch.Tensor, by_column: bool = False) -> torch.Tensor:
    """Return the largest magnitude of x [rows, K], or of each column, in fp32; NaN if there is one."""
    return _largest_bits(x, by_column).view(torch.float32)


def _by_largest(x, dtype, axis, transpose):
    (x,) = _ready(x)
    return _by_tiles((x, _largest_bits(x, axis == WHOLE_COLUMN.value)), dtype, axis, transpose)


def _largest_bits(x, by_column):
    workspace = local_workspace_of(x.device)
    key = "largest magnitude", by_column
    return launch_cached(workspace, key, (x,), lambda of: _prepare_largest(workspace, of, by_column), _ready)[0]


def _by_tiles(operands, dtype, axis, transpose):
    return _launch(("quantize tiles", dtype, axis, transpose), operands, _prepare_tiles, dtype, axis, transpose)


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


def _warps(block_r, block_c):
    return min(max(block_r * block_c // _PER_WARP, 4), 16)


def _constants(x, dtype, transpose, block_r, block_c, warps):
    """Return the arguments of all kernels that quantize."""
    sizes = (x.shape[1], x.stride(0), x.shape[0]) if transpose else (x.shape[1], x.stride(0))
    form = format_for(dtype, gpu.converts_to_e4m3(x.device))
    blocks = {"BLOCK_R": block_r, "BLOCK_C": block_c, "num_warps": warps}
    return {"FORMAT": form, "ALIGNED": aligned(*sizes), **blocks}


def _codes_of(x, transpose):
    rows, columns = x.shape
    return output_spec(x, *((columns, rows) if transpose else (rows, columns)), dtype=torch.uint8)


def _prepare_rows(workspace, operands, dtype, transpose):
    (x,) = operands
    rows, columns = x.shape
    codes = _codes_of(x, transpose)
    scale = output_spec(x, codes.shape[0], 1, dtype=torch.float32)
    if transpose:
        block_r, block_c = next_power_of_2(rows), _COLUMNS
        kernel, grid, options = quantize_columns_kernel, cdiv(columns, block_c), {}
    else:
        one_pass = columns <= _MOST_OF_ROW
        block_c = next_power_of_2(columns) if one_pass else _ELEMENTS
        block_r = max(_ELEMENTS // 2 // block_c, 1)
        kernel, grid, options = quantize_rows_kernel, cdiv(rows, block_r), {"ONE_PASS": one_pass}
    constants = {**_constants(x, dtype, transpose, block_r, block_c, _warps(block_r, block_c)), **options}
    args = x, codes, scale, rows, columns, x.stride(0)
    return Launch(workspace, kernel, (grid,), args, constants, operands, [codes, scale], [])


def _prepare_largest(workspace, x, by_column):
    rows, columns = x.shape
    block_r, block_c, programs = _LARGEST[by_column]
    tiles_r, tiles_c = cdiv(rows, block_r), cdiv(columns, block_c)
    parts = min(cdiv(programs * gpu.num_sms(x.device), tiles_c), tiles_r)
    constants = {"ALIGNED": aligned(columns, x.stride(0)), "BY_COLUMN": by_column}
    constants |= {"BLOCK_R": block_r, "BLOCK_C": block_c, "num_warps": _warps(block_r, block_c)}
    largest = output_spec(x, columns if by_column else 1, dtype=torch.int32, zeros=True)
    args = x, largest, rows, columns, x.stride(0), parts
    return Launch(workspace, largest_kernel, (parts * tiles_c,), args, constants, (x,), [largest], [])


def _prepare_tiles(workspace, operands, dtype, axis, transpose):
    x, *known = operands
    rows, columns = x.shape
    codes = _codes_of(x, transpose)
    outputs = [codes]
    if axis != GIVEN.value:
        outputs.append(output_spec(x, *scale_shape(*codes.shape, *_KIND[axis]), dtype=torch.float32))
    block_r, block_c, warps = _TILES[axis, transpose]
    constants = {**_constants(x, dtype, transpose, block_r, block_c, warps), "AXIS": axis, "TRANSPOSE": transpose}
    args = x, codes, (outputs[1:] or [None])[0], (known or [None])[0], rows, columns, x.stride(0)
    grid = (cdiv(rows, block_r) * cdiv(columns, block_c),)
    return Launch(workspace, quantize_tiles_kernel, grid, args, constants, operands, outputs, [])
