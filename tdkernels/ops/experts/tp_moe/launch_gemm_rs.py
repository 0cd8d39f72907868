"""Launch the kernel of moe_gemm_rs, the down stage of tp_moe, or compile it ahead of time."""

from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.invariance import is_batch_invariant
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import with_config
from tdkernels.ops.common.scaling import Scales, out_dtype_of
from tdkernels.ops.experts.grouped_gemm.launch import product_constants, rows_descriptor
from tdkernels.ops.experts.grouped_gemm.layout import planes_of, weight_layout
from tdkernels.ops.experts.tp_moe import launch_specialized
from tdkernels.ops.experts.tp_moe.kernel_gemm_rs import ALIGN, moe_gemm_rs_kernel
from tdkernels.ops.experts.tp_moe.kernel_route import MAX_STAGES
from tdkernels.ops.experts.tp_moe.launch_ag_gemm import piece_of, problem_fields
from tdkernels.rounding import cdiv, round_up
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, launch_cached, output_spec
from tdkernels.symm import get_workspace

if TYPE_CHECKING:
    from tdkernels.ops.experts.tp_moe.kernel_ag_gemm import Piece
    from tdkernels.ops.experts.tp_moe.routing import MoeRouting

# With fewer pieces than _LEAST_PIECES some warps of the warp-specialized kernel have nothing to add, so pieces have
# _NARROW columns. Their work items take 2 to 3 us instead of 5 (H200, 128 tokens on 8 ranks, bf16). The portable kernel
# has the same pieces, since ranks may run either of them; it was not measured.
_LEAST_PIECES, _NARROW = 128, 256


def sum_piece_of(n: int, routing: "MoeRouting") -> "Piece":
    """Return the Piece that sums rows of n elements. It must be the same on all ranks."""
    piece = piece_of(n, routing)
    pieces = routing.world_size * cdiv(routing.tokens, piece.tokens) * cdiv(n, piece.columns)
    return piece._replace(columns=min(piece.columns, _NARROW)) if pieces < _LEAST_PIECES else piece


def _arguments(ctx, h, w, routing, routed, weights, done, out, z, plan, config, scales=None):
    """Return (arguments of the kernel, its constants). ``routed`` is (rows, table and begins of the tiling)."""
    k, tiles = h.shape[1], config.tiles
    w, *strides, is_kn = weight_layout(w)
    planes, n = planes_of(w, None)
    desc, constants = product_constants(k, w, planes, n, strides, is_kn, None, tiles, scales)
    args = (
        ctx, h, rows_descriptor(h, constants, tiles), w, desc, *gemm_operands.scale_pointers(scales), routed[0],
        weights, *routed[1:], done, out, z, routing.tokens, h.shape[0], n, k, *strides, plan, routing.chunk_rows,
        routing.num_stages, tiles.group_m,
    )
    return args, {
        "RANKS": routing.world_size, "PIECE": sum_piece_of(n, routing), "ROUND_OWN": is_batch_invariant(),
        "trace_ptr": None, **constants,
    }


def compile(
    h: torch.Tensor, w: torch.Tensor, routing: "MoeRouting", weights: torch.Tensor | None,
    config: Any,
) -> None:
    """Compile the kernel that ``launch`` would launch for the same operands into Triton's cache."""
    if h.device.type == "cpu":
        return  # interpreted
    h = gemm_operands.rows_contiguous(h)
    ctx = torch.empty(1, dtype=torch.int64, device=h.device)
    tiling, empty = routing.tiling(config.tiles.block_m), h.new_empty(1)
    routed = routing.rows, tiling.table, tiling.begins
    if launch_specialized.supports_gemm_rs(h, weight_layout(w)[0], routing.world_size, config):
        out = h.new_empty(1, w.shape[1])
        launch_specialized.compile_gemm_rs(
            ctx, h, w, routing, routed, weights, out, sum_piece_of(w.shape[1], routing), config
        )
        return
    args, constants = _arguments(ctx, h, w, routing, routed, weights, ctx, empty, empty, 0, config)
    moe_gemm_rs_kernel.warmup(*args, grid=(1,), **constants)


def launch(
    h: torch.Tensor, w: torch.Tensor, routing: "MoeRouting", weights: torch.Tensor | None,
    config: Any, scales: Scales | None = None,
) -> torch.Tensor:
    """Return z [M / W, N]: for each token of this rank, the sum of weight * h[row] @ w[expert].T.

    The sum is over ranks and assignments.

    Args:
        h: Rows [R, K].
        w: Weights [E, N, K] of this rank.
        routing: The MoeRouting.
        weights: Routing weights of all ranks, [M, k] fp32, or None for 1.
        config: MoeTpConfig with tiles.
        scales: The scales of h and w in fp8.
    """
    workspace = get_workspace(routing.group, h.device, "moe_gemm_rs")
    tiling = routing.tiling(config.tiles.block_m)
    routed = routing.rows, tiling.table, tiling.begins
    done = torch.zeros(MAX_STAGES.value, dtype=torch.int64, device=h.device)
    key = config, routing.sizes, gemm_operands.dot_precision(h.dtype), None if scales is None else scales.key
    z, _ = launch_cached(
        workspace, key, (h, w, *routed, weights, done, *gemm_operands.scale_pointers(scales)),
        lambda *of: _prepare(workspace, routing, of, config, scales),
        lambda h, w, *others: (gemm_operands.rows_contiguous(h), weight_layout(w)[0], *others),
    )
    return z


def _prepare(workspace, routing, operands, config, scales):
    """Return the Launch for ``operands``, which include the tensors of the routing. ``routing`` gives only sizes."""
    h, w, *routed, weights, done, scale_h, scale_w = operands
    scales = None if scales is None else scales._replace(x=scale_h, weight=scale_w)
    _, table, _ = routed
    tokens, n, tiles = routing.tokens, w.shape[1], config.tiles
    z, out = (output_spec(h, rows, n, dtype=out_dtype_of(h, scales)) for rows in (tokens, h.shape[0]))
    piece = sum_piece_of(n, routing)
    of_shard = routing.num_chunks * (routing.chunk_rows // piece.tokens) * cdiv(n, piece.columns)
    fields = {**problem_fields(h, w, routing, None), "M/W": tokens, "weighted": weights is not None}
    fields = fields if scales is None else {**fields, **scales.fields}
    plan = workspace.prepare(
        "moe_gemm_rs", with_config(fields, config),
        routing.world_size * round_up(tokens * n * z.element_size(), ALIGN.value), routing.world_size * of_shard,
    )
    if launch_specialized.supports_gemm_rs(h, w, routing.world_size, config, scales):
        args, constants = launch_specialized.gemm_rs_arguments(
            workspace.ctx, h, w, routing, routed, weights, done, out, z, plan, piece, config, scales
        )
        kernel, grid = launch_specialized.gemm_rs_kernel(), launch_specialized.grid(h.device)
        return Launch(workspace, kernel, grid, args, constants, operands, (z, out), [workspace.ctx])
    args, constants = _arguments(workspace.ctx, h, w, routing, routed, weights, done, out, z, plan, config, scales)
    most = table.shape[0] * cdiv(n, tiles.block_n) + routing.world_size * of_shard
    grid = (min(most, gpu.resident_programs(h.device, tiles, h.dtype)),)
    constants["trace_ptr"] = recorder.buffer(h.device, most, turns=1, all_run=False)
    return Launch(workspace, moe_gemm_rs_kernel, grid, args, constants, operands, (z, out), [workspace.ctx])
