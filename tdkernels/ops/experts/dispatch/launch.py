"""Launch the kernels of ep_dispatch, ep_combine and all_to_all that use symmetric memory.

``routing`` is a ``counted.CountedRouting`` or an instance of a subclass. It supplies the kernel and the arguments that
only this kernel has; everything else is here. Its type is Any, because ``counted`` imports this module. ``phase`` is
"send", "receive" or "both".
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.common.config import with_config
from tdkernels.ops.common.gemm_operands import rows_contiguous
from tdkernels.ops.experts.dispatch.kernel_payload import QUANTUM
from tdkernels.ops.experts.dispatch.payload import (
    FLOATS,
    MAX_CHUNKS,
    CombineTensors,
    DispatchTensors,
    as_memory,
    block_of,
    or_else,
    parts_of,
    scale_bytes_of,
    size_of,
)
from tdkernels.rounding import cdiv
from tdkernels.runtime.kernel_launch import Launch, launch_cached, pointer_signature
from tdkernels.symm import get_workspace
from tdkernels.symm.group import in_step

if TYPE_CHECKING:
    from tdkernels.ops.experts.dispatch.config import EpConfig
    from tdkernels.ops.experts.dispatch.kernel_payload import Payload
    from tdkernels.symm.workspace import Workspace

    Call = tuple[Any, int, tuple[Any, ...], dict[str, Any]]  # kernel, programs, arguments, constants

_FEWEST_CHUNKS = 32  # minimum for the estimated chunks of a peer


def chunks_at_most(routing: Any) -> int:
    """Return the chunks of this rank's tokens. The routing fixes their size, whatever the config of a later call is."""
    return min(max(cdiv(routing.shape.tokens, routing.config.chunk_tokens), 1), MAX_CHUNKS)


def _chunks_of_peers(routing):
    """Estimate the chunks of the peers' tokens from this rank's tokens. The host knows no other number."""
    return max(chunks_at_most(routing), _FEWEST_CHUNKS) * (routing.shape.world_size - 1)


def _programs(config, phase, sent, received):
    """Return (programs that send, programs that receive) for numbers of work items to send and to receive."""
    senders = min(config.num_senders, sent) if phase != "receive" else 0
    receivers = min(config.num_receivers, received) if phase != "send" else 0
    return senders, receivers


def _check_pending(workspace, operator, tensors, what, phase):
    """Raise RuntimeError for a second receive, or for a send that would overwrite data that were not yet received."""
    pending = workspace.pending
    if phase == "receive" and pending is not tensors:
        raise in_step(RuntimeError(f"{operator}: nothing of this {what} is left to be received"))
    if phase != "receive" and pending is not None:
        words = f"{operator}: an earlier {what} of this group was sent and not yet received; receive it first"
        raise in_step(RuntimeError(words))


# ---- dispatch ----


def prepare_dispatch(
    routing: Any, x: torch.Tensor, scales: torch.Tensor | None = None, weights: torch.Tensor | None = None,
    quantize: bool = False,
) -> DispatchTensors:
    """Allocate the outputs of a dispatch, and convert the operands to dtypes and layouts that the kernel supports."""
    x, rows = rows_contiguous(x), routing.rows
    out = x.new_empty(rows, x.shape[1], dtype=torch.float8_e4m3fn if quantize else x.dtype)
    row_scales = None
    if quantize:
        row_scales = x.new_empty(rows, cdiv(x.shape[1], QUANTUM.value), dtype=torch.float32)
    elif scales is not None:
        scales = rows_contiguous(scales)
        row_scales = scales.new_empty(rows, *scales.shape[1:])
    row_weights = None
    if weights is not None:
        row_weights = x.new_empty(rows, dtype=torch.float32)
        weights = weights.to(torch.float32).contiguous()
    first = routing.received is None
    if first:
        routing.make_received()
    return DispatchTensors(x, scales, weights, out, row_scales, row_weights, quantize=quantize, first=first)


def prepare_gradient(
    routing: Any, dy: torch.Tensor, expert_rows: torch.Tensor | None, weights: torch.Tensor | None,
    want_dots: bool,
) -> DispatchTensors:
    """Do the same as ``prepare_dispatch`` for ``Routing.dispatch_gradient``."""
    dy = rows_contiguous(dy)
    # With max_tokens some rows belong to no token. They contribute to no sum, so their gradients are 0. Spare rows of
    # ``ep_moe`` without max_tokens are not read.
    new = dy.new_empty if routing.shape.max_tokens is None else dy.new_zeros
    dots = new(routing.rows, dtype=torch.float32) if want_dots else None
    return DispatchTensors(
        dy, None, weights, new(routing.rows, dy.shape[1]), None, None,
        rows_contiguous(expert_rows) if want_dots and expert_rows is not None else None, dots, gradient=True,
    )


def launch_dispatch(routing: Any, tensors: DispatchTensors, phase: str = "both") -> None:
    """Launch the kernel for a phase of a dispatch."""
    workspace = get_workspace(routing.group, tensors.x.device, "ep_dispatch", across_nodes=True)
    _check_pending(workspace, routing.shape.operator, tensors, "dispatch", phase)
    try:
        routing.run_dispatch(workspace, tensors, phase)
    finally:
        workspace.pending = tensors if phase == "send" else None


def new_dispatch(
    workspace: "Workspace", routing: Any, tensors: DispatchTensors, phase: str, operands: Sequence[Any]
) -> Launch:
    """Return the Launch of a dispatch. ``operands`` are the tensors as memory, then the maps of the routing."""
    x, shape = tensors.x, routing.shape
    parts = parts_of(tensors, routing.config)
    items, scale_words, payload = parts
    row_bytes, scale_row_bytes = items * size_of(payload.item), scale_words * size_of(payload.scale)
    fields = {
        "dtype": str(x.dtype), "width": x.shape[1], "scales": scale_bytes_of(tensors), "quantize": tensors.quantize,
        "weighted": tensors.weights is not None, "gradient": tensors.gradient, "k": shape.choices,
        "num_experts": shape.num_experts, **routing.agreed_slots(),
    }
    staging = routing.dispatch_staging(row_bytes, scale_row_bytes)
    fields = with_config(fields, routing.config)
    with routing.part_of_call(workspace.group):
        plan = workspace.prepare(shape.operator, fields, staging, shape.world_size * MAX_CHUNKS)
    given, maps = operands[: len(tensors.tensors)], operands[len(tensors.tensors) :]
    tensors, routing = tensors.with_tensors(given), routing.with_maps(maps)
    kernel, programs, args, constants = dispatch_call(workspace.ctx, routing, tensors, parts, plan, phase)
    return Launch(workspace, kernel, (programs,), args, constants, operands, [], [workspace.ctx])


def dispatch_call(
    ctx: torch.Tensor, routing: Any, tensors: DispatchTensors, parts: "tuple[int, int, Payload]",
    plan: int, phase: str = "both",
) -> "Call":
    """Return (kernel, programs, arguments, constants) of a dispatch. ``parts`` is the result of ``parts_of``."""
    config, x = routing.config, tensors.x
    items, scale_words, payload = parts
    counts = _programs(config, phase, chunks_at_most(routing), _chunks_of_peers(routing))
    programs, numbers = routing.programs(config, phase, *counts)
    args = (
        ctx, as_memory(x), as_memory(or_else(tensors.scales, x)), tensors.weights, *routing.maps,
        as_memory(tensors.rows), as_memory(or_else(tensors.row_scales, tensors.rows)), tensors.row_weights,
        tensors.expert_rows, tensors.dots, routing.shape.tokens, config.chunk_tokens, *numbers, items, scale_words,
        plan,
    )
    kernel, own = routing.dispatch_kernel(x.device)
    return kernel, programs, args, {
        "ADVANCE": phase != "send", "FIRST": tensors.first, **routing.table_constants(), "PAYLOAD": payload,
        "num_warps": config.num_warps, **own,
    }


# ---- combine ----


def prepare_combine(
    routing: Any, rows: torch.Tensor, weights: torch.Tensor | None, row_weights: torch.Tensor | None,
    row_numbers: torch.Tensor | None, config: "EpConfig",
) -> CombineTensors:
    """Do the same as ``prepare_dispatch`` for a combine."""
    rows = rows_contiguous(rows)
    y = rows.new_empty(routing.shape.tokens, rows.shape[1])
    numbers = None
    if row_numbers is not None:
        row_numbers = row_numbers.to(torch.float32).contiguous()
        numbers = rows.new_empty(routing.shape.tokens, routing.shape.choices, dtype=torch.float32)
    if weights is not None:
        weights = weights.to(torch.float32).contiguous()
    return CombineTensors(rows, weights, row_weights, row_numbers, y, numbers, config.combine == "per_expert")


def launch_combine(
    routing: Any, tensors: CombineTensors, config: "EpConfig", phase: str = "both"
) -> None:
    """Launch the kernel for a phase of a combine."""
    rows = tensors.rows
    # Raise errors of the dispatch before its rows are combined.
    get_workspace(routing.group, rows.device, "ep_dispatch", across_nodes=True).check()
    workspace = get_workspace(routing.group, rows.device, "ep_combine", across_nodes=True)
    _check_pending(workspace, routing.shape.operator, tensors, "combine", phase)
    try:
        launch_cached(
            workspace, (phase, routing.launch_key, config, rows.shape[1]), (*tensors.tensors, *routing.maps),
            lambda *of: _new_combine(workspace, routing, tensors, phase, config, of), signature=pointer_signature,
        )
    finally:
        workspace.pending = tensors if phase == "send" else None


def _new_combine(workspace, routing, tensors, phase, config, operands):
    """Return the Launch of a combine. ``operands`` are the tensors, then the maps of the routing."""
    rows, shape = tensors.rows, routing.shape
    fields = {
        "dtype": str(rows.dtype), "width": rows.shape[1], "k": shape.choices, "num_experts": shape.num_experts,
        "weighted": tensors.weights is not None, "numbers": tensors.row_numbers is not None,
        "chunk_tokens": routing.config.chunk_tokens, **routing.agreed_slots(),
    }
    staging = routing.combine_staging(rows.shape[1] * rows.element_size(), tensors.per_expert)
    fields = with_config(fields, config)
    with routing.part_of_call(workspace.group):
        plan = workspace.prepare(shape.operator, fields, staging, shape.world_size * MAX_CHUNKS)
    given, maps = operands[: len(tensors.tensors)], operands[len(tensors.tensors) :]
    tensors, routing = tensors.with_tensors(given), routing.with_maps(maps)
    kernel, programs, args, constants = combine_call(workspace.ctx, routing, tensors, plan, config, phase)
    return Launch(workspace, kernel, (programs,), args, constants, operands, [], [workspace.ctx])


def combine_call(
    ctx: torch.Tensor, routing: Any, tensors: CombineTensors, plan: int, config: "EpConfig",
    phase: str = "both",
) -> "Call":
    """Return (kernel, programs, arguments, constants) of a combine."""
    rows = tensors.rows
    width, item_bytes = rows.shape[1], rows.element_size()
    counts = _programs(config, phase, _chunks_of_peers(routing), chunks_at_most(routing))
    programs, numbers = routing.programs(config, phase, *counts)
    args = (
        ctx, rows, tensors.row_weights, tensors.row_numbers, tensors.weights, *routing.maps, tensors.y,
        tensors.numbers, routing.shape.tokens, routing.config.chunk_tokens, *numbers, width, plan,
    )
    block = block_of(width, item_bytes, config.block_bytes)
    kernel, own = routing.combine_kernel(rows.device, width, block)
    return kernel, programs, args, {
        "ADVANCE": phase != "send", "PER_EXPERT": tensors.per_expert, "DTYPE": FLOATS[rows.dtype],
        "ALIGNED": width * item_bytes % 16 == 0, "BLOCK": block, **routing.table_constants(),
        "num_warps": config.num_warps, **own,
    }
