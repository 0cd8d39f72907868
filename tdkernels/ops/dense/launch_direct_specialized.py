"""What the launchers of the warp-specialized kernels with transport "direct" share: descriptors and arguments."""

from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.invariance import leaves_of_rank
from tdkernels.ops.common.gemm_operands import rows_contiguous, scale_pointers, weight_layout
from tdkernels.ops.common.scaling import Scales, out_dtype_of
from tdkernels.ops.common.specialized import launch as specialized
from tdkernels.ops.common.specialized.launch_split_k import NO_SPLITS, Splits
from tdkernels.ops.dense import launch_direct
from tdkernels.runtime.gluon import descriptor

if TYPE_CHECKING:
    from tdkernels.ops.common.tile_config import Tiles
    from tdkernels.symm.workspace import Workspace

SPLIT = 16  # parts of a tile that are added as separate work items


def supports(x: torch.Tensor, weight: torch.Tensor, config: Any, world_size: int, scales: Scales | None = None) -> bool:
    """Return whether the kernels run a config with transport "direct". Ranks may run different kernels."""
    return not leaves_of_rank(world_size) and specialized.supports(x, weight, config, scales)


def slots_descriptor(memory: torch.Tensor, half_bytes: int, tiles: "Tiles", slots: int) -> Any:
    """Return a descriptor of whole tiles for ``memory``, which begins with half 0. Quarters of a tile are sent."""
    shape = [2, slots * tiles.block_m, tiles.block_n]
    strides = [half_bytes // memory.element_size(), tiles.block_n, 1]
    return descriptor(memory, shape, strides, [1, tiles.block_m // 2, tiles.block_n // 2])


def descriptors(workspace: "Workspace", tiles: "Tiles", slots: int, out_dtype: torch.dtype) -> list[Any]:
    """Return descriptors of the data of rank + 1, rank + 2, ..., rank, cached as long as the buffers exist."""
    return launch_direct.cached_descriptors(
        workspace, ("specialized", out_dtype, slots), out_dtype,
        lambda memory: slots_descriptor(memory, workspace.half_bytes, tiles, slots),
    )


def arguments(
    ctx: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, z: Any, descs: list[Any],
    rows: int, plan: int, tiles: "Tiles", *more: int, scales: Scales | None = None,
    splits: Splits = NO_SPLITS,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments and constants of a kernel.

    Args:
        descs: See ``descriptors``.
        rows: The first size that the kernel takes: M of the output or of a shard.
        more: The last arguments of the kernel.
        scales: The scales of scaled operands.
        splits: The tiles that are split along K.
    """
    (n, k), world_size = weight.shape, len(descs)
    weight, _, is_kn = weight_layout(weight)
    args = (
        ctx, specialized.rows_descriptor(x, 1, x.shape[0], x.numel()),
        specialized.weight_descriptor(weight, is_kn), bias, *scale_pointers(scales), z, splits.sums,
        *descs, *[None] * (launch_direct.MAX_RANKS - world_size),
        rows, n, k, plan, tiles.group_m, *splits.last_wave, splits.first_flag, *more,
    )
    constants = {
        # As many rows as fit in the registers of the warps that add them.
        "ROWS": 8 if world_size <= 4 else 4, "SPLIT": SPLIT, "RANKS": world_size, "HAS_BIAS": bias is not None,
        "W_IS_KN": is_kn, **specialized.scale_constants(scales), "num_warps": 4,
    }
    return args, constants


def operands_to_compile(
    x: torch.Tensor, tiles: "Tiles", world_size: int, scales: Scales | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Any]]:
    """Return (ctx, x, z, descriptors) for a launch that is only compiled."""
    x = rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    memory = x.new_empty(2 * tiles.block_m * tiles.block_n, dtype=out_dtype_of(x, scales))
    return ctx, x, memory, [slots_descriptor(memory, memory.nbytes // 2, tiles, 1)] * world_size
