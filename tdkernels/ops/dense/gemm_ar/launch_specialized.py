"""Launch the warp-specialized kernel of gemm_ar."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.common.gemm_operands import scale_operands
from tdkernels.ops.common.scaling import Scales, out_dtype_of
from tdkernels.ops.common.specialized import launch_split_k
from tdkernels.ops.dense import launch_direct
from tdkernels.ops.dense import launch_direct_specialized as shared
from tdkernels.rounding import cdiv, round_up
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.gluon import optional_kernel
from tdkernels.runtime.kernel_launch import Launch, output_spec

if TYPE_CHECKING:
    from tdkernels.symm.workspace import Workspace

_PARTS = 4  # parts of a peer's tile that are received as separate work items
# Waves of tiles between adding the tiles of a bundle and receiving those of the peers, so that the sums have arrived.
_WAVES = 2


@optional_kernel("gemm_ar: the warp-specialized kernel")
def _kernel():
    from tdkernels.ops.dense.gemm_ar.specialized.kernel import gemm_ar_specialized_kernel

    return gemm_ar_specialized_kernel


def supports(
    x: torch.Tensor, weight: torch.Tensor, config: Any, world_size: int, scales: Scales | None = None
) -> bool:
    """Return whether the kernel runs a config with transport "direct". Ranks may run different kernels."""
    return shared.supports(x, weight, config, world_size, scales) and _kernel() is not None


def compile(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world_size: int, config: Any,
    scales: Scales | None = None,
) -> None:
    """Compile the kernel for operands that ``supports`` accepts into Triton's cache, without launching it."""
    splits = launch_split_k.compiled(x, round_up(config.tiles.count(x.shape[0], weight.shape[0]), world_size))
    ctx, x, z, descs = shared.operands_to_compile(x, config.tiles, world_size, scales)
    args, constants = arguments(ctx, x, weight, bias, z, descs, 1, 0, config.tiles, 1, scales, splits)
    _kernel().warmup(*args, grid=(1,), **constants)


def arguments(ctx, x, weight, bias, z, descs, rows, plan, tiles, delay, scales=None, splits=launch_split_k.NO_SPLITS):
    """Return the arguments and constants of the kernel; see ``launch_direct_specialized.arguments``."""
    args, constants = shared.arguments(
        ctx, x, weight, bias, z, descs, rows, plan, tiles, delay, scales=scales, splits=splits
    )
    return args, {**constants, "PARTS": _PARTS}


def prepare(
    workspace: "Workspace", x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: Any,
    fields: Mapping[str, Any], scales: Scales | None = None,
) -> Launch:
    """Return the Launch for operands that ``supports`` accepts; arguments as for ``launch_direct.prepare``."""
    world_size, tiles = workspace.world_size, config.tiles
    launch_direct.check_ranks("gemm_ar", world_size)
    m, n, out_dtype = x.shape[0], weight.shape[0], out_dtype_of(x, scales)
    bundles = cdiv(tiles.count(m, n), world_size)
    slots = 2 * bundles * world_size
    # The same slots, signals and flags as those of the kernel that is not specialized.
    tile_bytes = tiles.block_m * tiles.block_n * out_dtype.itemsize
    plan = workspace.prepare("gemm_ar", fields, slots * tile_bytes, slots, bundles + launch_split_k.num_flags(config))
    z = output_spec(x, m, n, dtype=out_dtype)
    descs = shared.descriptors(workspace, tiles, slots, out_dtype)
    programs = gpu.available_sms(x.device)
    splits = launch_split_k.splits_of(x, bundles * world_size, bundles)
    delay = min(_WAVES * cdiv(programs, world_size), bundles)
    args, constants = arguments(workspace.ctx, x, weight, bias, z, descs, m, plan, tiles, delay, scales, splits)
    items = bundles * (world_size + shared.SPLIT + (world_size - 1) * _PARTS) + splits.last_wave.further_items
    constants["trace_ptr"] = recorder.buffer(x.device, items, by_warps=True)
    fixed = [workspace.ctx, *(desc.base for desc in descs)]
    operands = (x, weight, bias, *scale_operands(scales))
    return Launch(workspace, _kernel(), (programs,), args, constants, operands, (z, *splits.output_specs), fixed)
