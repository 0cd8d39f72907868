"""What the launchers of the "direct" kernels share: limits, default tile, descriptors, and the number of programs."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels.ops.common.tile_config import LARGE
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu

if TYPE_CHECKING:
    from tdkernels.ops.common.tile_config import Tiles
    from tdkernels.symm.workspace import Workspace

MAX_RANKS = 8  # the descriptor of each rank is a separate argument of the kernel
DIRECT_LARGE = replace(LARGE, num_stages=3)  # leaves shared memory for a tile that is being sent
_STAGES = 3  # slices in flight while partials are added


def shared_memory_bytes(tiles: "Tiles", device: torch.device, dtype: torch.dtype) -> int:
    """Return the shared memory that a kernel needs besides the stages of the main loop: one tile that is being sent."""
    leaves_by_engine = gpu.has_tma(device) and dtype.itemsize == 2
    return tiles.block_m * tiles.block_n * dtype.itemsize if leaves_by_engine else 0


def suits(tiles: "Tiles", n: int, k: int, dtype: torch.dtype, device: torch.device, world_size: int) -> bool:
    """Return whether "direct" can be the default for a GEMM whose default tile is ``tiles``.

    That is the case for large tiles that the TMA engine loads and sends, with which it was faster than "forward" on two
    H100.
    """
    by_engine = gpu.capability(device)[0] == 9 and dtype.itemsize == 2 and n % 8 == 0 and k % 8 == 0
    return by_engine and tiles == LARGE and world_size <= MAX_RANKS


def check_ranks(operator: str, world_size: int) -> None:
    """Raise ValueError if the group has more than MAX_RANKS ranks."""
    if world_size > MAX_RANKS:
        raise ValueError(
            f'{operator}: config: transport "direct" supports at most {MAX_RANKS} ranks, the group has {world_size}; '
            f'"forward" supports any number'
        )


def slice_elements(tiles: "Tiles", dtype: torch.dtype, world_size: int, split: int) -> int:
    """Return how many elements of a tile are added at a time: a power of two, whole rows of one of ``split`` parts.

    The slices in flight need no more shared memory than the stages of the main loop, so that as many programs fit on an
    SM.
    """
    most = tiles.shared_memory_bytes(dtype) // (_STAGES * world_size * dtype.itemsize)
    part = tiles.block_m * tiles.block_n // split
    return min(max(1 << most.bit_length() - 1, tiles.block_n), part, 4096)


def tiles_descriptor(memory: torch.Tensor, slots: int, half_bytes: int, tiles: "Tiles") -> TensorDescriptor:
    """Return a descriptor of whole tiles, [2, slots * block_m, block_n], for ``memory``, which begins with half 0."""
    shape = [2, slots * tiles.block_m, tiles.block_n]
    strides = [half_bytes // memory.element_size(), tiles.block_n, 1]
    return TensorDescriptor(memory, shape, strides, [1, tiles.block_m, tiles.block_n])


def descriptors(workspace: "Workspace", dtype: torch.dtype, tiles: "Tiles", slots: int) -> list[TensorDescriptor]:
    """Return descriptors of the data of rank + 1, rank + 2, ..., rank, cached as long as the buffers exist."""
    key = "direct", dtype, tiles.block_m, tiles.block_n, slots
    found = workspace.launches[key]
    if found is None:
        ranks, me = workspace.world_size, workspace.rank
        buffers = [workspace.buffer.tensor((me + step) % ranks) for step in range(1, ranks + 1)]
        halves = [buffer[workspace.data_offset :].view(dtype) for buffer in buffers]
        found = [tiles_descriptor(memory, slots, workspace.half_bytes, tiles) for memory in halves]
        workspace.launches[key] = found
    return found


def descriptors_for_compiling(x: torch.Tensor, tiles: "Tiles", world_size: int) -> list[TensorDescriptor]:
    """Return descriptors with the same block as those of a launch."""
    memory = x.new_empty(2 * tiles.block_m * tiles.block_n)
    return [tiles_descriptor(memory, 1, memory.nbytes // 2, tiles)] * world_size


def num_multiplying(tiles: "Tiles", pieces: int, device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
    """Return (number of programs that multiply, number that fit on the device).

    The former is the smallest number that computes the tiles in as many rounds as all that fit. The rest of them can
    add partials from the start.
    """
    fit = gpu.resident_programs(device, tiles, dtype, gpu.MOST_REGISTERS)
    return cdiv(pieces, cdiv(pieces, fit)), fit
