"""Launch the warp-specialized kernel of gemm_rs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.common.gemm_operands import scale_operands
from tdkernels.ops.common.scaling import Scales, out_dtype_of
from tdkernels.ops.common.specialized import launch_split_k
from tdkernels.ops.common.specialized.launch_split_k import NO_SPLITS
from tdkernels.ops.dense import launch_direct
from tdkernels.ops.dense import launch_direct_specialized as shared
from tdkernels.ops.dense.gemm_rs.config import has_pairs, num_tiles_in_pairs
from tdkernels.rounding import round_up
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.gluon import optional_kernel
from tdkernels.runtime.kernel_launch import Launch, output_spec

if TYPE_CHECKING:
    from tdkernels.symm.workspace import Workspace


@optional_kernel("gemm_rs: the warp-specialized kernel")
def _kernel():
    from tdkernels.ops.dense.gemm_rs.specialized.kernel import gemm_rs_specialized_kernel

    return gemm_rs_specialized_kernel


def supports(
    x: torch.Tensor, weight: torch.Tensor, config: Any, world_size: int, scales: Scales | None = None
) -> bool:
    """Return whether the kernel runs a config with transport "direct". Ranks may run different kernels."""
    return shared.supports(x, weight, config, world_size, scales) and _kernel() is not None


def _is_in_pairs(x, n, world_size, tiles):
    """Return whether the halves of tiles belong to two ranks.

    This is the case if it is possible, and takes no longer by the model than splitting tiles of one rank along K.
    """
    rows = x.shape[0] // world_size
    if not has_pairs(rows, world_size):
        return False
    in_pairs = launch_split_k.takes(x, num_tiles_in_pairs(rows, n, world_size), may_split=False)
    return in_pairs <= launch_split_k.takes(x, world_size * tiles.count(rows, n), may_split=True)


def compile(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world_size: int, config: Any,
    scales: Scales | None = None,
) -> None:
    """Compile the kernel for operands that ``supports`` accepts into Triton's cache, without launching it."""
    count = world_size * config.tiles.count(x.shape[0] // world_size, weight.shape[0])
    in_pairs = _is_in_pairs(x, weight.shape[0], world_size, config.tiles)
    splits = NO_SPLITS if in_pairs else launch_split_k.compiled(x, count)
    ctx, x, z, descs = shared.operands_to_compile(x, config.tiles, world_size, scales)
    args, constants = shared.arguments(
        ctx, x, weight, bias, z, descs, 1, 0, config.tiles, 1, scales=scales, splits=splits
    )
    constants["PAIRS"] = in_pairs
    _kernel().warmup(*args, grid=(1,), **constants)


def prepare(
    workspace: "Workspace", x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: Any,
    fields: Mapping[str, Any], segment_rows: int, scales: Scales | None = None,
) -> Launch:
    """Return the Launch for operands that ``supports`` accepts; arguments as for ``launch_direct.prepare``."""
    world_size = workspace.world_size
    launch_direct.check_ranks("gemm_rs", world_size)
    n, rows, tiles = weight.shape[0], x.shape[0] // world_size, config.tiles
    pieces, out_dtype = world_size * tiles.count(rows, n), out_dtype_of(x, scales)
    # The same slots and signals as those of the kernel that is not specialized.
    data_bytes = pieces * tiles.block_m * tiles.block_n * out_dtype.itemsize
    in_pairs = _is_in_pairs(x, n, world_size, tiles)
    not_sent = world_size * tiles.block_m // 2 * round_up(n, tiles.block_n) * out_dtype.itemsize if in_pairs else 0
    plan = workspace.prepare(
        "gemm_rs", fields, data_bytes, pieces, launch_split_k.num_flags(config), sent_bytes=data_bytes - not_sent
    )
    splits = NO_SPLITS if in_pairs else launch_split_k.splits_of(x, pieces, 0)
    z = output_spec(x, rows, n, dtype=out_dtype)
    descs = shared.descriptors(workspace, tiles, pieces, out_dtype)
    args, constants = shared.arguments(
        workspace.ctx, x, weight, bias, z, descs, rows, plan, tiles, segment_rows, scales=scales, splits=splits
    )
    items = pieces + pieces // world_size * shared.SPLIT + splits.last_wave.further_items
    constants["PAIRS"] = in_pairs
    constants["trace_ptr"] = recorder.buffer(x.device, items, all_run=not in_pairs, by_warps=True)
    fixed = [workspace.ctx, *(desc.base for desc in descs)]
    operands = (x, weight, bias, *scale_operands(scales))
    grid = (gpu.available_sms(x.device),)
    return Launch(workspace, _kernel(), grid, args, constants, operands, (z, *splits.output_specs), fixed)
