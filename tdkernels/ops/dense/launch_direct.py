"""What the launchers of the "direct" kernels share: limits, default tile, descriptors, and the number of programs."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels.autotune.invariance import leaves_of_rank
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.scaling import Scales, out_dtype_of
from tdkernels.ops.common.specialized import launch as launch_specialized
from tdkernels.ops.common.tile_config import LARGE, MEDIUM, Tiles, default_tiles, tiles_of_product
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu

if TYPE_CHECKING:
    from tdkernels.symm.workspace import Workspace

MAX_RANKS = 8  # the descriptor of each rank is a separate argument of the kernel
# These leave shared memory for a tile that is being sent.
DIRECT_LARGE, DIRECT_MEDIUM = replace(LARGE, num_stages=3), replace(MEDIUM, num_stages=4)
DIRECT_SMALL = Tiles(64, 128, 64, num_warps=4, num_stages=5)
# Up to so many waves of large tiles the default are medium ones. The warp-specialized kernel has only large tiles.
# Without it, the communication of the second of two waves overlaps with nothing. H200, 4 and 8 ranks in solo mode:
# medium tiles take 0.78 to 0.93 of the time of the warp-specialized kernel with 64 tiles, 1.00 to 1.06 with 96 and 128.
_WAVES_OF_MEDIUM, _WAVES_OF_MEDIUM_SPECIALIZED = 2, 0.5
# From this K of a rank on, large tiles are the default for any number of tiles in fp8 on two ranks, because the
# warp-specialized kernel splits K. With at most 64 tiles it takes 0.92 of the time of medium ones (H200 in solo mode,
# block-wise scales, K of 7168 to 14336, 0.70 to 1.04 in 14 cases), and 1.2 with a K of 4096 (two cases). Other scales
# were not measured with so few tiles.
_LONG_K_IN_FP8 = 7168
_STAGES = 3  # slices in flight while partials are added


def shared_memory_bytes(tiles: Tiles, device: torch.device, dtype: torch.dtype) -> int:
    """Return the shared memory that a kernel needs besides the stages of the main loop: one tile that is being sent."""
    leaves_by_engine = gpu.has_tma(device) and dtype.itemsize <= 2
    return tiles.block_m * tiles.block_n * 2 if leaves_by_engine else 0  # the output of fp8 operands has 16 bits


def suits(rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device, world_size: int) -> bool:
    """Return whether "direct" can be the default for an output of ``rows`` rows in each shard.

    That is the case for tiles that the TMA engine loads and sends, unless an output has few rows or columns. It was
    faster than "forward" on two H100 with large tiles, and in solo mode on an H200 with medium ones.
    """
    return sends_by_engine(n, k, dtype, device, world_size) and default_tiles(rows, n, dtype, device) == LARGE


def sends_by_engine(n: int, k: int, dtype: torch.dtype, device: torch.device, world_size: int) -> bool:
    """Return whether the TMA engine can load and send tiles of an output with ``n`` columns."""
    by_engine = gpu.capability(device)[0] == 9 and dtype.itemsize <= 2 and n % 8 == 0 and k % 8 == 0
    return by_engine and world_size <= MAX_RANKS


def has_tiles(
    n: int, k: int, dtype: torch.dtype, device: torch.device, world_size: int, layout: str | None = None
) -> bool:
    """Return whether "direct" is the default with tiles of any size, for more than two ranks.

    That is the case on Hopper if the warp-specialized kernel can run. ``layout``: the layout of fp8 operands.
    """
    sends = world_size > 2 and sends_by_engine(n, k, dtype, device, world_size)
    return sends and launch_specialized.suits(LARGE, n, k, dtype, device, layout)


def fastest_tile(
    microseconds: Iterable[tuple[Tiles, float, float]], count: Callable[[Tiles], int], k: int, num_sms: int
) -> Tiles:
    """Return the tile with the shortest time: its first number, plus the second one for each wave and 1000 columns.

    Args:
        microseconds: The tiles with these numbers, in µs.
        count: Returns the number of tiles of a problem.
        k: Columns of a rank's x.
        num_sms: Tiles of a wave.
    """
    return min(microseconds, key=lambda one: one[1] + cdiv(count(one[0]), num_sms) * k / 1000 * one[2])[0]


def default_tile(
    rows: int, n: int, k: int, shards: int, world_size: int, specializes: bool, dtype: torch.dtype, device: torch.device
) -> Tiles:
    """Return the default tile for ``shards`` outputs [rows, n] that ``suits`` accepts, and operands with k columns.

    ``specializes``: whether the warp-specialized kernel can run.
    """
    if specializes and dtype.itemsize == 1 and world_size == 2 and k >= _LONG_K_IN_FP8:
        return DIRECT_LARGE
    waves = _WAVES_OF_MEDIUM_SPECIALIZED if specializes else _WAVES_OF_MEDIUM
    return DIRECT_LARGE if tiles_of_product(rows, n, shards, waves, dtype, device) == LARGE else DIRECT_MEDIUM


def check_ranks(operator: str, world_size: int) -> None:
    """Raise ValueError if the group has more than MAX_RANKS ranks."""
    if world_size > MAX_RANKS:
        raise ValueError(
            f'{operator}: config: transport "direct" supports at most {MAX_RANKS} ranks, the group has {world_size}; '
            f'"forward" supports any number'
        )


def slice_elements(
    tiles: "Tiles", dtype: torch.dtype, world_size: int, split: int, out_dtype: torch.dtype | None = None
) -> int:
    """Return how many elements of a tile are added at a time: a power of two, whole rows of one of ``split`` parts.

    The slices in flight need no more shared memory than the stages of the main loop, so that as many programs fit on an
    SM. ``out_dtype``: the dtype of partials, if it is not ``dtype``, that of the operands.
    """
    most = tiles.shared_memory_bytes(dtype) // (_STAGES * world_size * (out_dtype or dtype).itemsize)
    part = tiles.block_m * tiles.block_n // split
    return min(max(1 << most.bit_length() - 1, tiles.block_n), part, 4096)


def _tiles_descriptor(memory, slots, half_bytes, tiles):
    """Return a descriptor of whole tiles, [2, slots * block_m, block_n], for ``memory``, which begins with half 0."""
    shape = [2, slots * tiles.block_m, tiles.block_n]
    strides = [half_bytes // memory.element_size(), tiles.block_n, 1]
    return TensorDescriptor(memory, shape, strides, [1, tiles.block_m, tiles.block_n])


def descriptors(
    workspace: "Workspace", x: torch.Tensor, weight: torch.Tensor, tiles: "Tiles", slots: int, out_dtype: torch.dtype,
) -> list[TensorDescriptor]:
    """Return descriptors of the data of rank + 1, rank + 2, ..., rank, cached as long as the buffers exist.

    Without TMA there are none, nor for fp32 partials, which would need too much shared memory.
    """
    if not _by_engine(x, weight, out_dtype):
        return []
    key = "direct", out_dtype, tiles.block_m, tiles.block_n, slots
    return cached_descriptors(
        workspace, key, out_dtype, lambda memory: _tiles_descriptor(memory, slots, workspace.half_bytes, tiles)
    )


def cached_descriptors(
    workspace: "Workspace", key: tuple[Any, ...], dtype: torch.dtype, describe: Callable[[torch.Tensor], Any]
) -> list[Any]:
    """Return ``describe(memory)`` for rank + 1, rank + 2, ..., rank, cached as long as the buffers exist.

    ``memory`` is the data of a rank as elements of ``dtype``, from half 0 on.
    """
    found = workspace.launches[key]
    if found is None:
        ranks, me = workspace.world_size, workspace.rank
        buffers = [workspace.buffer.tensor((me + step) % ranks) for step in range(1, ranks + 1)]
        found = [describe(buffer[workspace.data_offset :].view(dtype)) for buffer in buffers]
        workspace.launches[key] = found
    return found


def _by_engine(x, weight, out_dtype):
    return gemm_operands.tma_fits(x, weight) and out_dtype.itemsize == 2


def arguments(
    ctx: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, z: Any,
    descs: list[TensorDescriptor], rows: int, plan: int, world_size: int, tiles: "Tiles", split: int, *more: int,
    scales: Scales | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments and constants of a kernel.

    Args:
        descs: See ``descriptors``.
        rows: The first size that the kernel takes: M of the output or of a shard.
        split: Parts of a tile that are added as separate work items.
        more: The last arguments of the kernel. The first of them is the number of programs that multiply.
        scales: The scales of scaled operands.
    """
    n, k = weight.shape
    weight, stride_w, x_desc, w_desc, constants = gemm_operands.product(x, weight, bias, tiles, scales=scales)
    constants["PRODUCT"] = constants["PRODUCT"]._replace(leaves=leaves_of_rank(world_size))
    args = (
        ctx, x, x_desc, weight, w_desc, bias, *gemm_operands.scale_pointers(scales), z,
        *descs, *[None] * (MAX_RANKS - len(descs)),
        rows, n, k, stride_w, plan, tiles.group_m, *more,
    )
    slice_size = slice_elements(tiles, x.dtype, world_size, split, out_dtype_of(x, scales))
    return args, {"SLICE": slice_size, "SPLIT": split, "RANKS": world_size, **constants}


def compile(
    kernel: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world_size: int, tiles: "Tiles",
    split: int, *more: int, scales: Scales | None = None,
) -> None:
    """Compile a kernel for these operands into Triton's cache, without launching it.

    ``more`` and ``scales`` as for ``arguments``.
    """
    out_dtype = out_dtype_of(x, scales)
    x = gemm_operands.rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    descs = []
    if _by_engine(x, weight, out_dtype):
        memory = x.new_empty(2 * tiles.block_m * tiles.block_n, dtype=out_dtype)
        descs = [_tiles_descriptor(memory, 1, memory.nbytes // 2, tiles)] * world_size
    z = x.new_empty(1, dtype=out_dtype)
    args, constants = arguments(ctx, x, weight, bias, z, descs, 1, 0, world_size, tiles, split, *more, scales=scales)
    kernel.warmup(*args, grid=(1,), **constants)


def num_multiplying(tiles: "Tiles", pieces: int, device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
    """Return (number of programs that multiply, number that fit on the device).

    The former is the smallest number that computes the tiles in as many rounds as all that fit. The rest of them can
    add partials from the start.
    """
    fit = gpu.resident_programs(device, tiles, dtype, gpu.MOST_REGISTERS)
    return cdiv(pieces, cdiv(pieces, fit)), fit
