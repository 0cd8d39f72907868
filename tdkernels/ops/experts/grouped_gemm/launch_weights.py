"""Launch the kernels of the weight gradient of group_gemm, or compile them ahead of time."""

from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels.lang.tested_versions import triton_is_tested
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.specialized import launch as specialized
from tdkernels.ops.common.specialized.launch import suits
from tdkernels.ops.common.tile_config import LARGE, SPECIALIZED_TILE, STEP_BYTES, Tiles, default_tiles
from tdkernels.ops.experts.grouped_gemm.config import GroupGemmConfig, with_tiles_of
from tdkernels.ops.experts.grouped_gemm.kernel import group_gemm_weights_kernel
from tdkernels.ops.experts.grouped_gemm.launch_specialized import experts_of_warp, has_registers, work_counter
from tdkernels.rounding import next_power_of_2, rounded_rows
from tdkernels.runtime import gpu
from tdkernels.runtime.gluon import descriptor, optional_kernel
from tdkernels.runtime.kernel_launch import Launch, launch_cached, local_workspace_of, output_spec, rows_signature
from tdkernels.runtime.triton_launcher import Rows

# The last rows of a group are masked in blocks of _LAST_R rows, the minimum of the tensor cores. A group with at least
# _LONG_GROUP rows gets larger tiles.
_LAST_R = 16
_LONG_GROUP = 4096
_STEP = STEP_BYTES // 2  # rows of a step of the warp-specialized kernel


def default_config(
    rows: int, n: int, k: int, experts: int, dtype: torch.dtype, device: torch.device
) -> GroupGemmConfig:
    """Return the heuristic config of a weight gradient [experts, n, k] for ``rows`` rows in all."""
    has_waves = device.type == "cuda" and experts * LARGE.count(n, k) > gpu.num_sms(device)
    if has_waves and suits(LARGE, n, k, dtype, device):
        return GroupGemmConfig(tiles=LARGE, warp_specialize=True)
    return GroupGemmConfig(tiles=_portable_tiles(rows // experts, n, k, dtype, device))


def _portable_tiles(rows, n, k, dtype, device):
    """Return the default tile of the portable kernel for groups of ``rows`` rows.

    Most groups are short. Their tile is small enough for three programs per multiprocessor, so that the others compute
    while one starts or stores. Long groups get a larger tile, which loads less data.
    """
    if not gpu.has_tma(device) or dtype.itemsize != 2:
        return default_tiles(n, k, dtype, device)
    if rows >= _LONG_GROUP:
        return Tiles(128, 256, 64, num_warps=8, num_stages=4)
    return Tiles(128, 128, 32, num_warps=4, num_stages=3)


def weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, splits: torch.Tensor, experts: int, config: GroupGemmConfig | None = None,
) -> torch.Tensor:
    """Launch the weight gradient and return dw [E, N, K] for dy [R, N] and x [R, K].

    In the tiles of the config block_m and block_n are along N and K, and block_k is along the rows.
    """
    dy, x = gemm_operands.rows_contiguous(dy), gemm_operands.rows_contiguous(x)
    if not x.shape[0]:
        return x.new_zeros(experts, dy.shape[1], x.shape[1])
    workspace = local_workspace_of(x.device)
    return launch_cached(
        workspace, ("group_gemm weights", experts, config, gemm_operands.dot_precision(x.dtype)), (dy, x, splits),
        lambda *of: _prepare(workspace, *of, experts, config),  # type: ignore[call-arg]
        signature=rows_signature(0, 1),
    )[0]


def compile(
    dy: torch.Tensor, x: torch.Tensor, splits: torch.Tensor, experts: int, config: GroupGemmConfig | None,
) -> None:
    """Compile the kernel that ``weight_gradient`` would launch for the same operands into Triton's cache."""
    if x.device.type == "cpu":
        return  # interpreted
    dy, x = gemm_operands.rows_contiguous(dy), gemm_operands.rows_contiguous(x)
    dw, config = x.new_empty(experts, dy.shape[1], x.shape[1]), _config_for(dy, x, experts, config)
    tiles: Any = config.tiles
    if specializes(dy, x, experts, config):
        counter = splits.new_empty(1, dtype=torch.int32)
        args, constants = specialized_arguments(dy, x, x.shape[0], splits, counter, dw, tiles.group_m)
        specialized_kernel().warmup(*args, grid=(1,), **constants)
        return
    args, constants = _arguments(dy, x, x.shape[0], splits, dw, tiles)
    group_gemm_weights_kernel.warmup(*args, grid=(1,), **constants)


def completed(
    config: GroupGemmConfig | None, rows: int, n: int, k: int, experts: int, dtype: torch.dtype, device: torch.device
) -> GroupGemmConfig:
    """Return the config with tiles, or ``default_config`` if it is None."""
    default = default_config(rows, n, k, experts, dtype, device)
    return with_tiles_of(default, config, _portable_tiles(rows // experts, n, k, dtype, device))


def _config_for(dy, x, experts, config):
    """Return the config with tiles, for the rounded number of rows."""
    return completed(config, rounded_rows(x.shape[0]), dy.shape[1], x.shape[1], experts, x.dtype, x.device)


def _prepare(workspace, dy, x, splits, experts, config):
    n, k = dy.shape[1], x.shape[1]
    dw, config = output_spec(x, experts, n, k), _config_for(dy, x, experts, config)
    operands, tiles, rows = (dy, x, splits), config.tiles, Rows(x.shape[0])
    if specializes(dy, x, experts, config):
        counter = work_counter(x.device)
        args, constants = specialized_arguments(dy, x, rows, splits, counter, dw, tiles.group_m)
        grid = (min(experts * tiles.count(n, k), gpu.available_sms(x.device)),)
        return Launch(workspace, specialized_kernel(), grid, args, constants, operands, [dw], [counter])
    args, constants = _arguments(dy, x, rows, splits, dw, tiles)
    grid = (experts * tiles.count(n, k),)
    return Launch(workspace, group_gemm_weights_kernel, grid, args, constants, operands, [dw], [])


def _arguments(dy, x, rows, splits, dw, tiles):
    experts, n, k = dw.shape
    use_tma = gpu.has_tma(x.device) and x.element_size() == 2 and n % 8 == 0 and k % 8 == 0
    of_dy = of_x = (None, None)
    dw_desc = None
    if use_tma:
        of_dy, of_x = (_row_blocks(of, rows, tiles, block) for of, block in ((dy, tiles.block_m), (x, tiles.block_n)))
        dw_desc = TensorDescriptor(dw, [experts, n, k], [n * k, k, 1], [1, tiles.block_m, tiles.block_n])
    args = dy, *of_dy, x, *of_x, splits, dw, dw_desc, experts, rows, n, k, tiles.group_m
    constants = {
        "EXPERTS": next_power_of_2(experts), **tiles.constants(), "LAST_R": _LAST_R,
        "ALIGNED": gemm_operands.aligned(n, k), "USE_TMA": use_tma, "PRECISION": gemm_operands.dot_precision(x.dtype),
        **tiles.options(),
    }
    return args, constants


def _row_blocks(of, rows, tiles, columns):
    """Return descriptors of [R, width] for the main loop of a gradient, and for the last rows of a group."""
    width = of.shape[1]
    return [TensorDescriptor(of, [rows, width], [width, 1], [block, columns]) for block in (tiles.block_k, _LAST_R)]


# ---- warp-specialized kernel ----


@optional_kernel("group_gemm: the warp-specialized kernel of the weight gradient")
def specialized_kernel() -> Any:
    from tdkernels.ops.experts.grouped_gemm.specialized.kernel_weights import group_gemm_weights_specialized_kernel

    return group_gemm_weights_specialized_kernel


def specializes(dy: torch.Tensor, x: torch.Tensor, experts: int, config: GroupGemmConfig) -> bool:
    """Return whether the warp-specialized kernel computes the gradient for dy [R, N] and x [R, K]."""
    if not specialized.is_enabled(config) or config.tiles.block_k != _STEP:  # type: ignore[union-attr]
        return False
    if gpu.capability(x.device) != (9, 0) or x.itemsize != 2 or dy.shape[1] % 8 or x.shape[1] % 8:
        return False
    return has_registers(experts, None) and triton_is_tested() and specialized_kernel() is not None


def specialized_arguments(
    dy: torch.Tensor, x: torch.Tensor, rows: int, splits: torch.Tensor, counter: torch.Tensor, dw: torch.Tensor,
    group_m: int,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (arguments, constants) of the warp-specialized kernel.

    ``rows`` is the number of rows of dy and x, which may be a ``Rows``. ``counter`` is from ``work_counter``.
    """
    experts, n, k = dw.shape
    block_m, block_n = SPECIALIZED_TILE
    dy_desc = descriptor(dy, [1, rows, n], [rows * n, n, 1], [1, _STEP, block_m // 2])
    x_desc = descriptor(x, [rows, k], [k, 1], [_STEP, block_n // 2])
    dw_desc = descriptor(dw, [experts, n, k], [n * k, k, 1], [1, block_m // 2, block_n // 2])
    args = dy_desc, x_desc, splits, counter, dw_desc, experts, rows, n, k, group_m
    return args, {"EXPERTS": experts_of_warp(experts), "num_warps": 4}
