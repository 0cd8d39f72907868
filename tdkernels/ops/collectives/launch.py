"""Launches of the kernels of all_gather, reduce_scatter and all_reduce, on operands of two ranks or more."""

import torch
import triton.language as tl

from tdkernels.ops.collectives import kernel as kernels
from tdkernels.ops.collectives.async_all_gather import AsyncAllGather
from tdkernels.ops.common.config import with_config
from tdkernels.ops.common.gemm_operands import rows_contiguous
from tdkernels.rounding import cdiv
from tdkernels.runtime import kernel_launch
from tdkernels.runtime.kernel_launch import Launch, launch_cached, output_spec
from tdkernels.symm import get_workspace

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}


def output_shape(operator, shape, world_size):
    """The shape of the output for an x of a shape."""
    if operator == "all_reduce":
        return tuple(shape)
    rows = shape[0] * world_size if operator == "all_gather" else shape[0] // world_size
    return (rows, *shape[1:])


def problem_fields(x):
    """What must be the same on all ranks before a config is chosen."""
    return {"shape": tuple(x.shape), "dtype": str(x.dtype)}


def as_bytes(x):
    """The bytes of a contiguous tensor, one-dimensional."""
    return x.view(-1).view(torch.uint8)


def _item(operator, dtype, nbytes):
    """What a kernel moves ``nbytes`` in, as Triton's type and its bytes: numbers if it sums, else words."""
    if operator != "all_gather":
        return _TYPES[dtype], dtype.itemsize
    size = next(size for size in _WORDS if nbytes % size == 0)
    return _WORDS[size], size


def _kernel(operator, config):
    if operator == "all_reduce":
        one_shot = config.exchange == "one_shot"
        return kernels.all_reduce_one_shot_kernel if one_shot else kernels.all_reduce_two_shot_kernel
    return kernels.all_gather_kernel if operator == "all_gather" else kernels.reduce_scatter_kernel


def share_bytes(operator, x, world_size):
    """What the kernel takes for its x [n]: a shard, a slice of one rank, or all of it."""
    return x.nbytes // world_size if operator == "reduce_scatter" else x.nbytes


def _as_given(x):
    """x as kernels take it, of which they want the address alone: Triton does not know all types."""
    return x if x.dtype in _TYPES or x.dtype == torch.int32 else as_bytes(x)


def arguments(operator, ctx, x, output, nbytes, plan, config):
    """The kernel's arguments for a share of ``nbytes``; x and output ``_as_given``."""
    dtype, size = _item(operator, x.dtype, nbytes)
    constants = {
        "DTYPE": dtype, "ITEM_BYTES": size, "ALIGNED": nbytes % 16 == 0, "BLOCK": config.block_bytes // size,
        "num_warps": config.num_warps,
    }
    return (ctx, x, output, nbytes // size, config.piece_blocks, plan), constants


def sizes(operator, nbytes, world_size, config):
    """(units of work, bytes of a half, signals of a half): a unit is a piece, or a round of them."""
    piece = config.block_bytes * config.piece_blocks
    if operator == "all_reduce" and config.exchange == "two_shot":
        rounds = cdiv(nbytes, piece * world_size)
        return rounds, 2 * rounds * world_size * piece, 2 * rounds * world_size
    pieces = cdiv(nbytes, piece)
    return pieces, world_size * pieces * piece, world_size * pieces


def compile(operator, x, world_size, config):
    """Compile what ``launch`` with the same x would launch, into Triton's cache; launches nothing."""
    if x.device.type == "cpu" or config.exchange == "copy_engine":
        return  # interpreted; no kernel that depends on the config
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    given = _as_given(rows_contiguous(x))
    args, constants = arguments(operator, ctx, given, given, share_bytes(operator, x, world_size), 0, config)
    _kernel(operator, config).warmup(*args, grid=(1,), **constants)


def launch(operator, x, group, config):
    """The output for an x that is not empty, by our own kernels."""
    x = rows_contiguous(x)
    if config.exchange == "copy_engine":
        return _by_copy_engine(operator, x, group, config)
    given = _as_given(x)
    (output,) = launch_cached(*_launch_call(operator, x, given, group, config))
    if given is x:
        return output
    return output.view(x.dtype).view(output_shape(operator, x.shape, group.size()))


def bind(operator, x, group, config):
    """Return the Launch of a fused call; None if the call copies x, takes its bytes, or uses the copy engine."""
    given = _as_given(rows_contiguous(x))
    if given is not x or config.exchange == "copy_engine":
        return None
    return kernel_launch.bind(*_launch_call(operator, x, given, group, config))[0]


def _launch_call(operator, x, given, group, config):
    """The arguments of ``launch_cached``."""
    workspace = get_workspace(group, x.device, operator)
    key = config, x.shape, x.dtype
    return workspace, key, (given,), lambda given: _prepare(operator, workspace, given, x, config)


def _prepare(operator, workspace, given, x, config):
    """The Launch for an x, ``given`` as it is or as bytes."""
    world_size = workspace.world_size
    nbytes = share_bytes(operator, x, world_size)
    units, half_bytes, half_signals = sizes(operator, nbytes, world_size, config)
    plan = workspace.prepare(operator, with_config(problem_fields(x), config), half_bytes, half_signals)
    output = output_spec(given, *output_shape(operator, given.shape, world_size))
    args, constants = arguments(operator, workspace.ctx, given, output, nbytes, plan, config)
    grid = (min(units, config.num_programs),)
    kernel = _kernel(operator, config)
    return Launch(workspace, kernel, grid, args, constants, (given,), (output,), [workspace.ctx])


def _by_copy_engine(operator, x, group, config):
    """all_gather by copies of whole shards; each is brought to the output while later ones are on their way."""
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
