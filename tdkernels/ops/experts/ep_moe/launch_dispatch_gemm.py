"""Launch the kernel of a fused ep_moe for dispatch and gate-up GEMM, or compile it ahead of time."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.collectives.async_all_gather import rows_of_buffer
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import with_config
from tdkernels.ops.experts.ep_moe.kernel_dispatch_gemm import Sending, ep_dispatch_gemm_kernel
from tdkernels.ops.experts.grouped_gemm.launch import product_constants
from tdkernels.ops.experts.grouped_gemm.layout import planes_of, weight_layout
from tdkernels.rounding import cdiv, next_power_of_2, round_up
from tdkernels.runtime import gpu
from tdkernels.runtime.kernel_launch import Launch, launch_cached, output_spec
from tdkernels.symm import get_workspace

if TYPE_CHECKING:
    from tdkernels.ops.common.tile_config import Tiles

_BLOCK_ROWS = 32  # rows that one work item sends
_BYTES_OF_THREAD = 256  # bytes in flight per thread of a sending program
# Sends are one expert ahead with up to _FEW_EXPERTS experts per rank, else two. The first sends are not overlapped.
_FEW_EXPERTS = 16
_ROW_BYTES = 16  # bytes reserved per row for its origin (8) and its routing weight (4)


@dataclass
class Launched:
    """Outputs of a launch for the R received rows. Without rows the first dimension is 1.

    Attributes:
        y: Products [R, ·].
        pre: Input of SwiGLU, or None.
        kept: Copy of the received rows, or None.
        origins: Origins, int64 [R]; None for a gradient.
        weights: Routing weights of the rows, fp32 [R]; None for a gradient.
        weighted: For a gradient: h times the routing weights of the rows.
        dots: For a gradient: fp32 [tile columns, R], partial dot products of the unweighted gradients with h.
    """

    y: torch.Tensor
    pre: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    origins: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    weighted: torch.Tensor | None = None
    dots: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The outputs that are not None."""
        fields = self.y, self.pre, self.kept, self.origins, self.weights, self.weighted, self.dots
        return [tensor for tensor in fields if tensor is not None]


def half_bytes(slot_rows: int, row_bytes: int) -> int:
    """Return the bytes of a half of the workspace for ``slot_rows`` rows."""
    return round_up(slot_rows * row_bytes, 16) + slot_rows * _ROW_BYTES


def launch(
    routing: Any, order: torch.Tensor, x: torch.Tensor, weights: torch.Tensor | None, w: torch.Tensor, tiles: "Tiles",
    *, activation: str | None = None, keep: bool = False, keep_rows: bool = False,
    gradient: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Launched:
    """Dispatch x [T, K] to its experts, and multiply it there by w [E / W, N, K].

    Args:
        routing: CountedRouting with a ``Reach``.
        order: Result of ``order_of``.
        x: Tokens of this rank.
        weights: Routing weights [T, k] fp32, or None for a gradient.
        w: Weights of this rank's experts.
        tiles: Tile of the GEMM.
        activation: As in ``ep_moe``, or None.
        keep: Return the input of SwiGLU as ``pre``.
        keep_rows: Return a copy of the received rows as ``kept``.
        gradient: (h [R, N], routing weights of the rows [R]) to compute the gradient of h. w is then the transposed
            second weight.
    """
    workspace = get_workspace(routing.group, x.device, "ep_dispatch_gemm")
    key = routing.launch_key, routing.rows, routing.reach, tiles, activation, keep, keep_rows, gradient is not None
    h, row_weights = gradient or (None, None)
    operands = x, weights, routing.tables, order, routing.splits, w, h, row_weights
    made = launch_cached(
        workspace, (*key, gemm_operands.dot_precision(x.dtype)), operands,
        lambda *of: _prepare(workspace, routing, of, tiles, activation, keep, keep_rows),
        lambda x, weights, tables, order, splits, w, *others: (
            gemm_operands.rows_contiguous(x), weights, tables, order, splits, weight_layout(w, activation)[0], *others
        ),
    )
    names = ["y", *(["pre"] if keep and activation else []), *(["kept"] if keep_rows else [])]
    names += ["origins", "weights"] if gradient is None else ["weighted", "dots"]
    return Launched(**dict(zip(names, made, strict=True)))


def compile(x: torch.Tensor, w: torch.Tensor, routing: Any, tiles: "Tiles", activation: str | None) -> None:
    """Compile the kernel that ``launch`` would launch in a forward for the same operands into Triton's cache."""
    x = gemm_operands.rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    weights, splits = x.new_empty(1, dtype=torch.float32), x.new_empty(w.shape[0], dtype=torch.int32)
    outputs = Launched(x.new_empty(1, 1), origins=ctx, weights=weights)
    args, constants = arguments(
        ctx, x, weights, routing.tables, routing.tables, splits, x[:1], 2 * x.shape[1], w, outputs, None, None, routing,
        0, tiles, activation,
    )
    ep_dispatch_gemm_kernel.warmup(*args, grid=(1,), **constants)


def _outputs(x, rows, w, tiles_n, activation, keep, keep_rows, gradient):
    """Return Launched with output specs."""
    width = w.shape[1] // 2 if activation else w.shape[1]
    launched = Launched(output_spec(x, rows, width))
    if keep and activation:
        launched.pre = output_spec(x, rows, w.shape[1])
    if keep_rows:
        launched.kept = output_spec(x, rows, x.shape[1])
    if gradient:
        launched.weighted = output_spec(x, rows, width)
        launched.dots = output_spec(x, tiles_n, rows, dtype=torch.float32)
    else:
        launched.origins = output_spec(x, rows, dtype=torch.int64)
        launched.weights = output_spec(x, rows, dtype=torch.float32)
    return launched


def _prepare(workspace, routing, operands, tiles, activation, keep, keep_rows):
    x, weights, tables, order, splits, w, h, row_weights = operands
    shape = routing.shape
    k, slot_rows, rows, gradient = x.shape[1], routing.reach.rows, max(routing.rows, 1), h is not None
    fields = {
        "dtype": str(x.dtype), "width": k, "k": shape.choices, "num_experts": shape.num_experts,
        "rows": slot_rows, "gradient": gradient,
    }
    fields = with_config(fields, routing.config)
    needed = half_bytes(slot_rows, k * x.element_size())
    with routing.part_of_call(workspace.group):
        plan = workspace.prepare(shape.operator, fields, needed, shape.num_experts, num_flags=shape.num_experts)
    tiles_n = cdiv(w.shape[1], tiles.block_n)
    outputs = _outputs(x, rows, w, tiles_n, activation, keep, keep_rows, gradient)
    buffer = rows_of_buffer(workspace, x)
    args, constants = arguments(
        workspace.ctx, x, weights, tables, order, splits, buffer, workspace.half_bytes // x.element_size(), w, outputs,
        h, row_weights, routing, plan, tiles, activation,
    )
    grid = (gpu.resident_programs(x.device, tiles, x.dtype),)
    made = outputs.tensors
    return Launch(workspace, ep_dispatch_gemm_kernel, grid, args, constants, operands, made, [workspace.ctx, buffer])


def arguments(
    ctx, x, weights, tables, order, splits, buffer, half_elements, w, outputs, h, row_weights, routing, plan, tiles,
    activation,
):
    """Return (arguments of the kernel, its constants).

    ``buffer`` is a view of the symmetric buffer as rows, which starts at half 0. ``half_elements`` is the distance of
    the halves.
    """
    k, slot_rows = x.shape[1], routing.reach.rows
    w, *strides, is_kn = weight_layout(w, activation)
    planes, n = planes_of(w, activation)
    desc, constants = product_constants(k, w, planes, n, strides, is_kn, activation, tiles)
    buffer_desc = None
    if constants["PRODUCT"].use_tma:
        buffer_desc = gemm_operands.rows_descriptor(buffer, 2, slot_rows, half_elements, tiles.block_m, tiles.block_k)
    args = (
        ctx, x, weights, tables, order, splits, buffer_desc, w, desc, outputs.y, outputs.pre, outputs.kept,
        outputs.origins, outputs.weights if h is None else row_weights, h, outputs.weighted, outputs.dots,
        outputs.y.shape[0], slot_rows, n, k, *strides, plan, tiles.group_m,
    )
    ahead, columns = 1 if len(splits) <= _FEW_EXPERTS else 2, _block_columns(k, x.element_size(), tiles)
    return args, {
        "EXPERTS": routing.shape.num_experts, "RANKS": routing.shape.world_size,
        "SENDING": Sending(ahead, _BLOCK_ROWS, columns, routing.shape.choices), **constants,
    }


def _block_columns(k, elem_bytes, tiles):
    """Return the number of columns that a program moves at a time."""
    at_a_time = _BYTES_OF_THREAD * 32 * tiles.num_warps // (_BLOCK_ROWS * elem_bytes)
    return min(next_power_of_2(k), at_a_time)
