"""Compile the kernels of the stand-alone collectives with the arguments of their launcher."""

import torch

from tdkernels.ops.collectives import kernel as collectives
from tdkernels.ops.collectives import launch as collective_launch
from tdkernels.ops.collectives.config import CollectiveConfig
from tests.support.aot import PLAN, SHARED_MEMORY, compile_for, pointer

COLLECTIVES = {
    ("all_gather", "one_shot"): collectives.all_gather_kernel,
    ("reduce_scatter", "one_shot"): collectives.reduce_scatter_kernel,
    ("all_reduce", "one_shot"): collectives.all_reduce_one_shot_kernel,
    ("all_reduce", "two_shot"): collectives.all_reduce_two_shot_kernel,
}


def compile_collective(operator, exchange, arch, dtype, *, block_bytes=8192, num_warps=8, nbytes=1 << 20, ranks=0):
    """Compile the kernel of an operator. ``ranks`` is only used in the batch-invariant mode with ``max_ranks``."""
    config = CollectiveConfig(exchange=exchange, block_bytes=block_bytes, num_warps=num_warps)
    x = torch.empty(64, dtype=dtype)
    args, kwargs = collective_launch.arguments(operator, pointer(torch.int64), x, x, nbytes, PLAN, config, ranks)
    compiled = compile_for(COLLECTIVES[operator, exchange], list(args), kwargs, arch)
    assert compiled.metadata.shared <= SHARED_MEMORY[arch]
    return compiled
