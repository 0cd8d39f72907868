"""LowLatencyRouting: the low-latency strategy. One launch of ``ep_direct_kernel`` exchanges the counts and the tokens.

It needs ``max_tokens_per_rank``, an upper bound of the tokens of each rank that all ranks know. With it a token's slot
in the memory of a peer is known before anything is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.common.config import with_config
from tdkernels.ops.experts.dispatch import layout
from tdkernels.ops.experts.dispatch.counted import CountedRouting, empty_splits, slots_for
from tdkernels.ops.experts.dispatch.counting import listen
from tdkernels.ops.experts.dispatch.device_errors import Splits, TopkIds
from tdkernels.ops.experts.dispatch.kernel_low_latency import ep_direct_kernel
from tdkernels.ops.experts.dispatch.kernel_low_latency_send import MOST_COMPARED, MOST_IDS, line_words
from tdkernels.ops.experts.dispatch.payload import (
    MAX_CHUNKS,
    as_memories,
    as_memory,
    or_else,
    parts_of,
    pieces_trace,
    scale_bytes_of,
    size_of,
)
from tdkernels.rounding import next_power_of_2, round_up
from tdkernels.runtime.kernel_launch import CALL_NUMBER, Launch, launch_cached, pointer_signature
from tdkernels.symm import get_workspace

if TYPE_CHECKING:
    from tdkernels.ops.experts.dispatch.config import EpConfig
    from tdkernels.ops.experts.dispatch.kernel_payload import Payload
    from tdkernels.ops.experts.dispatch.launch import Call
    from tdkernels.ops.experts.dispatch.payload import DispatchTensors
    from tdkernels.ops.experts.dispatch.request import DispatchRequest, RoutePlan, RoutingShape
    from tdkernels.symm.workspace import Workspace


@dataclass(eq=False, kw_only=True)
class LowLatencyRouting(CountedRouting):
    """A routing whose first dispatch counts the tokens. After that it works as a CountedRouting.

    Attributes:
        uncounted: (ids, error code) of the DispatchRequest until they are counted, then None.
        operand: Describes the operand from which the ids were computed, for errors.
    """

    uncounted: tuple | None
    operand: TopkIds | Splits

    counts_in = "ep_direct"

    def run_dispatch(self, workspace: "Workspace", tensors: "DispatchTensors", phase: str) -> None:
        if self.uncounted is None:
            super().run_dispatch(workspace, tensors, phase)
        else:
            _launch(self, tensors, phase)


def plan_low_latency(plan: "RoutePlan") -> "RoutePlan":
    """Return a plan with a config, changed to the low-latency strategy, in which each token is a chunk."""
    shape = plan.shape
    return plan._replace(
        is_low_latency=True, config=replace(plan.config, chunk_tokens=1),  # type: ignore[type-var]
        slots=slots_for(shape.world_size * shape.max_tokens_per_rank),  # type: ignore[operator]
        words=layout.length(shape, 0),
    )


def can_be_low_latency(config: "EpConfig", shape: "RoutingShape") -> bool:
    """Return whether one launch can count and send: the compared ids fit small tiles, and each token has a signal."""
    each = next_power_of_2(shape.world_size) * next_power_of_2(shape.num_experts // shape.world_size)
    small = next_power_of_2(shape.choices) * max(each, 32) <= MOST_COMPARED.value
    return small and shape.max_tokens_per_rank <= min(config.direct_tokens, MAX_CHUNKS)


def route_low_latency(plan: "RoutePlan", request: "DispatchRequest") -> LowLatencyRouting:
    """Return the LowLatencyRouting of a request, given its ``plan_low_latency``. It launches nothing."""
    shape, ids = plan.shape, request.ids
    return LowLatencyRouting(
        shape=shape, group=request.group, config=plan.config,  # type: ignore[arg-type]
        config_is_given=plan.config_is_given,
        rows=shape.max_tokens, staged=shape.max_tokens,  # type: ignore[arg-type]
        slots=plan.slots, splits=empty_splits(shape, ids.device),
        tables=torch.empty(plan.words, dtype=torch.int32, device=ids.device),
        uncounted=(ids.contiguous(), request.error_code), operand=request.operand or TopkIds(ids, shape.num_experts),
    )


def slot_memory(row_bytes: int, scale_bytes: int, k: int) -> int:
    """Return the bytes of a slot of ``ep_direct_kernel``."""
    return round_up(round_up(row_bytes, 16) + round_up(scale_bytes, 16) + 12 * k, 128)


def _launch(routing, tensors, phase):
    """Launch the kernel for one phase of the first dispatch, or for both.

    The kernel has its own workspace, so that the next routing call raises the errors that it reports
    (``lang.host_error``). A rank that raised one in a combine would stop while its peers wait for it.
    """
    x, scales = tensors.x, tensors.scales
    workspace = get_workspace(routing.group, x.device, "ep_direct")
    if phase != "receive":
        listen(workspace, routing.shape.operator, routing.operand, is_bounded=True)
        routing.note_call = workspace.note_call
    key = (
        "direct", phase, routing.launch_key, x.dtype, x.shape[1], None if scales is None else scales.shape[1:],
        tensors.quantize,
    )
    operands = *as_memories(tensors.tensors), *routing.maps, *routing.uncounted, routing.splits
    launch_cached(
        workspace, key, operands, lambda *of: _new(workspace, routing, tensors, phase, of), signature=pointer_signature
    )
    if phase != "send":
        routing.uncounted = None


def _new(workspace, routing, tensors, phase, operands):
    """Return the Launch of a first dispatch. ``operands`` are the tensors, the maps, ids, error code and splits."""
    parts, shape = parts_of(tensors, routing.config), routing.shape
    items, scale_words, payload = parts
    slot = slot_memory(items * size_of(payload.item), scale_words * size_of(payload.scale), shape.choices)
    fields = {
        "dtype": str(tensors.x.dtype), "width": tensors.x.shape[1], "scales": scale_bytes_of(tensors),
        "quantize": tensors.quantize, "weighted": tensors.weights is not None, "k": shape.choices,
        "num_experts": shape.num_experts, "max_tokens": shape.max_tokens,
        "max_tokens_per_rank": shape.max_tokens_per_rank,
    }
    ranks = shape.world_size
    line = 4 * ranks * line_words(shape.num_experts, ranks)
    half_bytes = round_up(line, 128) + ranks * shape.max_tokens_per_rank * slot
    fields = with_config(fields, routing.config)
    plan = workspace.prepare(shape.operator, fields, half_bytes, ranks * MAX_CHUNKS + ranks)
    *given, tables, received, ids, error_code, splits = operands
    kernel, programs, args, constants = low_latency_call(
        workspace.ctx, routing, tensors.with_tensors(given), parts, plan, (tables, received, ids, error_code, splits),
        phase, CALL_NUMBER,
    )
    # ``listen`` has just checked for errors of earlier launches, in this phase or in the send phase.
    return Launch(workspace, kernel, (programs,), args, constants, operands, [], [workspace.ctx], checks_errors=False)


def low_latency_call(
    ctx: torch.Tensor, routing: CountedRouting, tensors: "DispatchTensors", parts: "tuple[int, int, Payload]",
    plan: int, known: Sequence[Any], phase: str = "both", call: Any = 0,
) -> "Call":
    """Return (kernel, programs, arguments, constants) of a first dispatch.

    Args:
        ctx: Context of the kernel.
        routing: Routing of the call.
        tensors: Tensors of the dispatch, as in ``launch.dispatch_call``.
        parts: Result of ``parts_of``.
        plan: Plan id, as in ``launch.dispatch_call``.
        known: Tables, received-slot map, ids, error code and splits.
        phase: Phase to launch, "both", "send" or "receive".
        call: Number of the call for host errors, or CALL_NUMBER.
    """
    config, shape, x = routing.config, routing.shape, tensors.x
    items, scale_words, payload = parts
    tables, received, ids, error_code, splits = known
    # One program more than senders counts, and one more than receivers writes the tables.
    senders = 1 + min(config.num_senders, max(shape.tokens, 1)) if phase != "receive" else 0
    slots = shape.world_size * shape.max_tokens_per_rank  # type: ignore[operator]
    receivers = 1 + min(config.num_receivers, slots) if phase != "send" else 0
    args = (
        ctx, ids, error_code, as_memory(x), as_memory(or_else(tensors.scales, x)), tensors.weights, tables, received,
        splits, as_memory(tensors.rows), as_memory(or_else(tensors.row_scales, tensors.rows)), tensors.row_weights,
        shape.tokens, shape.max_tokens_per_rank, shape.max_tokens, senders, items, scale_words, plan, call,
    )
    constants = {
        "ADVANCE": phase != "send", "BY_SOURCE": shape.by_source, "K": shape.choices, "EXPERTS": shape.num_experts,
        "RANKS": shape.world_size, "N": min(MOST_COMPARED.value // next_power_of_2(shape.choices), MOST_IDS.value),
        "PAYLOAD": payload, "num_warps": config.num_warps, "trace_ptr": pieces_trace(x.device, shape.world_size),
    }
    return ep_direct_kernel, senders + receivers, args, constants
