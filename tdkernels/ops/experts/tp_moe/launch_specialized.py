"""Launch the warp-specialized kernels of moe_ag_gemm and moe_gemm_rs, or compile them ahead of time."""

from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.invariance import is_batch_invariant
from tdkernels.ops.common.gemm_operands import scale_pointers
from tdkernels.ops.common.scaling import Scales
from tdkernels.ops.common.specialized import launch as specialized
from tdkernels.ops.common.tile_config import SPECIALIZED_TILE, STEP_BYTES, num_parts
from tdkernels.ops.experts.grouped_gemm import launch_specialized as grouped_gemm
from tdkernels.ops.experts.grouped_gemm.layout import memory_layout, weight_layout
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.gluon import optional_kernel

if TYPE_CHECKING:
    from tdkernels.ops.experts.tp_moe.kernel_ag_gemm import Piece
    from tdkernels.ops.experts.tp_moe.routing import MoeRouting

_QUARTERS = 4  # of the columns of moe_gemm_rs
_MOST_RANKS_WITHOUT_DELAY = 4
# Steps of K that a program multiplies in a slice, about 25 µs. A large work item takes as long.
_LEAST_STEPS_FOR_LARGE_ITEMS = 32
_MOST_RANKS = 64  # threads of the two warps that add
# Programs that push, per program that pushes in the portable kernel. There all warps of a program push, here one.
_PUSHING_PER_PORTABLE = 8


@optional_kernel("moe_ag_gemm: the warp-specialized kernel")
def ag_gemm_kernel() -> Any:
    from tdkernels.ops.experts.tp_moe.specialized.kernel_ag_gemm import moe_ag_gemm_specialized_kernel

    return moe_ag_gemm_specialized_kernel


@optional_kernel("moe_gemm_rs: the warp-specialized kernel")
def gemm_rs_kernel() -> Any:
    from tdkernels.ops.experts.tp_moe.specialized.kernel_gemm_rs import moe_gemm_rs_specialized_kernel

    return moe_gemm_rs_specialized_kernel


def supports(
    x: torch.Tensor, w: torch.Tensor, activation: str | None, config: Any, scales: Scales | None = None
) -> bool:
    """Return whether a warp-specialized kernel supports rows with the K and dtype of x, and w, which needs no copy.

    It does not if x has no rows, because a tensor descriptor cannot have 0 rows.
    """
    if not x.shape[0]:
        return False
    return grouped_gemm.supports(x, w, memory_layout(w, activation), activation, config, scales)


def supports_gemm_rs(h: torch.Tensor, w: torch.Tensor, ranks: int, config: Any, scales: Scales | None = None) -> bool:
    """Return ``supports`` for moe_gemm_rs.

    Its partitions wait for each rank in a thread of its own. Offsets of rows are int32, in units of 8 columns.
    """
    fits = ranks <= _MOST_RANKS and h.shape[0] * w.shape[1] < 8 << 31
    return fits and supports(h, w, None, config, scales)


def num_pushing(num_comm: int, device: torch.device) -> int:
    """Return the number of programs that push, for ``num_comm`` of the portable kernel."""
    return min(_PUSHING_PER_PORTABLE * num_comm, grid(device)[0])


def num_flags(routing: "MoeRouting", config: Any) -> int:
    """Return the number of private words that moe_ag_gemm needs."""
    return routing.num_chunks if specialized.is_enabled(config) and routing.world_size > 1 else 0


def grid(device: torch.device) -> tuple[int]:
    """Return the number of programs, one for each multiprocessor: all of them copy or add rows."""
    return (gpu.available_sms(device),)


def ag_gemm_arguments(
    ctx: torch.Tensor, x: torch.Tensor, w: torch.Tensor, routing: "MoeRouting", routed: Any, made: Any,
    plan: int, num_comm: int, config: Any, activation: str | None, scales: Scales | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (arguments, constants) of the kernel of moe_ag_gemm.

    ``routed`` and ``made`` are those of ``launch_ag_gemm._arguments``.
    """
    layout, (tokens, k) = memory_layout(w, activation), x.shape
    _, choices, table, begins = routed
    args = (
        ctx, x, grouped_gemm.weight_descriptor(w, layout), *scale_pointers(scales), choices, table, begins,
        *grouped_gemm.outputs(made.y, made.pre), tokens, choices.shape[0], layout[1], k, routing.slot_rows, plan,
        num_comm, routing.chunk_rows, routing.num_stages, config.tiles.group_m,
    )
    constants = grouped_gemm.product_constants(w, layout, scales)
    is_pair = layout[0] > w.shape[0]
    tiles = table.shape[0] * cdiv(layout[1], SPECIALIZED_TILE[1] // (2 if is_pair else 1))
    pushes = _num_pushes(routing, k * x.element_size(), num_comm)
    trace = recorder.buffer(x.device, tiles + pushes, all_run=False, by_warps=True)
    return args, {"CHOICES": routing.num_choices, "PAIR": is_pair, "trace_ptr": trace, **constants}


def _num_pushes(routing, row_bytes, num_comm):
    """Return the number of work items of ``push_partition``."""
    if routing.world_size == 1 or not num_comm:
        return 0
    chunks, chunk_rows = routing.num_chunks, min(routing.chunk_rows, routing.tokens)
    return chunks * num_parts(chunk_rows, row_bytes, routing.world_size, chunks, num_comm)


def compile_ag_gemm(
    ctx: torch.Tensor, x: torch.Tensor, w: torch.Tensor, routing: "MoeRouting", routed: Any, made: Any,
    config: Any, activation: str | None,
) -> None:
    """Compile the kernel of moe_ag_gemm into Triton's cache, without launching it."""
    w = weight_layout(w, activation)[0]
    args, constants = ag_gemm_arguments(ctx, x, w, routing, routed, made, 0, 1, config, activation)
    ag_gemm_kernel().warmup(*args, grid=(1,), **constants)


def gemm_rs_arguments(
    ctx: torch.Tensor, h: torch.Tensor, w: torch.Tensor, routing: "MoeRouting", routed: Any,
    weights: torch.Tensor | None, done: torch.Tensor, out: torch.Tensor, z: torch.Tensor, plan: int, piece: "Piece",
    config: Any, scales: Scales | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (arguments, constants) of the kernel of moe_gemm_rs.

    ``routed`` is (rows, table and begins of the tiling), ``piece`` the Piece of the portable kernel.
    """
    layout, (rows, k) = memory_layout(w, None), h.shape
    of_choices, table, begins = routed
    slices, unit = slices_of(layout[1], piece.columns)
    large = _large_slices(slices, unit, rows, k * h.element_size(), h.device)
    args = (
        ctx, specialized.rows_descriptor(h, 1, rows, rows * k), grouped_gemm.weight_descriptor(w, layout),
        *scale_pointers(scales), of_choices, weights, table, begins, done, out,
        grouped_gemm.output_descriptor(out), z, routing.tokens, rows, layout[1], k, plan, routing.chunk_rows,
        packed(slices), unit, large, _own_delay(routing.world_size), config.tiles.group_m,
    )
    constants = grouped_gemm.product_constants(w, layout, scales)
    pieces = table.shape[0] * cdiv(layout[1], SPECIALIZED_TILE[1])
    pieces += _most_sums(routing, layout[1], piece)
    trace = recorder.buffer(h.device, pieces, all_run=False, by_warps=True)
    return args, {
        "trace_ptr": trace, "COLUMNS": piece.columns, "CHOICES": piece.choices, "RANKS": routing.world_size,
        "ROUND_OWN": is_batch_invariant(), **constants,
    }


def slices_of(n: int, piece_columns: int) -> tuple[list[int], int]:
    """Return (first unit of each slice of an output [R, n], tile columns of a unit). A unit has whole pieces.

    The slices are quarters of the columns. The last quarter is divided into two slices, because the sums of the last
    slice start after the last tile, so the GEMM does not hide them. Each slice reads all rows of h.
    """
    from tdkernels.ops.experts.tp_moe.specialized.slices import NO_SLICE

    columns = cdiv(n, SPECIALIZED_TILE[1])
    unit = max(piece_columns // SPECIALIZED_TILE[1], 1)
    while cdiv(columns, unit) > NO_SLICE.value:
        unit *= 2
    units = cdiv(columns, unit)
    firsts = list(range(0, units, cdiv(units, _QUARTERS)))
    rest = units - firsts[-1]
    return firsts + ([firsts[-1] + cdiv(rest, 2)] if rest > 1 else []), unit


def packed(firsts: list[int]) -> int:
    """Return the first units of slices in one number, see ``specialized.slices``."""
    from tdkernels.ops.experts.tp_moe.specialized.slices import MAX_SLICES, NO_SLICE

    return int.from_bytes(firsts + [NO_SLICE.value] * (MAX_SLICES.value + 1 - len(firsts)), "little")


def _large_slices(slices, unit, rows, row_bytes, device):
    """Return the number of slices in which programs add rows in large work items.

    These are all quarters but the last, if their tiles take so long that the items are finished meanwhile.
    """
    columns = (slices[1] if len(slices) > 1 else 0) * unit
    steps = cdiv(rows, SPECIALIZED_TILE[0]) * columns * cdiv(row_bytes, STEP_BYTES)
    most = min(_QUARTERS, len(slices)) - 1
    return most if steps >= _LEAST_STEPS_FOR_LARGE_ITEMS * gpu.num_sms(device) else 0


def _own_delay(ranks):
    """Return by how many slices this rank's tokens follow those of the peers.

    With more ranks the warps that add are late, and the link would be idle while they add this rank's tokens.
    """
    return 1 if ranks <= _MOST_RANKS_WITHOUT_DELAY else 3


def _most_sums(routing, n, piece):
    """Return the number of work items of ``add_partition``, if all are small."""
    from tdkernels.ops.experts.tp_moe.specialized.add import PARTS

    signals = routing.num_chunks * (routing.chunk_rows // piece.tokens)
    return (routing.world_size - 1 + PARTS.value) * signals * cdiv(n, piece.columns)


def compile_gemm_rs(
    ctx: torch.Tensor, h: torch.Tensor, w: torch.Tensor, routing: "MoeRouting", routed: Any,
    weights: torch.Tensor | None, out: torch.Tensor, piece: "Piece", config: Any,
) -> None:
    """Compile the kernel of moe_gemm_rs into Triton's cache, without launching it."""
    w = weight_layout(w)[0]
    args, constants = gemm_rs_arguments(ctx, h, w, routing, routed, weights, ctx, out, out, 0, piece, config)
    gemm_rs_kernel().warmup(*args, grid=(1,), **constants)
