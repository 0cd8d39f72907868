"""Launch the kernels of all_gather, reduce_scatter and all_reduce, or compile them ahead of time.

For groups of at least two ranks.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from tdkernels.autotune.invariance import invariant_ranks
from tdkernels.ops.collectives import kernel as kernels
from tdkernels.ops.collectives.async_all_gather import AsyncAllGather
from tdkernels.ops.common.config import with_config
from tdkernels.ops.common.gemm_operands import rows_contiguous
from tdkernels.rounding import cdiv
from tdkernels.runtime import kernel_launch
from tdkernels.runtime.kernel_launch import Launch, launch_cached, output_spec
from tdkernels.symm import get_workspace

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.ops.collectives.config import CollectiveConfig

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}


def output_shape(operator: str, shape: torch.Size, world_size: int) -> tuple[int, ...]:
    """Return the shape of the output for the shape of x."""
    if operator == "all_reduce":
        return tuple(shape)
    rows = shape[0] * world_size if operator == "all_gather" else shape[0] // world_size
    return (rows, *shape[1:])


def problem_fields(x: torch.Tensor) -> dict[str, Any]:
    """Return the properties of a call that must be equal on all ranks, before a config is selected."""
    return {"shape": tuple(x.shape), "dtype": str(x.dtype)}


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as a one-dimensional view of bytes."""
    return x.view(-1).view(torch.uint8)


def _item(operator, dtype, nbytes):
    """Return the element type for ``nbytes`` as (Triton type, bytes): ``dtype`` if the kernel sums, else integers."""
    if operator != "all_gather":
        return _TYPES[dtype], dtype.itemsize
    size = next(size for size in _WORDS if nbytes % size == 0)
    return _WORDS[size], size


def _kernel(operator, config):
    if operator == "all_reduce":
        one_shot = config.exchange == "one_shot"
        return kernels.all_reduce_one_shot_kernel if one_shot else kernels.all_reduce_two_shot_kernel
    return kernels.all_gather_kernel if operator == "all_gather" else kernels.reduce_scatter_kernel


def share_bytes(operator: str, x: torch.Tensor, world_size: int) -> int:
    """Return the bytes of the kernel's operand x [n]: a shard, the part of one rank, or the whole tensor."""
    return x.nbytes // world_size if operator == "reduce_scatter" else x.nbytes


def _kernel_operand(x):
    """Return x, or its bytes if Triton does not support its dtype. Kernels only use the address."""
    return x if x.dtype in _TYPES or x.dtype == torch.int32 else as_bytes(x)


def arguments(
    operator: str, ctx: torch.Tensor, x: torch.Tensor, output: torch.Tensor, nbytes: int, plan: int,
    config: "CollectiveConfig", world_size: int = 0,
) -> tuple[tuple, dict[str, Any]]:
    """Return the kernel's arguments and constants; ``nbytes`` from ``share_bytes``.

    ``world_size``: only used by operators that add, in the batch-invariant mode with ``max_ranks``.
    """
    dtype, size = _item(operator, x.dtype, nbytes)
    constants = {
        "DTYPE": dtype, "ITEM_BYTES": size, "ALIGNED": nbytes % 16 == 0, "BLOCK": config.block_bytes // size,
        "num_warps": config.num_warps,
    }
    if operator != "all_gather" and invariant_ranks():
        constants["TREE"] = world_size
    return (ctx, x, output, nbytes // size, config.piece_blocks, plan), constants


def sizes(operator: str, nbytes: int, world_size: int, config: "CollectiveConfig") -> tuple[int, int, int]:
    """Return (work units, bytes of a half, signals of a half). A unit is a chunk, or a round of chunks ("two_shot")."""
    piece = config.block_bytes * config.piece_blocks
    if operator == "all_reduce" and config.exchange == "two_shot":
        rounds = cdiv(nbytes, piece * world_size)
        return rounds, 2 * rounds * world_size * piece, 2 * rounds * world_size
    pieces = cdiv(nbytes, piece)
    return pieces, world_size * pieces * piece, world_size * pieces


def compile(operator: str, x: torch.Tensor, world_size: int, config: "CollectiveConfig") -> None:
    """Compile the kernel that ``launch`` would launch for x, into Triton's cache, without launching it."""
    if x.device.type == "cpu" or config.exchange == "copy_engine":
        return  # the CPU interprets; the copy engine needs no kernel that depends on the config
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    given = _kernel_operand(rows_contiguous(x))
    args, constants = arguments(operator, ctx, given, given, share_bytes(operator, x, world_size), 0, config)
    _kernel(operator, config).warmup(*args, grid=(1,), **constants)


def launch(operator: str, x: torch.Tensor, group: "dist.ProcessGroup", config: "CollectiveConfig") -> torch.Tensor:
    """Run an operator with method "fused" on an x that is not empty; return the output."""
    x = rows_contiguous(x)
    if config.exchange == "copy_engine":
        return _copy_engine_all_gather(operator, x, group, config)
    given = _kernel_operand(x)
    (output,) = launch_cached(*_launch_call(operator, x, given, group, config))
    if given is x:
        return output
    return output.view(x.dtype).view(output_shape(operator, x.shape, group.size()))


def bind(operator: str, x: torch.Tensor, group: "dist.ProcessGroup", config: "CollectiveConfig") -> Launch | None:
    """Return the Launch of a fused call; None if the call copies x, views it as bytes, or uses the copy engine."""
    given = _kernel_operand(rows_contiguous(x))
    if given is not x or config.exchange == "copy_engine":
        return None
    return kernel_launch.bind(*_launch_call(operator, x, given, group, config))[0]


def _launch_call(operator, x, given, group, config):
    """Return the arguments of ``launch_cached``."""
    workspace = get_workspace(group, x.device, operator)
    key = config, x.shape, x.dtype
    return workspace, key, (given,), lambda given: _prepare(operator, workspace, given, x, config)


def _prepare(operator, workspace, given, x, config):
    """Return the Launch for an x; ``given`` is x or its bytes."""
    world_size = workspace.world_size
    nbytes = share_bytes(operator, x, world_size)
    units, half_bytes, half_signals = sizes(operator, nbytes, world_size, config)
    plan = workspace.prepare(operator, with_config(problem_fields(x), config), half_bytes, half_signals)
    output = output_spec(given, *output_shape(operator, given.shape, world_size))
    args, constants = arguments(operator, workspace.ctx, given, output, nbytes, plan, config, world_size)
    grid = (min(units, config.num_programs),)
    kernel = _kernel(operator, config)
    return Launch(workspace, kernel, grid, args, constants, (given,), (output,), [workspace.ctx])


def _copy_engine_all_gather(operator, x, group, config):
    """All-gather by copies of whole shards. Each shard is copied to the output while later shards arrive."""
    shard = as_bytes(x)
    lines = shard.view(-1, 16 if x.nbytes % 16 == 0 else 1)
    gather = AsyncAllGather(operator, with_config(problem_fields(x), config), lines, group, lines.shape[0], copies=True)
    world_size, rank = gather.world_size, gather.workspace.rank
    output = x.new_empty(output_shape(operator, x.shape, world_size))
    slots = as_bytes(output).view(world_size, -1)
    with gather:
        gather.copy(own=False)
        slots[rank].copy_(shard)
        for step in range(1, world_size):
            gather.wait(step)
            source = gather.source(step)
            slots[source].copy_(gather.gathered[source].view(-1))
    return output
