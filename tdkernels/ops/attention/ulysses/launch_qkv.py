"""Launch the kernel of ulysses_qkv, or compile it ahead of time."""

from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.attention.ulysses.kernel_qkv import ulysses_qkv_kernel
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import with_config
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, bind_uncopied, launch_cached, output_spec
from tdkernels.symm import get_workspace

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.ops.attention.ulysses.config import UlyssesConfig


def problem_fields(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, batch: int) -> dict[str, Any]:
    """Return the properties of a call that must be the same on all ranks. Ranks add the bias to rows for peers."""
    return {
        "B": batch, "S/W": x.shape[0] // batch if batch else 0, "K": x.shape[1], "N": weight.shape[0],
        "dtype": str(x.dtype), "has_bias": bias is not None,
    }


def _arguments(ctx, x, weight, bias, y, batch, world_size, lag, plan, config):
    """Return (arguments of the kernel, its constants)."""
    weight, stride_w, _ = gemm_operands.weight_layout(weight)
    tiles, (rows, k), width = config.tiles, x.shape, weight.shape[0] // world_size
    product = gemm_operands.compiled_for(x, weight, bias, tiles)
    product = product._replace(aligned=gemm_operands.aligned(width, k, stride_w))
    x_desc, w_desc = gemm_operands.product_descriptors(x, weight, product)
    args = (
        ctx, x, x_desc, weight, w_desc, bias, y,
        rows, k, rows // batch, width, stride_w, lag, plan, int(config.transport == "push"), tiles.group_m,
    )
    return args, {"PRODUCT": product, **tiles.options(), "trace_ptr": None}


def compile(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world_size: int, config: "UlyssesConfig"
) -> None:
    """Compile the kernel that ``launch`` would launch for the same operands into Triton's cache."""
    x = gemm_operands.rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    args, constants = _arguments(ctx, x, weight, bias, x.new_empty(1), 1, world_size, 0, 0, config)
    ulysses_qkv_kernel.warmup(*args, grid=(1,), **constants)


def launch(
    operator: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, batch: int,
    group: "dist.ProcessGroup", config: "UlyssesConfig",
) -> torch.Tensor:
    """Launch the kernel on x [B * S / W, K], and return this rank's heads of all positions, [B * S, N / W].

    ``operator`` is the name of the operator in error messages.
    """
    return launch_cached(*_call(operator, x, weight, bias, batch, group, config))[0]


def bind_call(
    operator: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, batch: int,
    group: "dist.ProcessGroup", config: "UlyssesConfig",
) -> Launch | None:
    """Return the Launch of ``launch`` with these operands, or None if one of them must be copied first."""
    return bind_uncopied((x, weight, bias), *_call(operator, x, weight, bias, batch, group, config))


def _call(operator, x, weight, bias, batch, group, config):
    """Return the arguments of ``launch_cached``."""
    workspace = get_workspace(group, x.device, "ulysses_qkv")
    key = operator, batch, config, gemm_operands.dot_precision(x.dtype)
    prepare = lambda *of: _prepare(workspace, operator, *of, batch, config)  # noqa: E731
    return workspace, key, (x, weight, bias), prepare, gemm_operands.ready


def _prepare(workspace, operator, x, weight, bias, batch, config):
    world_size, rows, tiles = workspace.world_size, x.shape[0], config.tiles
    width = weight.shape[0] // world_size
    count = tiles.count(rows, width)  # tiles of one rank's heads
    half_bytes = world_size * count * tiles.block_m * tiles.block_n * x.element_size()
    fields = with_config(problem_fields(x, weight, bias, batch), config)
    plan = workspace.prepare(operator, fields, half_bytes, world_size * count)
    y = output_spec(x, world_size * rows, width)
    resident = gpu.resident_programs(x.device, tiles, x.dtype)
    lag = min(config.lag_tiles or cdiv(3 * resident, 2), world_size * count)
    pieces = lag + 2 * max(world_size * count - lag, (world_size - 1) * count)
    args, constants = _arguments(workspace.ctx, x, weight, bias, y, batch, world_size, lag, plan, config)
    constants["trace_ptr"] = recorder.buffer(x.device, pieces)
    grid, operands = (min(pieces, resident),), (x, weight, bias)
    return Launch(workspace, ulysses_qkv_kernel, grid, args, constants, operands, [y], [workspace.ctx])
