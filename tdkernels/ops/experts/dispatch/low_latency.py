"""The launcher of ``ep_direct_kernel``: dispatch and routing in one launch, for few tokens.

It needs a bound on the tokens of each rank that all ranks know, ``max_tokens_per_rank``: by it a token's slot in the
memory of a peer is known before anything has been counted.
"""

from dataclasses import replace

import torch

from tdkernels.ops.common.config import text_of
from tdkernels.ops.experts.dispatch import layout
from tdkernels.ops.experts.dispatch.device_errors import TopkIds
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
from tdkernels.ops.experts.dispatch.routing import Routing, listen, slots_for
from tdkernels.rounding import next_power_of_2, round_up
from tdkernels.runtime.kernel_launch import CALL_NUMBER, Launch, by_address, launch_kept
from tdkernels.symm import get_workspace


def slot_memory(row_bytes, scale_bytes, k):
    """Bytes of a slot of ``ep_direct_kernel``."""
    return round_up(round_up(row_bytes, 16) + round_up(scale_bytes, 16) + 12 * k, 128)


def can_be_direct(config, most, k, num_experts, world_size):
    """Whether tokens, at most so many on a rank, can: what is compared fits small tiles, and each has its signal."""
    each = next_power_of_2(world_size) * next_power_of_2(num_experts // world_size)
    small = next_power_of_2(k) * max(each, 32) <= MOST_COMPARED.value
    return small and most <= min(config.direct_tokens, MAX_CHUNKS)


def bounded_routing(operator, ids, num_experts, group, config, max_tokens, most, slots=None):
    """A Routing of ids [T, k], T <= ``most`` on any rank, of which nothing is known yet but how large things are.

    ``config``: None if it is to be chosen; ``slots``: those ``slots_for`` the tokens of all ranks, if they are known
    """
    (tokens, k), slots = ids.shape, slots or slots_for(group.size() * most)
    return Routing(
        group, config, operator, tokens, k, num_experts, max_tokens, max_tokens, max_tokens, slots, None, None,
        config_is_given=config is not None, most_tokens=most,
    )


def direct_config(config):
    """The config of a dispatch in one launch: each token has a signal of its own."""
    return replace(config, chunk_tokens=1)


def table_words(ids, num_experts, world_size):
    """Words of the tables of a Routing that its dispatch finds."""
    return layout.length(num_experts, world_size, *ids.shape, 0)


def leave_uncounted(routing, ids, bad=None, by_source=False, given=None, words=None):
    """Let the first dispatch of a Routing find it.

    Args:     bad, by_source, given: as of ``route``; words: ``table_words``, if they are known
    """
    ranks = routing.world_size
    words = words or table_words(ids, routing.num_experts, ranks)
    routing.tables = torch.empty(words, dtype=torch.int32, device=ids.device)
    if routing.config.chunk_tokens != 1:
        routing.config = direct_config(routing.config)
    local = routing.num_experts // ranks
    shape = (ranks, local) if by_source else (local,)
    routing.splits = torch.empty(shape, dtype=torch.int32, device=ids.device)
    routing.uncounted, routing.given = (ids.contiguous(), bad), given or TopkIds(ids, routing.num_experts)


def launch_direct(routing, sending, halves):
    """Launch the kernel for both halves of a dispatch that finds its routing, or for one.

    In a workspace of its own: what it has to tell (``lang.host_error``) is for the next call that finds a routing. A
    rank that heard of it in a combine would stop, while its peers wait for it there.
    """
    x, scales = sending.x, sending.scales
    workspace = get_workspace(routing.group, x.device, "ep_direct")
    if halves != "receive":
        listen(workspace, routing.operator, routing.given)
    key = (
        "direct", halves, *routing.sizes, routing.most_tokens, routing.max_tokens, _by_source(routing), x.dtype,
        x.shape[1], None if scales is None else scales.shape[1:], sending.quantize,
    )
    operands = *as_memories(sending.tensors), *routing.known, *routing.uncounted, routing.splits
    launch_kept(
        workspace, key, operands, lambda *of: _prepare(workspace, routing, sending, halves, of), lies=by_address
    )
    if halves != "send":
        routing.uncounted = None  # from now on it is a routing as any other


def _prepare(workspace, routing, sending, halves, operands):
    parts = parts_of(sending, routing.config)
    items, scale_words, constants = parts
    slot = slot_memory(items * size_of(constants["ITEM"]), scale_words * size_of(constants["SCALE"]), routing.choices)
    ranks, most = routing.world_size, routing.most_tokens
    fields = {
        "dtype": str(sending.x.dtype), "width": sending.x.shape[1], "scales": scale_bytes_of(sending),
        "quantize": sending.quantize, "weighted": sending.weights is not None, "k": routing.choices,
        "num_experts": routing.num_experts, "max_tokens": routing.max_tokens, "max_tokens_per_rank": most,
        "config": text_of(routing.config),
    }
    half_bytes = round_up(4 * ranks * line_words(routing.num_experts, ranks), 128) + ranks * most * slot
    plan = workspace.prepare(routing.operator, fields, half_bytes, ranks * MAX_CHUNKS + ranks)
    *given, tables, came, ids, bad, splits = operands
    kernel, programs, args, constants = direct_call(
        workspace.ctx, routing, sending.with_tensors(given), parts, plan, (tables, came, ids, bad, splits), halves,
        CALL_NUMBER,
    )
    return Launch(
        workspace, kernel, (programs,), args, constants, operands, [], [workspace.ctx], looks=halves != "receive"
    )


def _by_source(routing):
    return routing.splits.dim() == 2


def direct_call(ctx, routing, sending, parts, plan, known, halves="both", call=0):
    """(kernel, programs, arguments, constants) of a launch; ``known``: tables, came, ids, bad, splits."""
    config, x = routing.config, sending.x
    items, scale_words, constants = parts
    tables, came, ids, bad, splits = known
    # With the program that counts, and with the one that settles.
    senders = 1 + min(config.num_senders, max(routing.tokens, 1)) if halves != "receive" else 0
    receivers = 1 + min(config.num_receivers, routing.world_size * routing.most_tokens) if halves != "send" else 0
    args = (
        ctx, ids, bad, as_memory(x), as_memory(or_else(sending.scales, x)), sending.weights, tables, came, splits,
        as_memory(sending.rows), as_memory(or_else(sending.row_scales, sending.rows)), sending.row_weights,
        routing.tokens, routing.most_tokens, routing.max_tokens, senders, items, scale_words, plan,
        call,
    )
    constants = {name: value for name, value in constants.items() if name != "GRADIENT"} | {
        "ADVANCE": halves != "send", "BY_SOURCE": _by_source(routing), "K": routing.choices,
        "EXPERTS": routing.num_experts, "RANKS": routing.world_size,
        "N": min(MOST_COMPARED.value // next_power_of_2(routing.choices), MOST_IDS.value),
        "num_warps": config.num_warps, "trace_ptr": pieces_trace(x.device, routing.world_size),
    }
    return ep_direct_kernel, senders + receivers, args, constants
