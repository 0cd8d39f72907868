"""Launch the kernel of gemm_rs on several nodes, or compile it ahead of time."""

import torch

from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.staging import COPY_WORDS
from tdkernels.ops.dense.gemm_rs.kernel_multinode import gemm_rs_nodes_kernel
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, output_spec


def _arguments(ctx, x, weight, bias, z, stage, rows, lag, plan, world_size, num_nodes, config):
    """The kernel's arguments."""
    tiles = config.tiles
    n, k = weight.shape
    weight, stride_w, x_desc, w_desc, constants = gemm_operands.product(x, weight, bias, tiles)
    args = (
        ctx, x, x_desc, weight, w_desc, bias, z, stage,
        rows, n, k, stride_w, lag, plan, config.item_tiles, tiles.group_m,
    )
    nodes = {"NODES": num_nodes, "LOCAL": world_size // num_nodes}
    return args, {"COPY_WORDS": COPY_WORDS, **nodes, **constants}


def compile(x, weight, bias, world_size, config, num_nodes):
    """Compile what ``launch`` with the same operands would launch, into Triton's cache; launches nothing."""
    x = gemm_operands.rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    z = stage = x.new_empty(1)
    rows = x.shape[0] // world_size
    args, constants = _arguments(ctx, x, weight, bias, z, stage, rows, 0, 0, world_size, num_nodes, config)
    gemm_rs_nodes_kernel.warmup(*args, grid=(1,), **constants)


def prepare(workspace, x, weight, bias, config, fields):
    """The Launch for operands that are ``ready``."""
    topology = workspace.group.topology
    ranks, nodes, local = topology.world_size, topology.num_nodes, topology.local_world_size
    n = weight.shape[0]
    rows = x.shape[0] // ranks
    tiles = config.tiles
    count = tiles.count(rows, n)  # tiles of one shard
    items = cdiv(count, config.item_tiles)
    # Late enough that the tiles of an item are ready when its forwarding program starts, never later than a shard.
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
