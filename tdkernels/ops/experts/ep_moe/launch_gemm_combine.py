"""Launch the kernel of a fused ep_moe for down GEMM and combine, or compile it ahead of time."""

from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import with_config
from tdkernels.ops.experts.ep_moe.kernel_gemm_combine import ep_gemm_combine_kernel
from tdkernels.ops.experts.grouped_gemm.launch import product_constants, rows_descriptor
from tdkernels.ops.experts.grouped_gemm.layout import planes_of, weight_layout
from tdkernels.rounding import next_power_of_2, round_up
from tdkernels.runtime import gpu
from tdkernels.runtime.kernel_launch import Launch, launch_cached, output_spec
from tdkernels.symm import get_workspace

if TYPE_CHECKING:
    from tdkernels.ops.common.tile_config import Tiles

_BLOCK_TOKENS, _BLOCK_COLUMNS = 16, 512  # size of a work item that computes sums


def half_bytes(slots: int, slot_bytes: int) -> int:
    """Return the bytes of a half of the workspace for ``slots`` slots."""
    return round_up(slots * slot_bytes, 16) + 4 * slots


def launch(
    routing: Any, h: torch.Tensor, w: torch.Tensor, origins: torch.Tensor, tiles: "Tiles", *,
    weights: torch.Tensor | None = None, dots: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Multiply rows h [R, K] by w [E / W, N, K], combine the products by token, and return (y [T, N], numbers).

    Args:
        routing: CountedRouting with a ``Reach``.
        h: Rows of this rank's experts.
        w: Weights of this rank's experts.
        origins: Origins [R] int64, from ``ep_dispatch_gemm_kernel``.
        tiles: Tile of the GEMM.
        weights: Routing weights [T, k] fp32 of this rank's tokens, or None for 1.
        dots: fp32 [any, R]. It is summed over the first axis and sent back with the rows, to ``numbers`` [T, k] fp32.
            Without it ``numbers`` is None.
    """
    workspace = get_workspace(routing.group, h.device, "ep_gemm_combine")
    operands = h, w, routing.tables, routing.splits, origins, dots, weights
    made = launch_cached(
        workspace, (routing.launch_key, routing.reach, tiles, gemm_operands.dot_precision(h.dtype)), operands,
        lambda *of: _prepare(workspace, routing, of, tiles),
        lambda h, w, *others: (gemm_operands.rows_contiguous(h), weight_layout(w)[0], *others),
    )
    return made if dots is not None else (made[0], None)  # type: ignore[return-value]


def compile(h: torch.Tensor, w: torch.Tensor, routing: Any, tiles: "Tiles") -> None:
    """Compile the kernel that ``launch`` would launch in a forward for the same operands into Triton's cache."""
    h = gemm_operands.rows_contiguous(h)
    ctx = torch.empty(1, dtype=torch.int64, device=h.device)
    weights, splits = h.new_empty(1, dtype=torch.float32), h.new_empty(w.shape[0], dtype=torch.int32)
    args, constants = arguments(
        ctx, h, w, routing.tables, splits, ctx, None, weights, h.new_empty(1), None, routing, 0, tiles
    )
    ep_gemm_combine_kernel.warmup(*args, grid=(1,), **constants)


def _prepare(workspace, routing, operands, tiles):
    h, w, tables, splits, origins, dots, weights = operands
    n, slots, shape = w.shape[1], routing.reach.choices, routing.shape
    fields = {
        "dtype": str(h.dtype), "width": n, "k": shape.choices, "num_experts": shape.num_experts, "slots": slots,
        "weighted": weights is not None, "numbers": dots is not None,
    }
    fields = with_config(fields, routing.config)
    needed = half_bytes(slots, n * h.element_size())
    with routing.part_of_call(workspace.group):
        plan = workspace.prepare(shape.operator, fields, needed, shape.world_size, num_flags=1)
    y = output_spec(h, shape.tokens, n)
    numbers = None if dots is None else output_spec(h, shape.tokens, shape.choices, dtype=torch.float32)
    args, constants = arguments(workspace.ctx, h, w, tables, splits, origins, dots, weights, y, numbers, routing, plan,
                                tiles)
    grid = (gpu.resident_programs(h.device, tiles, h.dtype),)
    made = [y] if numbers is None else [y, numbers]
    return Launch(workspace, ep_gemm_combine_kernel, grid, args, constants, operands, made, [workspace.ctx])


def arguments(ctx, h, w, tables, splits, origins, dots, weights, y, numbers, routing, plan, tiles):
    """Return (arguments of the kernel, its constants)."""
    (rows, k), shape = h.shape, routing.shape
    w, *strides, is_kn = weight_layout(w)
    planes, n = planes_of(w, None)
    desc, constants = product_constants(k, w, planes, n, strides, is_kn, None, tiles)
    args = (
        ctx, h, rows_descriptor(h, constants, tiles), w, desc, tables, splits, origins, dots, weights, y, numbers,
        shape.tokens, rows, routing.reach.choices, n, k, *strides, plan, tiles.group_m,
    )
    return args, {
        "CHOICES": shape.choices, "EXPERTS": shape.num_experts, "RANKS": shape.world_size,
        "LOCAL": next_power_of_2(shape.num_experts // shape.world_size), "BLOCK_TOKENS": _BLOCK_TOKENS,
        "BLOCK_COLUMNS": min(next_power_of_2(n), _BLOCK_COLUMNS), "TILE_COLUMNS": 0 if dots is None else dots.shape[0],
        **constants,
    }
