"""Launches of the kernels of all_to_all, ep_dispatch and ep_combine, for a ``Routing``.

``dispatch`` sends tokens to rows, ``combine`` rows back to tokens. A group on several nodes has kernels of its own;
what goes by torch's collectives (``torch_backend``) launches none.
"""

from dataclasses import dataclass

import torch

from tdkernels.ops.common.config import text_of
from tdkernels.ops.common.gemm_operands import rows_contiguous
from tdkernels.ops.experts.dispatch import layout, torch_backend
from tdkernels.ops.experts.dispatch.kernel_combine import ep_combine_kernel
from tdkernels.ops.experts.dispatch.kernel_dispatch import QUANTUM, ep_dispatch_kernel
from tdkernels.ops.experts.dispatch.low_latency import launch_direct
from tdkernels.ops.experts.dispatch.multinode.crossing import crossing_slot_memory, sum_slot_memory
from tdkernels.ops.experts.dispatch.multinode.kernel_combine import ep_combine_nodes_kernel
from tdkernels.ops.experts.dispatch.multinode.kernel_dispatch import ep_dispatch_nodes_kernel
from tdkernels.ops.experts.dispatch.payload import (
    FLOATS,
    MAX_CHUNKS,
    Sending,
    as_memories,
    as_memory,
    block_of,
    or_else,
    parts_of,
    pieces_trace,
    scale_bytes_of,
    size_of,
)
from tdkernels.ops.experts.dispatch.routing import places_constants, tile_tokens
from tdkernels.rounding import cdiv, round_up
from tdkernels.runtime.kernel_launch import Launch, by_address, launch_kept
from tdkernels.symm import get_workspace
from tdkernels.symm.group import in_step
from tdkernels.symm.whole_call import whole_call

_FEWEST_CHUNKS = 32  # of a peer, that we are ready for


def slot_memory(row_bytes, scale_bytes, k):
    """Bytes of a slot of ``ep_dispatch_kernel``."""
    return round_up(round_up(row_bytes, 16) + round_up(scale_bytes, 16) + 8 * k, 128)


def combine_slot_memory(row_bytes, k, per_expert, with_weights=False):
    """Bytes of a slot of ``ep_combine_kernel``."""
    return round_up(round_up(row_bytes, 16) * (k if per_expert else 1) + (8 if with_weights else 4) * k, 128)


# ---- dispatch ----


def _constants_of(routing):
    return places_constants(routing.choices, routing.num_experts, routing.world_size, routing.crossing)


def _programs(config, halves, senders_work, receivers_work):
    """(senders, all programs) of a launch of both halves, or of one."""
    senders = min(config.num_senders, senders_work) if halves in ("both", "send") else 0
    receivers = min(config.num_receivers, receivers_work) if halves in ("both", "receive") else 0
    return senders, max(senders + receivers, 1)


def _extents(routing, config, halves, senders_work, receivers_work):
    """(all programs of a launch; how many of each kind but the last, and across nodes how many slots, for the kernel).

    Relays wait for what senders put, so they belong to the half that receives.
    """
    senders, programs = _programs(config, halves, senders_work, receivers_work)
    crossing = routing.crossing
    if crossing is None:
        return programs, (senders,)
    relays = 0
    if halves != "send":
        relays = min(config.num_receivers, _chunks_at_most(routing) * (routing.world_size // crossing.local_world_size))
    return programs + relays, (senders, relays, routing.most_staged, crossing.most)


def _chunks_at_most(routing):
    """Chunks of our tokens; their size is the routing's, whatever config later calls come with."""
    return min(max(cdiv(routing.tokens, routing.config.chunk_tokens), 1), MAX_CHUNKS)


def _chunks_of_peers(routing):
    """About how many chunks there are of the peers' tokens: as of ours, of which alone the host knows."""
    return max(_chunks_at_most(routing), _FEWEST_CHUNKS) * (routing.world_size - 1)


@whole_call
def dispatch(routing, x, *, scales=None, weights=None, quantize=False):
    """x [T, H] of each rank as rows [R, H]; returns (rows, scales [R, S] or None, weights [R] or None)."""
    if routing.by_torch is not None:
        return torch_backend.dispatch(routing, x, scales=scales, weights=weights, quantize=quantize)
    sending = prepare_dispatch(routing, x, scales=scales, weights=weights, quantize=quantize)
    launch_dispatch(routing, sending)
    return sending.rows, sending.row_scales, sending.row_weights


def prepare_dispatch(routing, x, *, scales=None, weights=None, quantize=False):
    """The output tensors of a dispatch, and the operands as the kernel takes them."""
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
    first = routing.came is None
    if first:
        length = layout.came_length(routing.world_size, routing.most_staged, routing.choices)
        routing.came = torch.empty(length, dtype=torch.int32, device=x.device)
        if routing.crossing is not None:
            routing.crossing.make_passed(routing.choices)
    return Sending(x, scales, weights, out, row_scales, row_weights, quantize=quantize, first=first)


@whole_call
def dispatch_gradient(routing, dy, expert_rows, weights, want_dots):
    """(gradient of the rows [R, H], of their weights [R] or None) of a sum of rows, times ``weights`` [T, K] or 1."""
    if routing.by_torch is not None:
        return torch_backend.dispatch_gradient(routing, dy, expert_rows, weights, want_dots)
    dy = rows_contiguous(dy)
    # With a capacity some rows belong to no token, and have no part in any sum.
    new = dy.new_empty if routing.max_tokens is None else dy.new_zeros
    dots = new(routing.rows, dtype=torch.float32) if want_dots else None
    sending = Sending(
        dy, None, weights, new(routing.rows, dy.shape[1]), None, None,
        rows_contiguous(expert_rows) if want_dots else None, dots, gradient=True,
    )
    launch_dispatch(routing, sending)
    return sending.rows, dots


def launch_dispatch(routing, sending, halves="both"):
    """Launch the kernel for both halves of a dispatch, or for one."""
    workspace = get_workspace(routing.group, sending.x.device, "ep_dispatch", across_nodes=True)
    _check_turn(workspace, routing.operator, sending, "dispatch", halves)
    try:
        if routing.uncounted is not None:
            launch_direct(routing, sending, halves)
        else:
            _launch_counted(workspace, routing, sending, halves)
    finally:
        workspace.pending = sending if halves == "send" else None


def _launch_counted(workspace, routing, sending, halves):
    x, scales = sending.x, sending.scales
    key = (
        halves, *routing.sizes, x.dtype, x.shape[1], None if scales is None else scales.shape[1:], sending.quantize,
        sending.gradient, sending.first,
    )
    operands = *as_memories(sending.tensors), *routing.known
    launch_kept(
        workspace, key, operands, lambda *of: _prepare_dispatch(workspace, routing, sending, halves, of),
        lies=by_address,
    )


def _prepare_dispatch(workspace, routing, sending, halves, operands):
    x, world_size, crossing = sending.x, routing.world_size, routing.crossing
    parts = parts_of(sending, routing.config)
    items, scale_words, constants = parts
    row_bytes, scale_row_bytes = items * size_of(constants["ITEM"]), scale_words * size_of(constants["SCALE"])
    slot = slot_memory(row_bytes, scale_row_bytes, routing.choices)
    fields = {
        "dtype": str(x.dtype), "width": x.shape[1], "scales": scale_bytes_of(sending), "quantize": sending.quantize,
        "weighted": sending.weights is not None, "gradient": sending.gradient, "k": routing.choices,
        "num_experts": routing.num_experts,
        "slots": routing.most_staged, "config": text_of(routing.config),
    }
    half_bytes = 8 * world_size * MAX_CHUNKS + slot * routing.most_staged
    if crossing is not None:
        fields["crossing"] = crossing.most
        slot = crossing_slot_memory(row_bytes, scale_row_bytes, routing.choices, crossing.local_world_size)
        half_bytes += 2 * slot * crossing.most
    plan = workspace.prepare(routing.operator, fields, half_bytes, world_size * MAX_CHUNKS)
    given, known = operands[: len(sending.tensors)], operands[len(sending.tensors) :]
    sending, routing = sending.with_tensors(given), routing.with_known(known)
    kernel, programs, args, constants = dispatch_call(workspace.ctx, routing, sending, parts, plan, halves)
    return Launch(workspace, kernel, (programs,), args, constants, operands, [], [workspace.ctx])


def dispatch_call(ctx, routing, sending, parts, plan, halves="both"):
    """(kernel, programs, arguments, constants) of a launch; ``parts`` are those of ``parts_of``."""
    config, crossing, x = routing.config, routing.crossing, sending.x
    items, scale_words, constants = parts
    programs, extents = _extents(routing, config, halves, _chunks_at_most(routing), _chunks_of_peers(routing))
    if crossing is None:
        constants["TILE_TOKENS"] = tile_tokens(routing.choices)
    args = (
        ctx, as_memory(x), as_memory(or_else(sending.scales, x)), sending.weights, *routing.known,
        as_memory(sending.rows), as_memory(or_else(sending.row_scales, sending.rows)), sending.row_weights,
        sending.expert_rows, sending.dots, routing.tokens, config.chunk_tokens, *extents, items, scale_words, plan,
    )
    constants = {
        "ADVANCE": halves != "send", "FIRST": sending.first, **_constants_of(routing), **constants,
        "num_warps": config.num_warps,
    }
    if crossing is not None:
        return ep_dispatch_nodes_kernel, programs, args, constants
    constants["trace_ptr"] = pieces_trace(x.device, routing.world_size)
    return ep_dispatch_kernel, programs, args, constants


def _check_turn(workspace, operator, tensors, what, halves):
    """Refuse to send anew before what was sent has been received, which it would write over; and to receive twice."""
    pending = workspace.pending
    if halves == "receive" and pending is not tensors:
        raise in_step(RuntimeError(f"{operator}: nothing of this {what} is left to be received"))
    if halves != "receive" and pending is not None:
        words = f"{operator}: an earlier {what} of this group was sent and not yet received; receive it first"
        raise in_step(RuntimeError(words))


# ---- combine ----


@dataclass
class Returning:
    """Tensors of a combine, from its first half to its second."""

    rows: torch.Tensor
    weights: torch.Tensor | None  # [T, K]
    row_weights: torch.Tensor | None  # [R]
    row_numbers: torch.Tensor | None
    y: torch.Tensor
    numbers: torch.Tensor | None
    per_expert: bool

    @property
    def tensors(self):
        return self.rows, self.weights, self.row_weights, self.row_numbers, self.y, self.numbers

    def with_tensors(self, tensors):
        return Returning(*tensors, self.per_expert)


@whole_call
def combine(routing, rows, *, weights=None, row_weights=None, row_numbers=None, config=None):
    """rows [R, H] as y [T, H]; and numbers [T, K], if each row has one to take along.

    Args:     weights: [T, K], what each choice weighs, or None for 1; row_weights: [R], the same by rows, which
              ``weighs_rows`` tells of; row_numbers: [R] fp32 or None
    Returns:  (y, numbers or None)
    """
    if routing.by_torch is not None:
        return torch_backend.combine(routing, rows, weights=weights, row_numbers=row_numbers)
    returning = prepare_combine(routing, rows, weights, row_weights, row_numbers, config)
    launch_combine(routing, returning, config=config)
    return returning.y, returning.numbers


def prepare_combine(routing, rows, weights=None, row_weights=None, row_numbers=None, config=None):
    config = config or routing.config
    rows = rows_contiguous(rows)
    y = rows.new_empty(routing.tokens, rows.shape[1])
    numbers = None
    if row_numbers is not None:
        row_numbers = row_numbers.to(torch.float32).contiguous()
        numbers = rows.new_empty(routing.tokens, routing.choices, dtype=torch.float32)
    if weights is not None:
        weights = weights.to(torch.float32).contiguous()
    return Returning(rows, weights, row_weights, row_numbers, y, numbers, config.combine == "per_expert")


def weighs_rows(routing, config):
    """Whether a combine needs the weights where the rows are: for sums that are made there, or on another node."""
    if routing.by_torch is not None:
        return False
    return config.combine == "per_rank" or routing.crossing is not None


def launch_combine(routing, returning, halves="both", config=None):
    """Launch the kernel for both halves of a combine, or for one."""
    config, rows = config or routing.config, returning.rows
    # What went wrong there is not to be combined.
    get_workspace(routing.group, rows.device, "ep_dispatch", across_nodes=True).check()
    workspace = get_workspace(routing.group, rows.device, "ep_combine", across_nodes=True)
    _check_turn(workspace, routing.operator, returning, "combine", halves)
    try:
        launch_kept(
            workspace, (halves, *routing.sizes, config, rows.shape[1]), (*returning.tensors, *routing.known),
            lambda *of: _prepare_combine(workspace, routing, returning, halves, config, of), lies=by_address,
        )
    finally:
        workspace.pending = returning if halves == "send" else None


def _prepare_combine(workspace, routing, returning, halves, config, operands):
    rows, crossing, per_expert = returning.rows, routing.crossing, returning.per_expert
    width, item_bytes = rows.shape[1], rows.element_size()
    slot = combine_slot_memory(
        width * item_bytes, routing.choices, per_expert, with_weights=crossing is not None and per_expert
    )
    half_bytes = slot * routing.most_staged
    fields = {
        "dtype": str(rows.dtype), "width": width, "k": routing.choices, "num_experts": routing.num_experts,
        "weighted": returning.weights is not None, "numbers": returning.row_numbers is not None,
        "slots": routing.most_staged, "config": text_of(config),
    }
    if crossing is not None:
        fields["crossing"] = crossing.most
        half_bytes += 2 * sum_slot_memory(width * item_bytes, routing.choices) * crossing.most
    plan = workspace.prepare(routing.operator, fields, half_bytes, routing.world_size * MAX_CHUNKS)
    given, known = operands[: len(returning.tensors)], operands[len(returning.tensors) :]
    returning, routing = returning.with_tensors(given), routing.with_known(known)
    kernel, programs, args, constants = combine_call(workspace.ctx, routing, returning, plan, config, halves)
    return Launch(workspace, kernel, (programs,), args, constants, operands, [], [workspace.ctx])


def combine_call(ctx, routing, returning, plan, config, halves="both"):
    """(kernel, programs, arguments, constants) of a launch."""
    rows, crossing = returning.rows, routing.crossing
    width, item_bytes = rows.shape[1], rows.element_size()
    programs, extents = _extents(routing, config, halves, _chunks_of_peers(routing), _chunks_at_most(routing))
    args = (
        ctx, rows, returning.row_weights, returning.row_numbers, returning.weights, *routing.known,
        returning.y, returning.numbers, routing.tokens, routing.config.chunk_tokens, *extents, width, plan,
    )
    constants = {
        "ADVANCE": halves != "send", "PER_EXPERT": returning.per_expert, "DTYPE": FLOATS[rows.dtype],
        "ALIGNED": width * item_bytes % 16 == 0, "BLOCK": block_of(width, item_bytes, config.block_bytes),
        **_constants_of(routing), "num_warps": config.num_warps,
    }
    if crossing is not None:
        return ep_combine_nodes_kernel, programs, args, constants
    constants["WHOLE"] = width % constants["BLOCK"] == 0
    constants["trace_ptr"] = pieces_trace(rows.device, routing.world_size)
    return ep_combine_kernel, programs, args, constants
