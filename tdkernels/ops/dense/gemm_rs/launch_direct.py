"""Launch the "direct" kernel of gemm_rs, or compile it ahead of time."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.common import gemm_operands
from tdkernels.ops.dense import launch_direct as shared
from tdkernels.ops.dense.gemm_rs.kernel_direct import gemm_rs_direct_kernel
from tdkernels.runtime import recorder
from tdkernels.runtime.kernel_launch import Launch, output_spec

if TYPE_CHECKING:
    from tdkernels.symm.workspace import Workspace

SPLIT = 4  # parts of a tile whose partials are added at the end


def _arguments(ctx, x, weight, bias, z, descs, rows, plan, world_size, config, num_gemm, whole):
    """Return the kernel's arguments and constants; ``descs``: see ``shared.descriptors``, None without TMA."""
    tiles = config.tiles
    n, k = weight.shape
    weight, stride_w, x_desc, w_desc, constants = gemm_operands.product(x, weight, bias, tiles)
    descs = [] if descs is None else descs
    args = (
        ctx, x, x_desc, weight, w_desc, bias, z, *descs, *[None] * (shared.MAX_RANKS - len(descs)),
        rows, n, k, stride_w, plan, tiles.group_m, num_gemm, whole,
    )
    slice_size = shared.slice_elements(tiles, x.dtype, world_size, SPLIT)
    return args, {"SLICE": slice_size, "SPLIT": SPLIT, "RANKS": world_size, **constants}


def compile(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world_size: int, config: Any,
) -> None:
    """Compile the kernel for these operands into Triton's cache, without launching it."""
    x = gemm_operands.rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    rows, z, descs = x.shape[0] // world_size, x.new_empty(1), None
    if gemm_operands.tma_fits(x, weight):
        descs = shared.descriptors_for_compiling(x, config.tiles, world_size)
    args, constants = _arguments(ctx, x, weight, bias, z, descs, rows, 0, world_size, config, 1, 0)
    gemm_rs_direct_kernel.warmup(*args, grid=(1,), **constants)


def prepare(
    workspace: "Workspace", x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: Any,
    fields: Mapping[str, Any],
) -> Launch:
    """Return the Launch for normalized operands; ``fields`` as for ``Workspace.prepare``.

    Raises:
        ValueError: If the group has more ranks than the kernel supports.
    """
    world_size = workspace.world_size
    shared.check_ranks("gemm_rs", world_size)
    n = weight.shape[0]
    tiles = config.tiles
    rows = x.shape[0] // world_size
    count = tiles.count(rows, n)  # tiles of one shard
    pieces = world_size * count
    plan = workspace.prepare("gemm_rs", fields, pieces * tiles.block_m * tiles.block_n * x.element_size(), pieces)
    z = output_spec(x, rows, n)
    descs = shared.descriptors(workspace, x.dtype, tiles, pieces) if gemm_operands.tma_fits(x, weight) else None
    num_gemm, fit = shared.num_multiplying(tiles, pieces, x.device, x.dtype)
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
