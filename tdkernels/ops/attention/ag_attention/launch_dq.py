"""Launch the backward of ag_attention: the kernel for dq, and ``launch_dkv`` for dk and dv."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tdkernels.ops.attention.ag_attention.kernel_dq import ag_attention_dq_kernel
from tdkernels.ops.attention.ag_attention.launch import (
    COPY_WORDS,
    bases_of,
    key_descriptors,
    prepare_keys,
    problem_fields,
    resident_programs,
    shard_descriptor,
    tile_of,
    uses_tma,
    widths_of,
)
from tdkernels.ops.attention.ag_attention.launch_dkv import launch_dkv, statistics
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import with_config
from tdkernels.rounding import cdiv
from tdkernels.runtime.kernel_launch import Launch, launch_cached, output_spec
from tdkernels.symm import get_workspace

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from tdkernels.ops.attention.ag_attention.config import AgAttentionConfig


def launch_dq(
    q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", do: "torch.Tensor", stats: "torch.Tensor", causal: bool,
    sharding: str, scale: float, group: "dist.ProcessGroup", config: "AgAttentionConfig",
) -> "torch.Tensor":
    """Return dq. ``stats`` is the result of ``statistics``."""
    workspace = get_workspace(group, q.device, "ag_attention")
    call = causal, sharding, scale, config
    return launch_cached(
        workspace, ("dq", *call, gemm_operands.dot_precision(q.dtype)), (q, k, v, do, stats),
        lambda *of: _prepare_dq(workspace, *of, *call),  # type: ignore[call-arg]
    )[0]


def _prepare_dq(workspace, q, k, v, do, stats, causal, sharding, scale, config):
    ranks, (batch, rows, heads, _) = workspace.world_size, q.shape
    fields = {"gradient": "q", **with_config(problem_fields(q, k, v, causal, sharding, scale), config)}
    plan, num_comm = prepare_keys(workspace, k, v, config, fields)
    dq = output_spec(q, *q.shape)
    descriptors = (None,) * 6
    if uses_tma(q, k, v):
        own = (shard_descriptor(x, config.dq_block_q, width) for x, width in zip((q, do), widths_of(q, do)))
        descriptors = *own, *key_descriptors(workspace, k, v, ranks, config.dq_block_k)
    args = (
        workspace.ctx, q, k, v, do, stats, dq, *descriptors, scale, batch, rows, heads, k.shape[2], plan, num_comm,
        config.chunk_rows,
    )
    constants = {
        "TILE": tile_of(q, k, v, causal, sharding, config.dq_block_q, config.dq_block_k, config.dq_num_stages),
        "COPY_WORDS": COPY_WORDS, "num_warps": config.dq_num_warps, "num_stages": config.dq_num_stages,
    }
    pieces = num_comm + cdiv(rows, config.dq_block_q) * batch * heads + (ranks > 1)
    grid = (min(pieces, resident_programs(q.device, config.dq_num_warps)),)
    fixed = workspace.ctx, *bases_of(descriptors[-2:])
    return Launch(workspace, ag_attention_dq_kernel, grid, args, constants, (q, k, v, do, stats), [dq], fixed)


def launch(
    q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", o: "torch.Tensor", lse: "torch.Tensor",
    do: "torch.Tensor", dlse: "torch.Tensor | None", wanted: Sequence[bool], causal: bool, sharding: str, scale: float,
    group: "dist.ProcessGroup", config: "AgAttentionConfig",
) -> "tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]":
    """Return (dq, dk, dv), with None for each gradient that is not ``wanted``. One kernel computes both dk and dv."""
    stats = statistics(o, do, lse, dlse)
    call = q, k, v, do, stats, causal, sharding, scale, group, config
    dq = launch_dq(*call) if wanted[0] else None
    dk, dv = launch_dkv(*call) if wanted[1] or wanted[2] else (None, None)
    return dq, dk if wanted[1] else None, dv if wanted[2] else None
