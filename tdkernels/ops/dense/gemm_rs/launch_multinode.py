"""Launch the kernel of gemm_rs on several nodes, or compile it ahead of time."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.staging import COPY_WORDS
from tdkernels.ops.dense.gemm_rs.kernel_multinode import gemm_rs_nodes_kernel
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, output_spec

if TYPE_CHECKING:
    from tdkernels.symm.workspace import Workspace


def _arguments(ctx, x, weight, bias, z, stage, rows, lag, plan, world_size, num_nodes, config):
    """Return the kernel's arguments and constants."""
    tiles = config.tiles
    n, k = weight.shape
    weight, stride_w, x_desc, w_desc, constants = gemm_operands.product(x, weight, bias, tiles)
    args = (
        ctx, x, x_desc, weight, w_desc, bias, z, stage,
        rows, n, k, stride_w, lag, plan, config.item_tiles, tiles.group_m,
    )
    nodes = {"NODES": num_nodes, "LOCAL": world_size // num_nodes}
    return args, {"COPY_WORDS": COPY_WORDS, **nodes, **constants}


def compile(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world_size: int, config: Any, num_nodes: int,
) -> None:
    """Compile the kernel for these operands into Triton's cache, without launching it."""
    x = gemm_operands.rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    z = stage = x.new_empty(1)
    rows = x.shape[0] // world_size
    args, constants = _arguments(ctx, x, weight, bias, z, stage, rows, 0, 0, world_size, num_nodes, config)
    gemm_rs_nodes_kernel.warmup(*args, grid=(1,), **constants)


def prepare(
    workspace: "Workspace", x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: Any,
    fields: Mapping[str, Any],
) -> Launch:
    """Return the Launch for normalized operands; ``fields`` as for ``Workspace.prepare``."""
    topology = workspace.group.topology
    ranks, nodes, local = topology.world_size, topology.num_nodes, topology.local_world_size
    n = weight.shape[0]
    rows = x.shape[0] // ranks
    tiles = config.tiles
    count = tiles.count(rows, n)  # tiles of one shard
    items = cdiv(count, config.item_tiles)
    # Periods between computing a tile group and copying it out: a wave of tiles, so that the tiles are ready when the
    # work item that copies them starts, but at most the periods of a shard.
    lag = min(cdiv(gpu.num_sms(x.device), config.item_tiles), items)
    slots = items * config.item_tiles
    staged = (ranks - nodes) * slots  # tiles
    plan = workspace.prepare(
        "gemm_rs", fields, (ranks + nodes) * slots * tiles.block_m * tiles.block_n * x.element_size(),
        ranks * items + nodes * count, num_flags=staged,
    )
    stage = output_spec(x, max(staged * tiles.block_m * tiles.block_n, 1))
    z = output_spec(x, rows, n)
    args, constants = _arguments(workspace.ctx, x, weight, bias, z, stage, rows, lag, plan, ranks, nodes, config)
    pieces = ranks * items * ((local > 1) + config.item_tiles)
    programs = min(pieces, gpu.resident_programs(x.device, tiles, x.dtype))
    constants["trace_ptr"] = recorder.buffer(x.device, pieces)
    operands, made = (x, weight, bias), (z, stage)
    return Launch(workspace, gemm_rs_nodes_kernel, (programs,), args, constants, operands, made, [workspace.ctx])
