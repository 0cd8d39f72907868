"""Launch the kernel of moe_ag_gemm, the gate-up stage of tp_moe, or compile it ahead of time."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import with_config
from tdkernels.ops.common.scaling import Scales, out_dtype_of
from tdkernels.ops.experts.grouped_gemm.launch import product_constants, rows_descriptor
from tdkernels.ops.experts.grouped_gemm.layout import planes_of, weight_layout
from tdkernels.ops.experts.tp_moe import launch_specialized
from tdkernels.ops.experts.tp_moe.kernel_ag_gemm import BLOCK_COLUMNS, BLOCK_TOKENS, Piece, moe_ag_gemm_kernel
from tdkernels.ops.experts.tp_moe.kernel_route import MAX_STAGES
from tdkernels.ops.experts.tp_moe.launch_rows import rows_of_workspace
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, launch_cached, output_spec
from tdkernels.symm import get_workspace

if TYPE_CHECKING:
    from tdkernels.ops.experts.tp_moe.routing import MoeRouting

_COPY_WORDS = 4096


def problem_fields(
    x: torch.Tensor, w: torch.Tensor, routing: "MoeRouting", activation: str | None,
) -> dict[str, Any]:
    """Return the properties of a launch that must be the same on all ranks.

    The chunks are those of the routing, whose config may differ from that of the launch.
    """
    return {
        "M/W": x.shape[0], "K": x.shape[1], "w": tuple(w.shape), "k": routing.num_choices, "activation": activation,
        "dtype": str(x.dtype), "chunk_rows": routing.chunk_rows,
    }


@dataclass
class Launched:
    """Outputs of a launch.

    Attributes:
        y: Products [R, ·].
        pre: Input of SwiGLU, or None.
        rows: Token of each row, [R, K], or None without ``keep_rows``.
    """

    y: torch.Tensor
    pre: torch.Tensor | None
    rows: torch.Tensor | None = None


def _arguments(ctx, x, w, routing, routed, made, done, plan, num_comm, config, activation, scales=None):
    """Return (arguments of the kernel, its constants).

    ``routed`` is (rows, choices, table and begins of the tiling), ``made`` is Launched.
    """
    tokens, k = x.shape
    tiles, (of_choices, choices, table, begins) = config.tiles, routed
    w, *strides, is_kn = weight_layout(w, activation)
    planes, n = planes_of(w, activation)
    desc, constants = product_constants(k, w, planes, n, strides, is_kn, activation, tiles, scales)
    args = (
        ctx, x, made.rows, rows_descriptor(made.rows, constants, tiles), w, desc,
        *gemm_operands.scale_pointers(scales), of_choices, table, begins, done, made.y, made.pre,
        tokens, choices.shape[0], n, k, *strides,
        routing.slot_rows, plan, num_comm, routing.chunk_rows, routing.num_stages, tiles.group_m,
    )
    return args, {
        "COPY_WORDS": _COPY_WORDS, "PIECE": piece_of(k, routing), "trace_ptr": None, **constants,
    }


def piece_of(width: int, routing: "MoeRouting") -> Piece:
    """Return the Piece that copies or sums rows of ``width`` elements."""
    return Piece(BLOCK_TOKENS, min(next_power_of_2(width), BLOCK_COLUMNS), routing.num_choices)


def _output_specs(x, w, rows, activation, keep, scales):
    """Return Launched with output specs for ``rows`` rows."""
    y = output_spec(x, rows, w.shape[1] // 2 if activation else w.shape[1], dtype=out_dtype_of(x, scales))
    pre = output_spec(x, rows, w.shape[1]) if keep and activation else None
    return Launched(y, pre, output_spec(x, rows, x.shape[1]))


def compile(
    x: torch.Tensor, w: torch.Tensor, routing: "MoeRouting", config: Any, activation: str | None = None,
) -> None:
    """Compile the kernel that ``launch`` would launch for the same operands into Triton's cache."""
    if x.device.type == "cpu":
        return  # interpreted
    x = gemm_operands.rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    made = Launched(x.new_empty(1), None, x.new_empty(1, x.shape[1]))
    tiling = routing.tiling(config.tiles.block_m)
    routed = routing.rows, routing.choices, tiling.table, tiling.begins
    if launch_specialized.supports(x, weight_layout(w, activation)[0], activation, config):
        made = Launched(x.new_empty(1, planes_of(w, activation)[1]), None)
        launch_specialized.compile_ag_gemm(ctx, x, w, routing, routed, made, config, activation)
        return
    args, constants = _arguments(ctx, x, w, routing, routed, made, ctx, 0, config.num_comm_sms, config, activation)
    moe_ag_gemm_kernel.warmup(*args, grid=(1,), **constants)


def launch(
    x: torch.Tensor, w: torch.Tensor, routing: "MoeRouting", config: Any,
    activation: str | None = None, keep: bool = False, keep_rows: bool = False, scales: Scales | None = None,
) -> Launched:
    """Gather the tokens x [M / W, K] of all ranks, and multiply them by the weights of their experts.

    Args:
        x: Tokens of this rank.
        w: Weights [E, N, K] of this rank.
        routing: The MoeRouting.
        config: MoeTpConfig with tiles.
        activation: As in ``moe_ag_gemm``.
        keep: Return the input of SwiGLU as ``pre``.
        keep_rows: Return the token of each row as ``rows``.
        scales: For x and w in fp8: the scales of the rows [R, ·], which are not those of x, and of w.
    """
    workspace = get_workspace(routing.group, x.device, "moe_ag_gemm")
    if keep_rows:
        x = gemm_operands.rows_contiguous(x)  # the rows are copied from the memory that the kernel has read
    tiling = routing.tiling(config.tiles.block_m)
    routed = routing.rows, routing.choices, tiling.table, tiling.begins
    done = torch.zeros(MAX_STAGES.value, dtype=torch.int64, device=x.device)
    differs = activation, keep, gemm_operands.dot_precision(x.dtype)
    key = config, routing.sizes, *differs, None if scales is None else scales.key
    y, *others = launch_cached(
        workspace, key, (x, w, *routed, done, *gemm_operands.scale_pointers(scales)),
        lambda *of: _prepare(workspace, routing, of, config, activation, keep, scales),
        lambda x, w, *others: (gemm_operands.rows_contiguous(x), weight_layout(w, activation)[0], *others),
    )
    pre = others.pop(0) if keep and activation else None
    if not keep_rows:
        return Launched(y, pre)
    return Launched(y, pre, others.pop() if others else rows_of_workspace(x, routing, workspace))


def _prepare(workspace, routing, operands, config, activation, keep, scales):
    """Return the Launch for ``operands``, which include the tensors of the routing. ``routing`` gives only sizes."""
    x, w, *routed, done, scale_x, scale_w = operands
    scales = None if scales is None else scales._replace(x=scale_x, weight=scale_w)
    _, choices, table, _ = routed
    k, tiles = x.shape[1], config.tiles
    made = _output_specs(x, w, choices.shape[0], activation, keep, scales)
    to_make = [made.y] if made.pre is None else [made.y, made.pre]
    num_comm = config.num_comm_sms if routing.world_size > 1 else 0
    half_bytes = routing.world_size * routing.slot_rows * k * x.element_size() if num_comm else 256
    fields = problem_fields(x, w, routing, activation)
    fields = with_config(fields if scales is None else {**fields, **scales.fields}, config)
    plan = workspace.prepare(
        "moe_ag_gemm", fields, half_bytes, routing.world_size * routing.num_chunks,
        launch_specialized.num_flags(routing, config),
    )
    if launch_specialized.supports(x, w, activation, config, scales):
        args, constants = launch_specialized.ag_gemm_arguments(
            workspace.ctx, x, w, routing, routed, made, plan, launch_specialized.num_pushing(num_comm, x.device),
            config, activation, scales,
        )
        kernel, grid = launch_specialized.ag_gemm_kernel(), launch_specialized.grid(x.device)
        return Launch(workspace, kernel, grid, args, constants, operands, to_make, [workspace.ctx])
    args, constants = _arguments(
        workspace.ctx, x, w, routing, routed, made, done, plan, num_comm, config, activation, scales
    )
    tiles_n = cdiv(planes_of(w, activation)[1], constants["PRODUCT"].block_n)
    blocks = cdiv(routing.chunk_rows, BLOCK_TOKENS) * cdiv(k, constants["PIECE"].columns)
    most = num_comm + table.shape[0] * tiles_n + routing.world_size * routing.num_chunks * blocks
    grid = (min(most, gpu.resident_programs(x.device, tiles, x.dtype)),)
    turns = cdiv(routing.num_chunks * (routing.world_size - 1), num_comm) if num_comm else 0
    constants["trace_ptr"] = recorder.buffer(x.device, most, turns, all_run=False)
    outputs = [*to_make, made.rows]
    return Launch(workspace, moe_ag_gemm_kernel, grid, args, constants, operands, outputs, [workspace.ctx])
