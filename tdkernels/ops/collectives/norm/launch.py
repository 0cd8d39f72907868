"""Launch the kernels of all_reduce_rms_norm and all_reduce_layer_norm, or compile them ahead of time.

For groups on one node, of at least two ranks unless the batch-invariant mode has ``max_ranks``.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from tdkernels.autotune.invariance import invariant_ranks
from tdkernels.ops.collectives.norm import kernel as kernels
from tdkernels.ops.collectives.norm.config import PER_WARP
from tdkernels.ops.common import norm_launch
from tdkernels.ops.common.config import with_config
from tdkernels.ops.common.gemm_operands import rows_contiguous
from tdkernels.ops.common.norm_launch import Options, kernel_outputs, with_codes
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime import kernel_launch
from tdkernels.runtime.kernel_launch import Launch, launch_cached
from tdkernels.symm import get_workspace

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.ops.collectives.norm.config import AllReduceNormConfig

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
Operands = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]  # x, residual, weight, bias


def problem_fields(operands: Operands, options: Options) -> dict[str, Any]:
    """Return the properties of a call that must be equal on all ranks, before a config is selected."""
    x, residual, weight, bias = operands
    return {
        "shape": tuple(x.shape), "dtype": str(x.dtype), "eps": options.eps, "quantize": str(options.quantize),
        "has_residual": residual is not None, "weight_dtype": str(weight.dtype), "has_bias": bias is not None,
    }


def row_programs(hidden: int, config: "AllReduceNormConfig") -> tuple[bool, int]:
    """Return (whether a row stays in registers, number of programs that share a row)."""
    in_registers = hidden <= PER_WARP * config.num_warps
    return in_registers, config.row_programs if in_registers and config.exchange == "one_shot" else 1


def sizes(
    rows: int, hidden: int, itemsize: int, world_size: int, config: "AllReduceNormConfig"
) -> tuple[int, int, int]:
    """Return (work units of a kind of programs, bytes of a half, signals of a half) for x [rows, hidden]."""
    row_bytes = cdiv(hidden * itemsize, 16) * 16
    if config.exchange == "two_shot":
        rounds = cdiv(rows, config.piece_rows * world_size)
        return rounds, 2 * rounds * world_size * config.piece_rows * row_bytes, 2 * rounds * world_size
    pieces = cdiv(hidden, config.send_columns)
    units = rows * max(row_programs(hidden, config)[1], pieces)
    return units, world_size * rows * row_bytes, world_size * rows * pieces


def arguments(
    ctx: torch.Tensor, operands: Operands, outputs: list[torch.Tensor], plan: int, world_size: int, options: Options,
    config: "AllReduceNormConfig",
) -> tuple[Any, tuple, dict[str, Any]]:
    """Return the kernel, its arguments and its constants; ``outputs`` as from ``kernel_outputs``."""
    x, residual, weight, bias = operands
    y, r, *scale, stats = outputs
    hidden = x.shape[-1]
    rows = x.numel() // hidden
    in_registers, programs_of_row = row_programs(hidden, config)
    constants = {
        **norm_launch.constants(x, hidden, residual, bias, options),
        "DTYPE": _TYPES[x.dtype], "ITEM_BYTES": x.element_size(), "RANKS": world_size,
        "IN_REGISTERS": in_registers, "num_warps": config.num_warps,
        "BLOCK": next_power_of_2(hidden) if in_registers else PER_WARP * config.num_warps,
    }
    constants["NORM"] = constants["NORM"]._replace(tree=invariant_ranks() > 0)
    args = (ctx, x, residual, weight, bias, y, r, *(scale or (None,)), stats, rows, hidden)
    if config.exchange == "two_shot":
        return kernels.all_reduce_norm_two_shot_kernel, (*args, config.piece_rows, options.eps, plan), constants
    share = cdiv(cdiv(hidden, programs_of_row), 16) * 16  # columns of a program: whole vectors
    constants |= {"ROW_PROGRAMS": programs_of_row, "SEND_COLUMNS": config.send_columns}
    return kernels.all_reduce_norm_one_shot_kernel, (*args, share, options.eps, plan), constants


def compile(operands: Operands, world_size: int, options: Options, config: "AllReduceNormConfig") -> None:
    """Compile the kernel that ``launch`` would launch, into Triton's cache, without launching it."""
    if operands[0].device.type == "cpu":
        return  # the CPU interprets
    x = operands[0]
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    outputs = [torch.empty(1, dtype=spec.dtype, device=x.device) for spec in kernel_outputs(x, x.shape, options)]
    kernel, args, constants = arguments(ctx, operands, outputs, 0, world_size, options, config)
    kernel.warmup(*args, grid=(1,), **constants)


def launch(
    operands: Operands, options: Options, group: "dist.ProcessGroup", config: "AllReduceNormConfig"
) -> list[torch.Tensor]:
    """Run the fused kernel on an x that is not empty; return y, r, with fp8 the scales, and the statistics."""
    y, *others = launch_cached(*_launch_call(operands, options, group, config))
    return [with_codes(y, options), *others]


def bind(
    operands: Operands, options: Options, group: "dist.ProcessGroup", config: "AllReduceNormConfig"
) -> Launch | None:
    """Return the Launch of a fused call, which returns codes as uint8; None if the call copies an operand."""
    return kernel_launch.bind_uncopied(operands, *_launch_call(operands, options, group, config))


def _launch_call(operands, options, group, config):
    """Return the arguments of ``launch_cached``."""
    workspace = get_workspace(group, operands[0].device, options.operator)
    key = options, config
    return workspace, key, operands, lambda *of: _prepare(workspace, of, options, config), _ready


def _ready(*operands):
    """Return the operands, contiguous and aligned."""
    return [None if operand is None else rows_contiguous(operand) for operand in operands]


def _prepare(workspace, operands, options, config):
    x, world_size = operands[0], workspace.world_size
    units, half_bytes, half_signals = sizes(
        x.numel() // x.shape[-1], x.shape[-1], x.element_size(), world_size, config
    )
    fields = with_config(problem_fields(operands, options), config)
    plan = workspace.prepare(options.operator, fields, half_bytes, half_signals)
    outputs = kernel_outputs(x, x.shape, options)
    kernel, args, constants = arguments(workspace.ctx, operands, outputs, plan, world_size, options, config)
    programs = min(units, config.num_programs)
    grid = (programs if config.exchange == "two_shot" else 2 * programs,)  # "one_shot": half of the programs send
    return Launch(workspace, kernel, grid, args, constants, operands, outputs, [workspace.ctx])
