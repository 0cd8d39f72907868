"""Launch the kernel of gemm_ar_rms_norm and gemm_ar_layer_norm, or compile it ahead of time.

For groups on one node, of at least two ranks unless the mode has ``max_ranks``.
"""

from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.invariance import check_leaves, leaves_of_rank
from tdkernels.ops.common import gemm_operands, norm_launch, small_m_gemm
from tdkernels.ops.common.config import with_config
from tdkernels.ops.common.norm_launch import Options, kernel_outputs, with_codes
from tdkernels.ops.dense.gemm_ar_norm.config import registers_hold
from tdkernels.ops.dense.gemm_ar_norm.kernel import gemm_ar_norm_kernel
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime import kernel_launch
from tdkernels.runtime.kernel_launch import Launch, launch_cached
from tdkernels.symm import get_workspace

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.ops.dense.gemm_ar_norm.config import GemmArNormConfig

# x [M, K / W], weight, bias, residual [M, N], norm_weight, norm_bias
Operands = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor | None
]


def problem_fields(operands: Operands, options: Options) -> dict[str, Any]:
    """Return the properties of a call that must be equal on all ranks, before a config is selected."""
    x, weight, bias, residual, norm_weight, norm_bias = operands
    return {
        "M": x.shape[0], "N": weight.shape[0], "K/W": x.shape[1], "dtype": str(x.dtype), "eps": options.eps,
        "quantize": str(options.quantize), "has_bias": bias is not None, "has_residual": residual is not None,
        "norm_weight_dtype": str(norm_weight.dtype), "has_norm_bias": norm_bias is not None,
    }


def arguments(
    ctx: torch.Tensor, operands: Operands, outputs: list[torch.Tensor], scratch: torch.Tensor, plan: int,
    world_size: int, options: Options, config: "GemmArNormConfig",
) -> tuple[tuple, dict[str, Any]]:
    """Return the kernel's arguments and constants; ``outputs`` as from ``kernel_outputs``."""
    x, weight, bias, residual, norm_weight, norm_bias = operands
    y, r, *scale, stats = outputs
    (m, k), n = x.shape, weight.shape[0]
    tiles, split_k = config.tiles, config.split_k
    assert tiles is not None  # the config of a launch is resolved
    held = registers_hold(tiles.num_warps, x.dtype)
    # With a tree, r is read from memory for the norm. In registers, the compiler could distribute the elements of a row
    # among threads differently for fp32 partials of one rank, and so add them in another order.
    in_registers = n <= held and not leaves_of_rank(world_size)
    row_programs = config.row_programs if in_registers else 1
    share = cdiv(cdiv(n, row_programs), 16) * 16  # columns of a program: whole vectors
    weight, stride_w, x_desc, w_desc, constants = small_m_gemm.product(x, weight, bias, tiles)
    constants["PRODUCT"] = constants["PRODUCT"]._replace(
        leaves=leaves_of_rank(world_size), out_bytes=_partial_bytes(x, world_size)
    )
    constants |= norm_launch.constants(x, n, residual, norm_bias, options)
    constants |= {
        "SPLIT": split_k > 1, "RANKS": world_size, "IN_REGISTERS": in_registers, "ROW_PROGRAMS": row_programs,
        "BLOCK": next_power_of_2(n) if in_registers else held,
    }
    args = (
        ctx, x, x_desc, weight, w_desc, bias, residual, norm_weight, norm_bias, y, r, *(scale or (None,)), stats,
        scratch, m, n, k, stride_w, small_m_gemm.k_of_part(k, tiles, split_k), share, options.eps, plan, split_k,
    )
    return args, constants


def _partial_bytes(x, world_size):
    """Return the bytes per element of partials. One rank stores the root of the reduction tree, which is not rounded.
    """
    return 4 if leaves_of_rank(world_size) and world_size == 1 else x.element_size()


def compile(operands: Operands, world_size: int, options: Options, config: "GemmArNormConfig") -> None:
    """Compile the kernel that ``launch`` would launch, into Triton's cache, without launching it."""
    x, weight = operands[:2]
    if x.device.type == "cpu":
        return  # the CPU interprets
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    specs = kernel_outputs(x, (x.shape[0], weight.shape[0]), options)
    outputs = [torch.empty(1, dtype=spec.dtype, device=x.device) for spec in specs]
    scratch = torch.empty(1, dtype=torch.float32, device=x.device)
    args, constants = arguments(ctx, operands, outputs, scratch, 0, world_size, options, config)
    gemm_ar_norm_kernel.warmup(*args, grid=(1,), **constants)


def launch(
    operands: Operands, options: Options, group: "dist.ProcessGroup", config: "GemmArNormConfig"
) -> list[torch.Tensor]:
    """Run the fused kernel on operands that are not empty; return the tensors of ``norm_launch.output_specs``."""
    y, *others, _ = launch_cached(*_launch_call(operands, options, group, config))  # the last is scratch memory
    return [with_codes(y, options), *others]


def bind(
    operands: Operands, options: Options, group: "dist.ProcessGroup", config: "GemmArNormConfig"
) -> Launch | None:
    """Return the Launch of a fused call, which returns codes as uint8; None if the call copies an operand."""
    return kernel_launch.bind_uncopied(operands, *_launch_call(operands, options, group, config))


def _launch_call(operands, options, group, config):
    """Return the arguments of ``launch_cached``."""
    workspace = get_workspace(group, operands[0].device, options.operator)
    key = options, config, gemm_operands.dot_precision(operands[0].dtype)
    return workspace, key, operands, lambda *of: _prepare(workspace, of, options, config), _ready


def _ready(x, weight, bias, *others):
    """Return the operands in layouts that the kernel supports."""
    weight = gemm_operands.weight_layout(weight)[0]
    others = [None if other is None else gemm_operands.rows_contiguous(other) for other in others]
    return gemm_operands.rows_contiguous(x), weight, None if bias is None else bias.contiguous(), *others


def _prepare(workspace, operands, options, config):
    x, weight = operands[:2]
    m, n, tiles, ranks = x.shape[0], weight.shape[0], config.tiles, workspace.world_size
    count, tiles_m = tiles.count(m, n), cdiv(m, tiles.block_m)
    data_bytes = ranks * count * tiles.block_m * tiles.block_n * _partial_bytes(x, ranks)
    fields = with_config(problem_fields(operands, options), config)
    plan = workspace.prepare(options.operator, fields, data_bytes, ranks * tiles_m, num_flags=count + tiles_m)
    # After ``prepare``, which compares K: otherwise peers with another K would wait for the launch.
    check_leaves(options.operator, ranks, weight, tiles.block_k)
    scratch = small_m_gemm.scratch_to_be_made(x, count, tiles, config.split_k)
    outputs = kernel_outputs(x, (m, n), options)
    args, constants = arguments(workspace.ctx, operands, outputs, scratch, plan, ranks, options, config)
    programs = count * config.split_k + min(m * constants["ROW_PROGRAMS"], config.num_programs)
    made = (*outputs, scratch)
    return Launch(workspace, gemm_ar_norm_kernel, (programs,), args, constants, operands, made, [workspace.ctx])
