"""Launch the kernels for the gradients of keys and values of ag_attention."""

from typing import TYPE_CHECKING

import torch

from tdkernels.ops.attention.ag_attention.kernel_dkv import ag_attention_dkv_kernel, ag_attention_stats_kernel
from tdkernels.ops.attention.ag_attention.launch import (
    COPY_WORDS,
    bases_of,
    gathered_descriptor,
    problem_fields,
    resident_programs,
    shard_descriptor,
    slot_size,
    tile_of,
    uses_tma,
    width_of,
    widths_of,
)
from tdkernels.ops.attention.tile import STAT_ROWS
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import with_config
from tdkernels.rounding import cdiv
from tdkernels.runtime.kernel_launch import Launch, launch_cached, local_workspace_of, output_spec
from tdkernels.symm import get_workspace

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.ops.attention.ag_attention.config import AgAttentionConfig

_STAT_BLOCK = 64  # rows per program of the statistics kernel


def statistics(
    o: torch.Tensor, do: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None
) -> torch.Tensor:
    """Return two numbers per row and head that both backward kernels need, [rows / 16, 2, Hq, 16] fp32.

    They are lse to base 2, and delta: the dot product of o and do, minus dlse.
    """
    workspace = local_workspace_of(o.device)
    return launch_cached(
        workspace, ("ag_attention statistics",), (o, do, lse, dlse), lambda *of: _prepare_statistics(workspace, of)
    )[0]


def _prepare_statistics(workspace, operands):
    batch, rows, heads, dv = operands[0].shape
    positions = batch * rows
    stats = output_spec(
        operands[0], cdiv(positions, STAT_ROWS.value), 2, heads, STAT_ROWS.value, dtype=torch.float32
    )
    args = *operands, stats, positions, heads
    constants = {"DV": dv, "BLOCK_DV": width_of(dv), "BLOCK": _STAT_BLOCK, "num_warps": 4}
    grid = (cdiv(positions, _STAT_BLOCK) * heads,)
    return Launch(workspace, ag_attention_stats_kernel, grid, args, constants, operands, [stats], [])


def launch_dkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, stats: torch.Tensor, causal: bool,
    sharding: str, scale: float, group: "dist.ProcessGroup", config: "AgAttentionConfig",
) -> list[torch.Tensor]:
    """Return [dk, dv]. ``stats`` is the result of ``statistics``."""
    workspace = get_workspace(group, q.device, "ag_attention_dkv")
    call = causal, sharding, scale, config
    return launch_cached(
        workspace, (*call, gemm_operands.dot_precision(q.dtype)), (q, k, v, do, stats),
        lambda *of: _prepare_dkv(workspace, *of, *call),  # type: ignore[call-arg]
    )


def _prepare_dkv(workspace, q, k, v, do, stats, causal, sharding, scale, config):
    ranks, (batch, rows, heads, _) = workspace.world_size, q.shape
    fields = {"gradient": "k and v", **with_config(problem_fields(q, k, v, causal, sharding, scale), config)}
    num_chunks = cdiv(batch * rows, config.chunk_rows)
    half_bytes = ranks * (slot_size(q) + slot_size(do) + slot_size(stats)) if ranks > 1 else 256
    plan = workspace.prepare("ag_attention", fields, half_bytes, ranks * num_chunks + ranks)
    num_comm = config.num_comm_sms if ranks > 1 else 0
    outputs = output_spec(k, *k.shape), output_spec(v, *v.shape)
    descriptors = _dkv_descriptors(workspace, q, k, v, do, ranks, config)
    args = (
        workspace.ctx, q, k, v, do, stats, *outputs, *descriptors, scale, batch, rows, heads, k.shape[2], plan,
        num_comm, config.chunk_rows,
    )
    constants = {
        "GROUP": heads // k.shape[2], "COPY_WORDS": COPY_WORDS,
        "TILE": tile_of(q, k, v, causal, sharding, config.dkv_block_q, config.dkv_block_k, config.dkv_num_stages),
        "num_warps": config.dkv_num_warps, "num_stages": config.dkv_num_stages,
    }
    pieces = num_comm + cdiv(rows, config.dkv_block_k) * batch * k.shape[2] + (ranks > 1)
    grid = (min(pieces, resident_programs(q.device, config.dkv_num_warps)),)
    fixed = workspace.ctx, *bases_of(descriptors[-2:])
    return Launch(workspace, ag_attention_dkv_kernel, grid, args, constants, (q, k, v, do, stats), outputs, fixed)


def _dkv_descriptors(workspace, q, k, v, do, ranks, config):
    """Return descriptors of k, v, q, do, gathered q and gathered do, or None for each without TMA."""
    if not uses_tma(q, k, v):
        return (None,) * 6
    widths = widths_of(q, do)
    own_k, own_v = (shard_descriptor(x, config.dkv_block_k, width) for x, width in zip((k, v), widths))
    own_q, own_do = (shard_descriptor(x, config.dkv_block_q, width) for x, width in zip((q, do), widths))
    if ranks == 1:
        return own_k, own_v, own_q, own_do, own_q, own_do
    far_q = gathered_descriptor(workspace, 0, q, ranks, config.dkv_block_q, widths[0])
    far_do = gathered_descriptor(workspace, ranks * slot_size(q), do, ranks, config.dkv_block_q, widths[1])
    return own_k, own_v, own_q, own_do, far_q, far_do
