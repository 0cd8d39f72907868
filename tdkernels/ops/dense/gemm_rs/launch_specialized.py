"""Launch the warp-specialized kernel of gemm_rs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.invariance import leaves_of_rank
from tdkernels.ops.common.gemm_operands import rows_contiguous, weight_layout
from tdkernels.ops.common.scaling import Scales
from tdkernels.ops.common.specialized import launch as specialized
from tdkernels.ops.dense import launch_direct as shared
from tdkernels.runtime import gpu
from tdkernels.runtime.gluon import descriptor, optional_kernel
from tdkernels.runtime.kernel_launch import Launch, output_spec

if TYPE_CHECKING:
    from tdkernels.symm.workspace import Workspace

SPLIT = 16  # parts of a tile that are added as separate work items


@optional_kernel("gemm_rs: the warp-specialized kernel")
def _kernel():
    from tdkernels.ops.dense.gemm_rs.specialized.kernel import gemm_rs_specialized_kernel

    return gemm_rs_specialized_kernel


def supports(
    x: torch.Tensor, weight: torch.Tensor, config: Any, world_size: int, scales: Scales | None = None
) -> bool:
    """Return whether the kernel runs a config with transport "direct". Ranks may run different kernels."""
    if not specialized.is_enabled(config) or scales is not None or leaves_of_rank(world_size):
        return False
    return specialized.supports(x, weight) and _kernel() is not None


def _slots_descriptor(memory, half_bytes, tiles, slots):
    """Return a descriptor of whole tiles for ``memory``, which begins with half 0. Quarters of a tile are sent."""
    shape = [2, slots * tiles.block_m, tiles.block_n]
    strides = [half_bytes // memory.element_size(), tiles.block_n, 1]
    return descriptor(memory, shape, strides, [1, tiles.block_m // 2, tiles.block_n // 2])


def _arguments(ctx, x, weight, bias, z, descs, rows, plan, tiles, segment_rows):
    """Return the arguments and constants of the kernel."""
    (n, k), world_size = weight.shape, len(descs)
    weight, _, is_kn = weight_layout(weight)
    args = (
        ctx, specialized.rows_descriptor(x, 1, x.shape[0], x.numel()),
        specialized.weight_descriptor(weight, is_kn), bias, z, *descs, *[None] * (shared.MAX_RANKS - world_size),
        rows, n, k, plan, tiles.group_m, segment_rows,
    )
    constants = {
        # As many rows as fit in the registers of the warps that add them.
        "ROWS": 8 if world_size <= 4 else 4, "SPLIT": SPLIT, "RANKS": world_size, "HAS_BIAS": bias is not None,
        "W_IS_KN": is_kn, "num_warps": 4,
    }
    return args, constants


def compile(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world_size: int, config: Any
) -> None:
    """Compile the kernel for operands that ``supports`` accepts into Triton's cache, without launching it."""
    tiles = config.tiles
    x = rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    memory = x.new_empty(2 * tiles.block_m * tiles.block_n)
    descs = [_slots_descriptor(memory, memory.nbytes // 2, tiles, 1)] * world_size
    args, constants = _arguments(ctx, x, weight, bias, x.new_empty(1), descs, 1, 0, tiles, 1)
    _kernel().warmup(*args, grid=(1,), **constants)


def prepare(
    workspace: "Workspace", x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: Any,
    fields: Mapping[str, Any], segment_rows: int,
) -> Launch:
    """Return the Launch for operands that ``supports`` accepts; arguments as for ``launch_direct.prepare``."""
    world_size = workspace.world_size
    shared.check_ranks("gemm_rs", world_size)
    n, rows, tiles = weight.shape[0], x.shape[0] // world_size, config.tiles
    pieces = world_size * tiles.count(rows, n)
    # The same slots and signals as those of the kernel that is not specialized.
    plan = workspace.prepare("gemm_rs", fields, pieces * tiles.block_m * tiles.block_n * x.itemsize, pieces)
    z = output_spec(x, rows, n)
    descs = shared.cached_descriptors(
        workspace, ("specialized", x.dtype, pieces), x.dtype,
        lambda memory: _slots_descriptor(memory, workspace.half_bytes, tiles, pieces),
    )
    args, constants = _arguments(workspace.ctx, x, weight, bias, z, descs, rows, plan, tiles, segment_rows)
    fixed = [workspace.ctx, *(desc.base for desc in descs)]
    grid = (gpu.num_sms(x.device) - gpu.spare_sms,)
    return Launch(workspace, _kernel(), grid, args, constants, (x, weight, bias), (z,), fixed)
