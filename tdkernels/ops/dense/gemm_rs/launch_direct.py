"""Launch the "direct" kernel of gemm_rs, or compile it ahead of time."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels.ops.common import gemm_operands
from tdkernels.ops.dense.gemm_rs.kernel_direct import gemm_rs_direct_kernel
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, output_spec

if TYPE_CHECKING:
    from tdkernels.ops.common.tile_config import Tiles
    from tdkernels.symm.workspace import Workspace

MAX_RANKS = 8  # the descriptor of each rank is a separate argument of the kernel
SPLIT = 4  # parts of a tile whose partials are added at the end
_STAGES = 3  # slices in flight while partials are added


def shared_memory_bytes(config: Any, device: torch.device, dtype: torch.dtype) -> int:
    """Return the shared memory that a config needs besides the stages of the main loop: one tile that is being sent."""
    leaves_by_engine = config.transport == "direct" and gpu.has_tma(device) and dtype.itemsize == 2
    return config.tiles.block_m * config.tiles.block_n * dtype.itemsize if leaves_by_engine else 0


def slice_elements(tiles: "Tiles", dtype: torch.dtype, world_size: int) -> int:
    """Return how many elements of a tile are added at a time: a power of two, whole rows of a part.

    The slices in flight need no more shared memory than the stages of the main loop, so that as many programs fit on an
    SM.
    """
    most = tiles.shared_memory_bytes(dtype) // (_STAGES * world_size * dtype.itemsize)
    part = tiles.block_m * tiles.block_n // SPLIT
    return min(max(1 << most.bit_length() - 1, tiles.block_n), part, 4096)


def _tiles_descriptor(memory, slots, half_bytes, tiles):
    """Return a descriptor of whole tiles, [2, slots * block_m, block_n], for ``memory``, which begins with half 0."""
    shape = [2, slots * tiles.block_m, tiles.block_n]
    strides = [half_bytes // memory.element_size(), tiles.block_n, 1]
    return TensorDescriptor(memory, shape, strides, [1, tiles.block_m, tiles.block_n])


def _descriptors(workspace, dtype, tiles, slots):
    """Return descriptors of the data of rank + 1, rank + 2, ..., rank, cached as long as the buffers exist."""
    key = "gemm_rs_direct", dtype, tiles.block_m, tiles.block_n, slots
    found = workspace.launches[key]
    if found is None:
        ranks, me = workspace.world_size, workspace.rank
        buffers = [workspace.buffer.tensor((me + step) % ranks) for step in range(1, ranks + 1)]
        halves = [buffer[workspace.data_offset :].view(dtype) for buffer in buffers]
        found = [_tiles_descriptor(memory, slots, workspace.half_bytes, tiles) for memory in halves]
        workspace.launches[key] = found
    return found


def _arguments(ctx, x, weight, bias, z, descs, rows, plan, world_size, config, num_gemm, whole):
    """Return the kernel's arguments and constants; ``descs``: see ``_descriptors``, None without TMA."""
    tiles = config.tiles
    n, k = weight.shape
    weight, stride_w, x_desc, w_desc, constants = gemm_operands.product(x, weight, bias, tiles)
    descs = [] if descs is None else descs
    args = (
        ctx, x, x_desc, weight, w_desc, bias, z, *descs, *[None] * (MAX_RANKS - len(descs)),
        rows, n, k, stride_w, plan, tiles.group_m, num_gemm, whole,
    )
    return args, {
        "SLICE": slice_elements(tiles, x.dtype, world_size), "SPLIT": SPLIT, "RANKS": world_size, **constants,
    }


def compile(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world_size: int, config: Any,
) -> None:
    """Compile the kernel for these operands into Triton's cache, without launching it."""
    x = gemm_operands.rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    tiles, rows, z, descs = config.tiles, x.shape[0] // world_size, x.new_empty(1), None
    if gemm_operands.tma_fits(x, weight):
        memory = x.new_empty(2 * tiles.block_m * tiles.block_n)
        descs = [_tiles_descriptor(memory, 1, memory.nbytes // 2, tiles)] * world_size
    args, constants = _arguments(ctx, x, weight, bias, z, descs, rows, 0, world_size, config, 1, 0)
    gemm_rs_direct_kernel.warmup(*args, grid=(1,), **constants)


def _programs(tiles, pieces, device, dtype):
    """Return (number of programs that multiply, number that fit on the device).

    The former is the smallest number that computes the tiles in as many rounds as all that fit. The rest of them can
    add partials from the start.
    """
    fit = gpu.resident_programs(device, tiles, dtype, gpu.MOST_REGISTERS)
    return cdiv(pieces, cdiv(pieces, fit)), fit


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
    pieces = world_size * count
    plan = workspace.prepare("gemm_rs", fields, pieces * tiles.block_m * tiles.block_n * x.element_size(), pieces)
    z = output_spec(x, rows, n)
    descs = _descriptors(workspace, x.dtype, tiles, pieces) if gemm_operands.tma_fits(x, weight) else None
    num_gemm, fit = _programs(tiles, pieces, x.device, x.dtype)
    # Whole tiles as long as few programs add, then parts, so that there is work for all SMs when the GEMM is done.
    whole = count // 2
    args, constants = _arguments(
        workspace.ctx, x, weight, bias, z, descs, rows, plan, world_size, config, num_gemm, whole
    )
    items = whole + (count - whole) * SPLIT
    constants["trace_ptr"] = recorder.buffer(x.device, pieces + items)
    fixed = [workspace.ctx, *(desc.base for desc in descs or [])]
    grid = (num_gemm + min(items, fit),)
    return Launch(workspace, gemm_rs_direct_kernel, grid, args, constants, (x, weight, bias), (z,), fixed)
