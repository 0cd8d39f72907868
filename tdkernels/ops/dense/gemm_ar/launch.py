"""Launch the kernels of gemm_ar, or compile them ahead of time."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import with_config
from tdkernels.ops.common.gemm_operands import bind_product, launch_product
from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.scaling import Scales, out_dtype_of
from tdkernels.ops.common.staging import COPY_WORDS
from tdkernels.ops.dense import launch_one_shot as dense_launch_one_shot
from tdkernels.ops.dense.gemm_ar import launch_direct, launch_multinode, launch_specialized
from tdkernels.ops.dense.gemm_ar.kernel import gemm_ar_kernel
from tdkernels.ops.dense.gemm_ar.tile import slice_columns
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, output_spec
from tdkernels.symm import get_workspace

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.ops.dense.gemm_ar.config import GemmArConfig


def problem_fields(x: torch.Tensor, weight: torch.Tensor, scales: Scales | None = None) -> dict[str, Any]:
    """Return the properties of a call that must be equal on all ranks, before a config is selected."""
    fields = {"M": x.shape[0], "N": weight.shape[0], "K/W": x.shape[1], "dtype": str(x.dtype)}
    return fields if scales is None else {**fields, **scales.fields}


def bias_fields(bias: torch.Tensor | None) -> dict[str, Any]:
    """Return the properties of the bias that must be equal on all ranks: the owner of a tile adds the bias."""
    return {"has_bias": bias is not None}


@dataclass(frozen=True)
class _Schedule:
    """Number of rounds, and delays between the roles of the kernel (see ``kernel``).

    ``lag`` is in tile groups, ``reduce_after`` and ``receive_after`` in rounds.
    """

    rounds: int
    lag: int
    reduce_after: int
    receive_after: int

    @classmethod
    def of(cls, tiles: int, item_tiles: int, world_size: int, num_sms: int) -> "_Schedule":
        """Return the schedule for an output of ``tiles`` tiles."""
        items = cdiv(tiles, item_tiles)
        rounds = cdiv(items, world_size)
        # A wave of tiles, so that the tiles of a group are ready when the work item that copies them out starts.
        lag = min(cdiv(num_sms, item_tiles), rounds * world_size)
        # The last partial is sent a wave later. An item that starts too early keeps an SM waiting. An item that starts
        # late costs nothing, except at the end, when nothing else is left to do. So one more wave is left for partials
        # to arrive, and another one for sums.
        wave = cdiv(lag, world_size)
        return cls(rounds, lag, 2 * wave + 1, 3 * wave + 2)

    def num_pieces(self, item_tiles: int, world_size: int) -> int:
        """Return the number of work items."""
        return (self.rounds + self.receive_after) * world_size * (1 + 2 * item_tiles)


def _arguments(ctx, x, weight, bias, z, stage, schedule, plan, world_size, config, scales):
    """Return the kernel's arguments and constants."""
    tiles = config.tiles
    m, k = x.shape
    n = weight.shape[0]
    weight, stride_w, x_desc, w_desc, constants = gemm_operands.product(x, weight, bias, tiles, scales=scales)
    args = (
        ctx, x, x_desc, weight, w_desc, bias, *gemm_operands.scale_pointers(scales), z, stage,
        m, n, k, stride_w, schedule.lag, schedule.reduce_after, schedule.receive_after, plan,
        config.item_tiles, tiles.group_m,
    )
    return args, {"COPY_WORDS": COPY_WORDS, "SLICE_N": slice_columns(tiles), "RANKS": world_size, **constants}


def compile(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world_size: int, config: "GemmArConfig",
    num_nodes: int = 1, scales: Scales | None = None,
) -> None:
    """Compile the kernel that ``launch`` would launch for these operands, into Triton's cache, without launching it."""
    if x.device.type == "cpu":
        return  # the CPU interprets
    if num_nodes > 1:
        launch_multinode.compile(x, weight, bias, world_size, config, num_nodes)
    elif config.exchange == "one_shot":
        dense_launch_one_shot.compile(x, weight, bias, world_size, config, scatters=False, scales=scales)
    elif config.transport == "direct" and launch_specialized.supports(x, weight, config, world_size, scales):
        launch_specialized.compile(x, weight, bias, world_size, config, scales)
    elif config.transport == "direct":
        launch_direct.compile(x, weight, bias, world_size, config, scales)
    else:
        x = gemm_operands.rows_contiguous(x)
        ctx = torch.empty(1, dtype=torch.int64, device=x.device)
        z, stage = x.new_empty(1, dtype=out_dtype_of(x, scales)), x.new_empty(1, dtype=out_dtype_of(x, scales))
        args, constants = _arguments(
            ctx, x, weight, bias, z, stage, _Schedule(1, 1, 1, 1), 0, world_size, config, scales
        )
        gemm_ar_kernel.warmup(*args, grid=(1,), **constants)


def launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: "dist.ProcessGroup",
    config: "GemmArConfig", scales: Scales | None = None,
) -> torch.Tensor:
    """Run gemm_ar on 2-D operands with method "fused"; return z. ``scales``: the scales of scaled operands."""
    z, *_ = launch_product(_workspace(x, group, config), x, weight, bias, config, _prepare, scales=scales)
    return z


def bind(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: "dist.ProcessGroup",
    config: "GemmArConfig", scales: Scales | None = None,
) -> Launch | None:
    """Return the Launch of a fused call; None if the call copies an operand. Arguments as for ``launch``."""
    return bind_product(_workspace(x, group, config), x, weight, bias, config, _prepare, scales=scales)


def _workspace(x, group, config):
    across = spans_nodes(group)
    name = "gemm_ar"
    if not across and config.exchange == "one_shot":
        name = "gemm_ar one shot"
    elif not across and config.transport == "direct":
        name = "gemm_ar direct"
    return get_workspace(group, x.device, name, across_nodes=across)


def _prepare(workspace, x, weight, bias, config, scales=None):
    """Return the Launch for normalized operands."""
    fields = with_config({**problem_fields(x, weight, scales), **bias_fields(bias)}, config)
    if workspace.group.topology.num_nodes > 1:
        return launch_multinode.prepare(workspace, x, weight, bias, config, fields)
    if config.exchange == "one_shot":
        return dense_launch_one_shot.prepare(workspace, "gemm_ar", x, weight, bias, config, fields, False, scales)
    if config.transport == "direct":
        specializes = launch_specialized.supports(x, weight, config, workspace.world_size, scales)
        module = launch_specialized if specializes else launch_direct
        return module.prepare(workspace, x, weight, bias, config, fields, scales)
    m, n, out_dtype = x.shape[0], weight.shape[0], out_dtype_of(x, scales)
    world_size = workspace.world_size
    tiles = config.tiles
    count = tiles.count(m, n)
    schedule = _Schedule.of(count, config.item_tiles, world_size, gpu.num_sms(x.device))
    slots = schedule.rounds * world_size * config.item_tiles  # tiles; the last group is padded
    tile_bytes = tiles.block_m * tiles.block_n * out_dtype.itemsize
    plan = workspace.prepare(
        "gemm_ar", fields, 2 * slots * tile_bytes, world_size * schedule.rounds + count,
        num_flags=slots,
    )
    stage = output_spec(x, slots * tiles.block_m * tiles.block_n, dtype=out_dtype)
    z = output_spec(x, m, n, dtype=out_dtype)
    args, constants = _arguments(workspace.ctx, x, weight, bias, z, stage, schedule, plan, world_size, config, scales)
    pieces = schedule.num_pieces(config.item_tiles, world_size)
    programs = min(pieces, gpu.resident_programs(x.device, tiles, x.dtype))
    constants["trace_ptr"] = recorder.buffer(x.device, pieces, 1)
    operands, made = (x, weight, bias, *gemm_operands.scale_operands(scales)), (z, stage)
    return Launch(workspace, gemm_ar_kernel, (programs,), args, constants, operands, made, [workspace.ctx])
