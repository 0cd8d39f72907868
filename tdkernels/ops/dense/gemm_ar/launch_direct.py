"""Launch the "direct" kernel of gemm_ar, or compile it ahead of time."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.invariance import check_leaves
from tdkernels.ops.common.gemm_operands import scale_operands
from tdkernels.ops.common.scaling import Scales, out_dtype_of
from tdkernels.ops.common.specialized import launch_split_k
from tdkernels.ops.dense import launch_direct as shared
from tdkernels.ops.dense.gemm_ar.kernel_direct import gemm_ar_direct_kernel
from tdkernels.rounding import cdiv
from tdkernels.runtime import recorder
from tdkernels.runtime.kernel_launch import Launch, output_spec

if TYPE_CHECKING:
    from tdkernels.symm.workspace import Workspace

SPLIT = 2  # parts of a tile that are added and sent as separate work items


def compile(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world_size: int, config: Any,
    scales: Scales | None = None,
) -> None:
    """Compile the kernel for these operands into Triton's cache, without launching it."""
    shared.compile(gemm_ar_direct_kernel, x, weight, bias, world_size, config.tiles, SPLIT, 1, scales=scales)


def _programs(tiles, pieces, num_comm, device, dtype):
    """Return (number of programs that multiply, number of further programs that can run at the end)."""
    num_gemm, fit = shared.num_multiplying(tiles, pieces, device, dtype)
    return max(min(num_gemm, fit - num_comm), 1), fit


def prepare(
    workspace: "Workspace", x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: Any,
    fields: Mapping[str, Any], scales: Scales | None = None,
) -> Launch:
    """Return the Launch for normalized operands; ``fields`` as for ``Workspace.prepare``.

    Raises:
        ValueError: If the group has more ranks than the kernel supports; see also ``Workspace.prepare`` and
            ``invariance.check_leaves``.
    """
    world_size = workspace.world_size
    shared.check_ranks("gemm_ar", world_size)
    m, n, out_dtype = x.shape[0], weight.shape[0], out_dtype_of(x, scales)
    tiles = config.tiles
    bundles = cdiv(tiles.count(m, n), world_size)
    slots = 2 * bundles * world_size
    tile_bytes = tiles.block_m * tiles.block_n * out_dtype.itemsize
    plan = workspace.prepare("gemm_ar", fields, slots * tile_bytes, slots, bundles + launch_split_k.num_flags(config))
    # After ``prepare``, which compares K: otherwise peers with another K would wait for the launch.
    check_leaves("gemm_ar", world_size, weight, config.tiles.block_k)
    z = output_spec(x, m, n, dtype=out_dtype)
    descs = shared.descriptors(workspace, x, weight, tiles, slots, out_dtype)
    num_gemm, fit = _programs(tiles, bundles * world_size, config.num_comm_sms, x.device, x.dtype)
    args, constants = shared.arguments(
        workspace.ctx, x, weight, bias, z, descs, m, plan, world_size, tiles, SPLIT, num_gemm, scales=scales
    )
    items = bundles * (SPLIT + world_size - 1)
    constants["trace_ptr"] = recorder.buffer(x.device, bundles * world_size + items)
    fixed = [workspace.ctx, *(desc.base for desc in descs)]
    operands = (x, weight, bias, *scale_operands(scales))
    grid = (num_gemm + min(items, fit),)
    return Launch(workspace, gemm_ar_direct_kernel, grid, args, constants, operands, (z,), fixed)
