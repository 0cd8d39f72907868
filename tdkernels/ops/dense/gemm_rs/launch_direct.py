"""Launch the "direct" kernel of gemm_rs, or compile it ahead of time."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels.ops.common import gemm_operands
from tdkernels.ops.dense.gemm_rs.kernel_direct import gemm_rs_direct_kernel
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, output_spec

if TYPE_CHECKING:
    from tdkernels.symm.workspace import Workspace

MAX_RANKS = 8  # the descriptor of each peer is a separate argument of the kernel


def shared_memory_bytes(config: Any, device: torch.device, dtype: torch.dtype) -> int:
    """Return the shared memory that a config needs besides the stages of the main loop: one tile that is being sent."""
    leaves_by_engine = config.transport == "direct" and gpu.has_tma(device) and dtype.itemsize == 2
    return config.tiles.block_m * config.tiles.block_n * dtype.itemsize if leaves_by_engine else 0


def _tiles_descriptor(memory, slots, half_bytes, tiles):
    """Return a descriptor of whole tiles, [2, slots * block_m, block_n], for ``memory``, which begins with half 0."""
    shape = [2, slots * tiles.block_m, tiles.block_n]
    strides = [half_bytes // memory.element_size(), tiles.block_n, 1]
    return TensorDescriptor(memory, shape, strides, [1, tiles.block_m, tiles.block_n])


def _peer_descriptors(workspace, dtype, tiles, slots):
    """Return descriptors of the buffers of rank + 1, rank + 2, ..., cached as long as the buffers exist."""
    key = "gemm_rs_direct", dtype, tiles.block_m, tiles.block_n, slots
    found = workspace.launches[key]
    if found is None:
        ranks, me = workspace.world_size, workspace.rank
        peers = [workspace.buffer.tensor((me + step) % ranks) for step in range(1, ranks)]
        halves = [peer[workspace.data_offset :].view(dtype) for peer in peers]
        found = [_tiles_descriptor(memory, slots, workspace.half_bytes, tiles) for memory in halves]
        workspace.launches[key] = found
    return found


def _arguments(ctx, x, weight, bias, z, peers, rows, plan, world_size, config):
    """Return the kernel's arguments and constants; ``peers``: descriptors of the peers' buffers, None without TMA."""
    tiles = config.tiles
    n, k = weight.shape
    weight, stride_w, x_desc, w_desc, constants = gemm_operands.product(x, weight, bias, tiles)
    z_desc = None
    if peers is not None and n % 8 == 0:
        z_desc = TensorDescriptor(z, [1, rows, n], [rows * n, n, 1], [1, tiles.block_m, tiles.block_n])
    peers = [] if peers is None else peers
    args = (
        ctx, x, x_desc, weight, w_desc, bias, z, z_desc, *peers, *[None] * (MAX_RANKS - 1 - len(peers)),
        rows, n, k, stride_w, plan, tiles.group_m,
    )
    return args, {"RANKS": world_size, **constants}


def compile(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world_size: int, config: Any,
) -> None:
    """Compile the kernel for these operands into Triton's cache, without launching it."""
    x = gemm_operands.rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    tiles, rows, z, peers = config.tiles, x.shape[0] // world_size, x.new_empty(1), None
    if gemm_operands.tma_fits(x, weight):
        memory = x.new_empty(2 * tiles.block_m * tiles.block_n)
        peers = [_tiles_descriptor(memory, 1, memory.nbytes // 2, tiles)] * (world_size - 1)
    args, constants = _arguments(ctx, x, weight, bias, z, peers, rows, 0, world_size, config)
    gemm_rs_direct_kernel.warmup(*args, grid=(1,), **constants)


def prepare(
    workspace: "Workspace", x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: Any,
    fields: Mapping[str, Any],
) -> Launch:
    """Return the Launch for normalized operands; ``fields`` as for ``Workspace.prepare``.

    Raises:
        ValueError: If the group has more than MAX_RANKS ranks.
    """
    world_size = workspace.world_size
    if world_size > MAX_RANKS:
        raise ValueError(
            f'gemm_rs: config: transport "direct" supports at most {MAX_RANKS} ranks, the group has {world_size}; '
            f'"forward" supports any number'
        )
    n = weight.shape[0]
    tiles = config.tiles
    rows = x.shape[0] // world_size
    count = tiles.count(rows, n)  # tiles of one shard
    slots = world_size * count
    plan = workspace.prepare(
        "gemm_rs", fields, slots * tiles.block_m * tiles.block_n * x.element_size(), world_size * count
    )
    z = output_spec(x, rows, n)
    peers = _peer_descriptors(workspace, x.dtype, tiles, slots) if gemm_operands.tma_fits(x, weight) else None
    args, constants = _arguments(workspace.ctx, x, weight, bias, z, peers, rows, plan, world_size, config)
    programs = min(count * (world_size - 1), gpu.num_sms(x.device))  # half of the programs send, half sum
    constants["trace_ptr"] = recorder.buffer(x.device, world_size * count)
    fixed = [workspace.ctx, *(peer.base for peer in peers or [])]
    return Launch(workspace, gemm_rs_direct_kernel, (2 * programs,), args, constants, (x, weight, bias), (z,), fixed)
