"""Launch the kernels of gemm_rs, or compile them ahead of time."""

from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import with_config
from tdkernels.ops.common.gemm_operands import bind_product, launch_product
from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.scaling import Scales, out_dtype_of
from tdkernels.ops.common.staging import COPY_WORDS
from tdkernels.ops.dense import launch_one_shot as dense_launch_one_shot
from tdkernels.ops.dense.gemm_rs import launch_direct, launch_multinode, launch_specialized, pipelined
from tdkernels.ops.dense.gemm_rs.kernel import gemm_rs_kernel
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, output_spec
from tdkernels.symm import get_workspace

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.ops.dense.gemm_rs.config import GemmRsConfig


def problem_fields(x: torch.Tensor, weight: torch.Tensor, scales: Scales | None = None) -> dict[str, Any]:
    """Return the properties of a call that must be equal on all ranks, before a config is selected."""
    fields = {"M": x.shape[0], "N": weight.shape[0], "K/W": x.shape[1], "dtype": str(x.dtype)}
    return fields if scales is None else {**fields, **scales.fields}


def segment_fields(segment_rows: int | None) -> dict[str, Any]:
    """Return the properties of the order of the rows that must be equal on all ranks. None: the rows of each owner."""
    return {} if segment_rows is None else {"rows of a segment": segment_rows}


def _arguments(ctx, x, weight, bias, z, stage, rows, lag, plan, world_size, config, segment_rows, scales):
    """Return the kernel's arguments and constants."""
    tiles = config.tiles
    n, k = weight.shape
    weight, stride_w, x_desc, w_desc, constants = gemm_operands.product(x, weight, bias, tiles, scales=scales)
    args = (
        ctx, x, x_desc, weight, w_desc, bias, *gemm_operands.scale_pointers(scales), z, stage,
        rows, n, k, stride_w, lag, plan, config.item_tiles, tiles.group_m, segment_rows,
    )
    return args, {"COPY_WORDS": COPY_WORDS, "RANKS": world_size, **constants}


def compile(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world_size: int, config: "GemmRsConfig",
    num_nodes: int = 1, scales: Scales | None = None,
) -> None:
    """Compile the kernel that ``launch`` would launch for these operands, into Triton's cache, without launching it."""
    if x.device.type == "cpu" or config.method != "fused":
        return  # the CPU interprets; the other methods have no kernel that depends on the config
    if num_nodes > 1:
        return launch_multinode.compile(x, weight, bias, world_size, config, num_nodes)
    if config.transport == "direct" and launch_specialized.supports(x, weight, config, world_size, scales):
        return launch_specialized.compile(x, weight, bias, world_size, config, scales)
    if config.transport == "direct":
        return launch_direct.compile(x, weight, bias, world_size, config, scales)
    if config.transport == "one_shot":
        return dense_launch_one_shot.compile(x, weight, bias, world_size, config, scatters=True, scales=scales)
    x = gemm_operands.rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    z, stage = x.new_empty(1, dtype=out_dtype_of(x, scales)), x.new_empty(1, dtype=out_dtype_of(x, scales))
    rows = x.shape[0]
    args, constants = _arguments(ctx, x, weight, bias, z, stage, rows, 0, 0, world_size, config, rows, scales)
    gemm_rs_kernel.warmup(*args, grid=(1,), **constants)


def launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: "dist.ProcessGroup",
    config: "GemmRsConfig", segment_rows: int | None = None, scales: Scales | None = None,
    reordered: int | None = None,
) -> torch.Tensor:
    """Run gemm_rs on 2-D operands with method "fused" or "parts"; return z.

    Args:
        segment_rows: The rows of x are [B, W, segment_rows], see ``supports_segments``. None: [W, M / W].
        scales: The scales of scaled operands.
        reordered: The rows of x are [W, M / W], and were [B, W, reordered]: peers must have reordered theirs, too.
    """
    if config.method == "parts":
        fields = with_config({**problem_fields(x, weight, scales), **segment_fields(reordered)}, config)
        return pipelined.launch(x, weight, bias, group, config, fields, scales)
    workspace = _workspace(x, group, config)
    z, *_ = launch_product(workspace, x, weight, bias, config, _prepare, segment_rows, reordered, scales=scales)
    return z


def supports_segments(config: "GemmRsConfig", segment_rows: int, group: "dist.ProcessGroup") -> bool:
    """Return whether the kernel can read x [B, W, segment_rows, K]: no tile has rows of two segments."""
    if config.method != "fused" or config.transport == "one_shot" or spans_nodes(group):
        return False
    return config.tiles is not None and segment_rows % config.tiles.block_m == 0


def bind(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: "dist.ProcessGroup",
    config: "GemmRsConfig", segment_rows: int | None = None, scales: Scales | None = None,
    reordered: int | None = None,
) -> Launch | None:
    """Return the Launch of a fused call; None if the call copies an operand. Arguments as for ``launch``."""
    if segment_rows is not None and not supports_segments(config, segment_rows, group):
        return None
    workspace, more = _workspace(x, group, config), (segment_rows, reordered)
    return bind_product(workspace, x, weight, bias, config, _prepare, *more, scales=scales)


def _workspace(x, group, config):
    across = spans_nodes(group)
    name = "gemm_rs one shot" if config.transport == "one_shot" and not across else "gemm_rs"
    return get_workspace(group, x.device, name, across_nodes=across)


def _prepare(workspace, x, weight, bias, config, segment_rows, reordered, scales=None):
    """Return the Launch for normalized operands."""
    order = segment_fields(reordered if segment_rows is None else segment_rows)
    fields = with_config({**problem_fields(x, weight, scales), **order}, config)
    if segment_rows is None:
        segment_rows = max(x.shape[0] // workspace.world_size, 1)
    if workspace.group.topology.num_nodes > 1:
        return launch_multinode.prepare(workspace, x, weight, bias, config, fields)
    if config.transport == "direct":
        if launch_specialized.supports(x, weight, config, workspace.world_size, scales):
            return launch_specialized.prepare(workspace, x, weight, bias, config, fields, segment_rows, scales)
        return launch_direct.prepare(workspace, x, weight, bias, config, fields, segment_rows, scales)
    if config.transport == "one_shot":
        return dense_launch_one_shot.prepare(workspace, "gemm_rs", x, weight, bias, config, fields, True, scales)
    n, out_dtype = weight.shape[0], out_dtype_of(x, scales)
    world_size = workspace.world_size
    rows = x.shape[0] // world_size
    tiles = config.tiles
    count = tiles.count(rows, n)  # tiles of one shard
    items = cdiv(count, config.item_tiles)
    # Periods between computing a tile group and copying it out: a wave of tiles, so that the tiles are ready when the
    # work item that copies them starts, but at most the periods of a shard.
    lag = min(cdiv(gpu.num_sms(x.device), config.item_tiles), items)
    slots = items * config.item_tiles
    plan = workspace.prepare(
        "gemm_rs", fields, world_size * slots * tiles.block_m * tiles.block_n * out_dtype.itemsize, world_size * items,
        num_flags=(world_size - 1) * slots,
    )
    stage = output_spec(x, (world_size - 1) * slots * tiles.block_m * tiles.block_n, dtype=out_dtype)
    z = output_spec(x, rows, n, dtype=out_dtype)
    args, constants = _arguments(
        workspace.ctx, x, weight, bias, z, stage, rows, lag, plan, world_size, config, segment_rows, scales
    )
    pieces = world_size * items * (1 + config.item_tiles)
    programs = min(pieces, gpu.resident_programs(x.device, tiles, x.dtype))
    constants["trace_ptr"] = recorder.buffer(x.device, pieces)
    operands, made = (x, weight, bias, *gemm_operands.scale_operands(scales)), (z, stage)
    return Launch(workspace, gemm_rs_kernel, (programs,), args, constants, operands, made, [workspace.ctx])
