"""Launch the warp-specialized kernel of gemm_rs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.invariance import leaves_of_rank
from tdkernels.ops.common.gemm_operands import rows_contiguous, scale_operands, scale_pointers, weight_layout
from tdkernels.ops.common.scaling import Scales, out_dtype_of
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
    if leaves_of_rank(world_size):
        return False
    return specialized.supports(x, weight, config, scales) and _kernel() is not None


def _slots_descriptor(memory, half_bytes, tiles, slots):
    """Return a descriptor of whole tiles for ``memory``, which begins with half 0. Quarters of a tile are sent."""
    shape = [2, slots * tiles.block_m, tiles.block_n]
    strides = [half_bytes // memory.element_size(), tiles.block_n, 1]
    return descriptor(memory, shape, strides, [1, tiles.block_m // 2, tiles.block_n // 2])


def _arguments(ctx, x, weight, bias, z, descs, rows, plan, tiles, segment_rows, scales=None):
    """Return the arguments and constants of the kernel."""
    (n, k), world_size = weight.shape, len(descs)
    weight, _, is_kn = weight_layout(weight)
    args = (
        ctx, specialized.rows_descriptor(x, 1, x.shape[0], x.numel()),
        specialized.weight_descriptor(weight, is_kn), bias, *scale_pointers(scales), z,
        *descs, *[None] * (shared.MAX_RANKS - world_size),
        rows, n, k, plan, tiles.group_m, segment_rows,
    )
    constants = {
        # As many rows as fit in the registers of the warps that add them.
        "ROWS": 8 if world_size <= 4 else 4, "SPLIT": SPLIT, "RANKS": world_size, "HAS_BIAS": bias is not None,
        "W_IS_KN": is_kn, **specialized.scale_constants(scales), "num_warps": 4,
    }
    return args, constants


def compile(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world_size: int, config: Any,
    scales: Scales | None = None,
) -> None:
    """Compile the kernel for operands that ``supports`` accepts into Triton's cache, without launching it."""
    tiles = config.tiles
    x = rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    memory = x.new_empty(2 * tiles.block_m * tiles.block_n, dtype=out_dtype_of(x, scales))
    descs = [_slots_descriptor(memory, memory.nbytes // 2, tiles, 1)] * world_size
    args, constants = _arguments(ctx, x, weight, bias, memory, descs, 1, 0, tiles, 1, scales)
    _kernel().warmup(*args, grid=(1,), **constants)


def prepare(
    workspace: "Workspace", x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: Any,
    fields: Mapping[str, Any], segment_rows: int, scales: Scales | None = None,
) -> Launch:
    """Return the Launch for operands that ``supports`` accepts; arguments as for ``launch_direct.prepare``."""
    world_size = workspace.world_size
    shared.check_ranks("gemm_rs", world_size)
    n, rows, tiles = weight.shape[0], x.shape[0] // world_size, config.tiles
    pieces, out_dtype = world_size * tiles.count(rows, n), out_dtype_of(x, scales)
    # The same slots and signals as those of the kernel that is not specialized.
    plan = workspace.prepare("gemm_rs", fields, pieces * tiles.block_m * tiles.block_n * out_dtype.itemsize, pieces)
    z = output_spec(x, rows, n, dtype=out_dtype)
    descs = shared.cached_descriptors(
        workspace, ("specialized", out_dtype, pieces), out_dtype,
        lambda memory: _slots_descriptor(memory, workspace.half_bytes, tiles, pieces),
    )
    args, constants = _arguments(workspace.ctx, x, weight, bias, z, descs, rows, plan, tiles, segment_rows, scales)
    fixed = [workspace.ctx, *(desc.base for desc in descs)]
    grid = (gpu.num_sms(x.device) - gpu.spare_sms,)
    operands = (x, weight, bias, *scale_operands(scales))
    return Launch(workspace, _kernel(), grid, args, constants, operands, (z,), fixed)
