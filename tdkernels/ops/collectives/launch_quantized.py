"""Launch the kernel of the quantized all_reduce. For groups of at least two ranks on one node."""

from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.collectives import launch as launcher
from tdkernels.ops.collectives.kernel_quantized import all_reduce_quantized_kernel
from tdkernels.ops.common.config import with_config
from tdkernels.ops.common.fp8_groups import GROUP
from tdkernels.ops.common.gemm_operands import rows_contiguous
from tdkernels.rounding import cdiv
from tdkernels.runtime import kernel_launch
from tdkernels.runtime.gpu import converts_to_e4m3
from tdkernels.runtime.kernel_launch import Launch, launch_cached, output_spec
from tdkernels.symm import get_workspace

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.ops.collectives.config import CollectiveConfig

MIN_BLOCK = 4 * GROUP.value  # elements: the scales of a block are then a multiple of 16 bytes


def problem_fields(x: torch.Tensor, quantize: str) -> dict[str, Any]:
    """Return the properties of a call that must be equal on all ranks, without the config."""
    return {**launcher.problem_fields(x), "quantize": quantize}


def arguments(
    ctx: torch.Tensor, x: torch.Tensor, output: torch.Tensor, nbytes: int, plan: int, config: "CollectiveConfig"
) -> tuple[tuple, dict[str, Any]]:
    """Return the kernel's arguments and constants for an x of ``nbytes``."""
    args, constants = launcher.arguments("all_reduce", ctx, x, output, nbytes, plan, config)
    return args, {**constants, "CONVERTS": converts_to_e4m3(x.device)}


def sizes(n: int, itemsize: int, world_size: int, config: "CollectiveConfig") -> tuple[int, int, int]:
    """Return (rounds, bytes of a half, signals of a half) for ``n`` elements of ``itemsize`` bytes."""
    block = config.block_bytes // itemsize
    rounds = cdiv(n, block * config.piece_blocks * world_size)
    piece_bytes = config.piece_blocks * (block + 4 * block // GROUP.value)
    return rounds, 2 * rounds * world_size * piece_bytes, 2 * rounds * world_size


def launch(x: torch.Tensor, quantize: str, group: "dist.ProcessGroup", config: "CollectiveConfig") -> torch.Tensor:
    """Run the quantized all_reduce on an x that is not empty; return the output."""
    (output,) = launch_cached(*_launch_call(rows_contiguous(x), quantize, group, config))
    return output


def bind(
    x: torch.Tensor, quantize: str, group: "dist.ProcessGroup", config: "CollectiveConfig"
) -> Launch | None:
    """Return the Launch of a call; None if the call copies x."""
    given = rows_contiguous(x)
    return kernel_launch.bind(*_launch_call(given, quantize, group, config))[0] if given is x else None


def _launch_call(x, quantize, group, config):
    """Return the arguments of ``launch_cached``."""
    workspace = get_workspace(group, x.device, "all_reduce")
    key = "quantized", quantize, config, x.shape, x.dtype
    return workspace, key, (x,), lambda x: _prepare(workspace, x, quantize, config)


def _prepare(workspace, x, quantize, config):
    rounds, half_bytes, half_signals = sizes(x.numel(), x.element_size(), workspace.world_size, config)
    fields = with_config(problem_fields(x, quantize), config)
    plan = workspace.prepare("all_reduce", fields, half_bytes, half_signals)
    output = output_spec(x, *x.shape)
    args, constants = arguments(workspace.ctx, x, output, x.nbytes, plan, config)
    grid = (min(rounds, config.num_programs),)
    return Launch(
        workspace, all_reduce_quantized_kernel, grid, args, constants, (x,), (output,), [workspace.ctx]
    )
