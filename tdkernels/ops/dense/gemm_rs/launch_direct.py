"""Launch the "direct" kernel of gemm_rs, or compile it ahead of time."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.invariance import check_leaves
from tdkernels.ops.common.gemm_operands import scale_operands
from tdkernels.ops.common.scaling import Scales, out_dtype_of
from tdkernels.ops.common.specialized import launch_split_k
from tdkernels.ops.dense import launch_direct as shared
from tdkernels.ops.dense.gemm_rs.kernel_direct import gemm_rs_direct_kernel
from tdkernels.runtime import recorder
from tdkernels.runtime.kernel_launch import Launch, output_spec

if TYPE_CHECKING:
    from tdkernels.symm.workspace import Workspace

SPLIT = 4  # parts of a tile whose partials are added at the end


def compile(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world_size: int, config: Any,
    scales: Scales | None = None,
) -> None:
    """Compile the kernel for these operands into Triton's cache, without launching it."""
    shared.compile(gemm_rs_direct_kernel, x, weight, bias, world_size, config.tiles, SPLIT, 1, 0, 1, scales=scales)


def prepare(
    workspace: "Workspace", x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: Any,
    fields: Mapping[str, Any], segment_rows: int, scales: Scales | None = None,
) -> Launch:
    """Return the Launch for normalized operands; ``fields`` as for ``Workspace.prepare``.

    ``segment_rows`` as for ``launch.launch``, but not None.

    Raises:
        ValueError: If the group has more ranks than the kernel supports; see also ``Workspace.prepare`` and
            ``invariance.check_leaves``.
    """
    world_size = workspace.world_size
    shared.check_ranks("gemm_rs", world_size)
    n, out_dtype = weight.shape[0], out_dtype_of(x, scales)
    tiles = config.tiles
    rows = x.shape[0] // world_size
    count = tiles.count(rows, n)  # tiles of one shard
    pieces = world_size * count
    data_bytes = pieces * tiles.block_m * tiles.block_n * out_dtype.itemsize
    plan = workspace.prepare("gemm_rs", fields, data_bytes, pieces, launch_split_k.num_flags(config))
    # After ``prepare``, which compares K: otherwise peers with another K would wait for the launch.
    check_leaves("gemm_rs", world_size, weight, config.tiles.block_k)
    z = output_spec(x, rows, n, dtype=out_dtype)
    descs = shared.descriptors(workspace, x, weight, tiles, pieces, out_dtype)
    num_gemm, fit = shared.num_multiplying(tiles, pieces, x.device, x.dtype)
    # Whole tiles as long as few programs add, then parts, so that there is work for all SMs when the GEMM is done.
    whole = count // 2
    args, constants = shared.arguments(
        workspace.ctx, x, weight, bias, z, descs, rows, plan, world_size, tiles, SPLIT, num_gemm, whole,
        segment_rows, scales=scales,
    )
    items = whole + (count - whole) * SPLIT
    constants["trace_ptr"] = recorder.buffer(x.device, pieces + items)
    fixed = [workspace.ctx, *(desc.base for desc in descs)]
    operands = (x, weight, bias, *scale_operands(scales))
    grid = (num_gemm + min(items, fit),)
    return Launch(workspace, gemm_rs_direct_kernel, grid, args, constants, operands, (z,), fixed)
