"""Launches of the kernels of all_to_all, ep_dispatch and ep_combine, and what they keep of a routing.

``route`` counts and lays out, ``dispatch`` sends tokens to rows, ``combine`` rows back to tokens. Where the number of
rows is to be exact the host waits for ``route``; with a capacity it never does. A group on several nodes has kernels of
its own, and its routing a ``Crossing``.
"""

from dataclasses import dataclass
from functools import partial

import torch
import triton.language as tl

from tdkernels.ops import ep_tables
from tdkernels.ops._config import as_argument, text_of
from tdkernels.ops._operands import rows_contiguous
from tdkernels.ops._tiles import next_power_of_2
from tdkernels.ops.ep_combine_kernel import ep_combine_kernel
from tdkernels.ops.ep_combine_nodes_kernel import ep_combine_nodes_kernel
from tdkernels.ops.ep_config import EpConfig
from tdkernels.ops.ep_crossing import (
    Crossing,
    crossing_slot_memory,
    line_bytes,
    make_crossing,
    round_up,
    sum_slot_memory,
)
from tdkernels.ops.ep_dispatch_kernel import QUANTUM, ep_dispatch_kernel
from tdkernels.ops.ep_dispatch_nodes_kernel import ep_dispatch_nodes_kernel
from tdkernels.ops.ep_route_kernel import NOTE_BAD_IDS, ep_agree_kernel, ep_route_kernel
from tdkernels.ops.ep_route_nodes_kernel import ep_agree_nodes_kernel, ep_places_kernel, ep_route_nodes_kernel
from tdkernels.ops.ep_tables import Fact
from tdkernels.symm import get_workspace

MAX_CHUNKS = ep_tables.MAX_CHUNKS.value
_FLOATS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}
_TILE_IDS = 64  # ids that a counting program compares with each other
_FEW_TILES = 32  # so many are added up by the program that is done last
_NO_LIMIT = (1 << 31) - 1
_FEWEST_SLOTS = 64
_FEWEST_CHUNKS = 32  # of a peer, that we are ready for


@dataclass
class Routing:
    """Which rows the tokens of all ranks have: made by ``route``, completed by the first ``dispatch``."""

    group: object
    config: EpConfig | None  # None until it is chosen, for what was given none
    operator: str
    tokens: int  # T
    choices: int  # K
    num_experts: int
    max_tokens: int | None  # rows of the output, or None: as many as come
    rows: int  # of the output
    staged: int  # tokens on the rank that stages most, or max_tokens: the same on all ranks
    most_staged: int  # slots that are enough on any rank; across nodes for what its node peers send
    tables: torch.Tensor  # int32, see ep_tables
    splits: torch.Tensor  # [E / W] int32: rows of each expert here; by source [W, E / W]
    came: torch.Tensor | None = None  # int32, see ep_tables: what has been received
    crossing: Crossing | None = None  # in a group on several nodes
    config_is_given: bool = True

    @property
    def world_size(self):
        return self.group.size()

    @property
    def known(self):
        """The tables, as kernels take them."""
        if self.crossing is None:
            return self.tables, self.came
        return self.tables, self.crossing.tables, self.came, self.crossing.passed


def _error_of_note(operator, name, kind, first, second, third):
    """What a note of ``ep_route_kernel`` says, as an error."""
    if kind == NOTE_BAD_IDS.value:
        return ValueError(f"{operator}: the ids or splits of rank {first} are out of range or do not add up")
    return ValueError(
        f"{operator}: max_tokens={third} is too small: a rank receives {first} rows, and {second} tokens are staged at "
        "most (on a rank, counted once for each peer); nothing was sent"
    )


def _tile_ids(k):
    return max(_TILE_IDS, next_power_of_2(k))


def slot_memory(row_bytes, scale_bytes, k):
    """Bytes of a slot of ``ep_dispatch_kernel``."""
    return round_up(round_up(row_bytes, 16) + round_up(scale_bytes, 16) + 8 * k, 128)


def combine_slot_memory(row_bytes, k, per_expert, with_weights=False):
    """Bytes of a slot of ``ep_combine_kernel``."""
    return round_up(round_up(row_bytes, 16) * (k if per_expert else 1) + (8 if with_weights else 4) * k, 128)


# ---- route ----


def route(operator, ids, num_experts, group, config, *, max_tokens=None, by_source=False, bad=None):
    """The Routing of ids [T, K]; the host waits for it unless ``max_tokens`` says how many rows there may be.

    ``config``: None if it is to be chosen by what is found
    ``bad``: an int32 scalar on the device, not zero if something is wrong with the ids that their values do not show
    Raises:   ValueError on every rank for wrong ids (-1 is a dropped choice) or more rows than ``max_tokens``: on a GPU
              with ``max_tokens`` later, see ``Workspace.check``
    """
    tokens, k = ids.shape
    device, world_size = ids.device, group.size()
    columns = num_experts + world_size + 2
    tile_tokens = _tile_ids(k) // k
    tiles = max(-(-tokens // tile_tokens), 1)
    workspace = get_workspace(group, device, "ep_counts", across_nodes=True)
    fields = {"num_experts": num_experts, "k": k, "max_tokens": max_tokens, "config": as_argument(config)}
    crossing = make_crossing(world_size, workspace.group.local_world_size, tokens, tiles, device)
    line = 4 * columns if crossing is None else line_bytes(num_experts, world_size, crossing.local_world_size)
    plan = workspace.prepare(operator, fields, world_size * line, world_size, num_flags=1)
    workspace.error_of_note = partial(_error_of_note, operator)  # after a note of an earlier call has been raised
    if max_tokens is None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{operator}: without max_tokens the host waits for the number of rows, which a CUDA graph cannot capture"
        )
    length = ep_tables.length(num_experts, world_size, tokens, k, tiles)
    tables = torch.empty(length, dtype=torch.int32, device=device)
    local = num_experts // world_size
    splits = torch.empty((world_size, local) if by_source else (local,), dtype=torch.int32, device=device)
    ids = ids.contiguous()
    workspace.before_launch()
    capacity = max_tokens or _NO_LIMIT
    places = _places_constants(k, num_experts, world_size, crossing)
    constants, agreeing = _route_constants(tokens, num_experts + world_size + 2, by_source, places)
    count, agree, written = ep_route_kernel, ep_agree_kernel, (tables, splits)
    if crossing is not None:
        count, agree, written = ep_route_nodes_kernel, ep_agree_nodes_kernel, (tables, crossing.tables, splits)
    count[(tiles,)](workspace.ctx, ids, bad, *written, tokens, capacity, plan, AGREE=not agreeing, **constants)
    if agreeing:
        agree[(-(-columns // agreeing["BLOCK"]),)](
            workspace.ctx, bad, *written, tokens, tiles, capacity, plan, **agreeing
        )
    if crossing is not None:
        ep_places_kernel[(tiles,)](
            workspace.ctx, tables, crossing.tables, tokens, TILE_TOKENS=tile_tokens, **places, num_warps=1
        )
    workspace.after_launch()
    rows = staged = crosses = max_tokens
    if max_tokens is None:
        begin = ep_tables.facts_begin(num_experts, world_size)
        facts = tables[begin : begin + ep_tables.NUM_FACTS.value].tolist()
        workspace.check()
        rows, staged = facts[Fact.ROWS], facts[Fact.MOST_STAGED if crossing is None else Fact.MOST_HERE]
        crosses = facts[Fact.MOST_PASSED]
    if crossing is not None:
        crossing.most = _slots(crosses)
    return Routing(
        group, config, operator, tokens, k, num_experts, max_tokens, rows, staged, _slots(staged), tables, splits,
        crossing=crossing, config_is_given=config is not None,
    )  # fmt: skip


def _slots(most):
    """How many slots there are for at most so many tokens: few different numbers ever have to be agreed upon."""
    return max(next_power_of_2(most), _FEWEST_SLOTS)


def _route_constants(tokens, columns, by_source, places):
    """(the constants of ``ep_route_kernel``, those of ``ep_agree_kernel`` or None where it is not needed)"""
    n = _tile_ids(places["K"])
    columns = next_power_of_2(columns)
    common = {"BY_SOURCE": by_source, **places, "num_warps": 8}
    route = {**common, "N": n, "BLOCK": min(columns, 512), "AT_ONCE": 16}
    if n // places["K"] * _FEW_TILES >= tokens:
        return route, None
    return route, {**common, "BLOCK": min(columns, 8), "AT_ONCE": 512}


def _places_constants(k, num_experts, world_size, crossing):
    """What every kernel knows of a routing when it is compiled."""
    constants = {"K": k, "EXPERTS": num_experts, "RANKS": world_size}
    return constants if crossing is None else {**constants, "LOCAL": crossing.local_world_size}


# ---- dispatch ----


def _memory(tensor):
    """What a kernel gets for memory to which it makes pointers of its own: not every GPU knows pointers to fp8."""
    if tensor is None or tensor.dtype.itemsize > 1:
        return tensor
    return tensor.view(torch.uint8)


def _or(tensor, other):
    """What a kernel gets for a tensor that is not there and that it does not touch then."""
    return other if tensor is None else tensor


def _word(nbytes):
    """What rows of so many bytes are moved in: (Triton's type, its bytes)."""
    size = next(size for size in _WORDS if nbytes % size == 0)
    return _WORDS[size], size


def _size(dtype):
    return dtype.primitive_bitwidth // 8


def _block(items, item_bytes, block_bytes, least=1):
    return max(min(next_power_of_2(max(items, 1)), block_bytes // item_bytes), least)


def _scale_bytes(sending):
    """Of a token."""
    return 0 if sending.scales is None else sending.scales.shape[1:].numel() * sending.scales.element_size()


def parts_of(sending, config):
    """(items of a row, words of its scales, what the kernel's constants say of them)."""
    x, quantize, gradient, scale_bytes = sending.x, sending.quantize, sending.gradient, _scale_bytes(sending)
    width = x.shape[1]
    nbytes = width * x.element_size()
    if quantize or gradient:
        source, source_bytes, items = _FLOATS[x.dtype], x.element_size(), width
    else:
        source, source_bytes = _word(nbytes)
        items = nbytes // source_bytes
    item, item_bytes = (tl.uint8, 1) if quantize else (source, source_bytes)
    block = _block(items, source_bytes, config.block_bytes, QUANTUM.value if quantize else 1)
    if quantize:
        scale, scale_size, scale_words, scale_block = tl.float32, 4, -(-width // QUANTUM.value), block // QUANTUM.value
    else:
        scale, scale_size = _word(scale_bytes) if scale_bytes else (tl.uint8, 1)
        scale_words = scale_bytes // scale_size
        scale_block = next_power_of_2(max(scale_words, 1))
    return items, scale_words, {
        "GRADIENT": gradient, "QUANTIZE": quantize, "SOURCE": source, "ITEM": item, "SCALE": scale,
        "ALIGNED": items * item_bytes % 16 == 0, "BLOCK": block, "SCALE_BLOCK": scale_block,
    }  # fmt: skip


def _constants_of(routing):
    return _places_constants(routing.choices, routing.num_experts, routing.world_size, routing.crossing)


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
    return min(max(-(-routing.tokens // routing.config.chunk_tokens), 1), MAX_CHUNKS)


def _chunks_of_peers(routing):
    """About how many chunks there are of the peers' tokens: as of ours, of which alone the host knows."""
    return max(_chunks_at_most(routing), _FEWEST_CHUNKS) * (routing.world_size - 1)


@dataclass
class Sending:
    """Tensors of a dispatch, from its first half to its second."""

    x: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor | None
    rows: torch.Tensor
    row_scales: torch.Tensor | None
    row_weights: torch.Tensor | None
    expert_rows: torch.Tensor | None = None
    dots: torch.Tensor | None = None
    quantize: bool = False
    gradient: bool = False
    first: bool = False


def dispatch(routing, x, *, scales=None, weights=None, quantize=False):
    """x [T, H] of each rank as rows [R, H]; returns (rows, scales [R, S] or None, weights [R] or None)."""
    sending = prepare_dispatch(routing, x, scales=scales, weights=weights, quantize=quantize)
    launch_dispatch(routing, sending)
    return sending.rows, sending.row_scales, sending.row_weights


def prepare_dispatch(routing, x, *, scales=None, weights=None, quantize=False):
    """The output tensors of a dispatch, and the operands as the kernel takes them."""
    x, rows = rows_contiguous(x), routing.rows
    out = x.new_empty(rows, x.shape[1], dtype=torch.float8_e4m3fn if quantize else x.dtype)
    row_scales = None
    if quantize:
        row_scales = x.new_empty(rows, -(-x.shape[1] // QUANTUM.value), dtype=torch.float32)
    elif scales is not None:
        scales = rows_contiguous(scales)
        row_scales = scales.new_empty(rows, *scales.shape[1:])
    row_weights = None
    if weights is not None:
        row_weights = x.new_empty(rows, dtype=torch.float32)
        weights = weights.to(torch.float32).contiguous()
    first = routing.came is None
    if first:
        length = ep_tables.came_length(routing.world_size, routing.most_staged, routing.choices)
        routing.came = torch.empty(length, dtype=torch.int32, device=x.device)
        if routing.crossing is not None:
            routing.crossing.make_passed(routing.choices)
    return Sending(x, scales, weights, out, row_scales, row_weights, quantize=quantize, first=first)


def dispatch_gradient(routing, dy, expert_rows, weights, want_dots):
    """(gradient of the rows [R, H], of their weights [R] or None) of a sum of rows, times ``weights`` [T, K] or 1."""
    dy = rows_contiguous(dy)
    # With a capacity some rows belong to no token, and have no part in any sum.
    new = dy.new_empty if routing.max_tokens is None else dy.new_zeros
    dots = new(routing.rows, dtype=torch.float32) if want_dots else None
    sending = Sending(
        dy, None, weights, new(routing.rows, dy.shape[1]), None, None,
        rows_contiguous(expert_rows) if want_dots else None, dots, gradient=True,
    )  # fmt: skip
    launch_dispatch(routing, sending)
    return sending.rows, dots


def launch_dispatch(routing, sending, halves="both"):
    """Launch the kernel for both halves of a dispatch, or for one."""
    x, world_size, crossing = sending.x, routing.world_size, routing.crossing
    parts = parts_of(sending, routing.config)
    items, scale_words, constants = parts
    row_bytes, scale_row_bytes = items * _size(constants["ITEM"]), scale_words * _size(constants["SCALE"])
    slot = slot_memory(row_bytes, scale_row_bytes, routing.choices)
    fields = {
        "dtype": str(x.dtype), "width": x.shape[1], "scales": _scale_bytes(sending), "quantize": sending.quantize,
        "weighted": sending.weights is not None, "gradient": sending.gradient, "k": routing.choices,
        "num_experts": routing.num_experts,
        "slots": routing.most_staged, "config": text_of(routing.config),
    }  # fmt: skip
    half_bytes = 8 * world_size * MAX_CHUNKS + slot * routing.most_staged
    if crossing is not None:
        fields["crossing"] = crossing.most
        slot = crossing_slot_memory(row_bytes, scale_row_bytes, routing.choices, crossing.local_world_size)
        half_bytes += 2 * slot * crossing.most
    workspace = get_workspace(routing.group, x.device, "ep_dispatch", across_nodes=True)
    _check_turn(workspace, routing.operator, sending, "dispatch", halves)
    plan = workspace.prepare(routing.operator, fields, half_bytes, world_size * MAX_CHUNKS)
    workspace.kept["pending"] = sending if halves == "send" else None
    workspace.before_launch()
    kernel, programs, args, constants = dispatch_call(workspace.ctx, routing, sending, parts, plan, halves)
    kernel[(programs,)](*args, **constants)
    workspace.after_launch()


def dispatch_call(ctx, routing, sending, parts, plan, halves="both"):
    """(kernel, programs, arguments, constants) of a launch; ``parts`` are those of ``parts_of``."""
    config, crossing, x = routing.config, routing.crossing, sending.x
    items, scale_words, constants = parts
    programs, extents = _extents(routing, config, halves, _chunks_at_most(routing), _chunks_of_peers(routing))
    if crossing is None:
        constants["TILE_TOKENS"] = _tile_ids(routing.choices) // routing.choices
    args = (
        ctx, _memory(x), _memory(_or(sending.scales, x)), sending.weights, *routing.known,
        _memory(sending.rows), _memory(_or(sending.row_scales, sending.rows)), sending.row_weights,
        sending.expert_rows, sending.dots, routing.tokens, config.chunk_tokens, *extents, items, scale_words, plan,
    )  # fmt: skip
    constants = {
        "ADVANCE": halves != "send", "FIRST": sending.first, **_constants_of(routing), **constants,
        "num_warps": config.num_warps,
    }  # fmt: skip
    return ep_dispatch_kernel if crossing is None else ep_dispatch_nodes_kernel, programs, args, constants


def _check_turn(workspace, operator, tensors, what, halves):
    """Refuse to send anew before what was sent has been received, which it would write over; and to receive twice."""
    pending = workspace.kept.get("pending")
    if halves == "receive" and pending is not tensors:
        raise RuntimeError(f"{operator}: nothing of this {what} is left to be received")
    if halves != "receive" and pending is not None:
        raise RuntimeError(
            f"{operator}: an earlier {what} of this group was sent and not yet received; receive it first"
        )


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


def combine(routing, rows, *, weights=None, row_weights=None, row_numbers=None, config=None):
    """rows [R, H] as y [T, H]; and numbers [T, K], if each row has one to take along.

    Args:     weights: [T, K], what each choice weighs, or None for 1; row_weights: [R], the same by rows, which
              ``weighs_rows`` tells of; row_numbers: [R] fp32 or None
    Returns:  (y, numbers or None)
    """
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
    return config.combine == "per_rank" or routing.crossing is not None


def launch_combine(routing, returning, halves="both", config=None):
    """Launch the kernel for both halves of a combine, or for one."""
    config = config or routing.config
    rows, world_size = returning.rows, routing.world_size
    width, item_bytes = rows.shape[1], rows.element_size()
    crossing, per_expert = routing.crossing, returning.per_expert
    slot = combine_slot_memory(
        width * item_bytes, routing.choices, per_expert, with_weights=crossing is not None and per_expert
    )
    half_bytes = slot * routing.most_staged
    fields = {
        "dtype": str(rows.dtype), "width": width, "k": routing.choices, "num_experts": routing.num_experts,
        "weighted": returning.weights is not None, "numbers": returning.row_numbers is not None,
        "slots": routing.most_staged, "config": text_of(config),
    }  # fmt: skip
    if crossing is not None:
        fields["crossing"] = crossing.most
        half_bytes += 2 * sum_slot_memory(width * item_bytes, routing.choices) * crossing.most
    # What went wrong there is not to be combined.
    get_workspace(routing.group, rows.device, "ep_dispatch", across_nodes=True).check()
    workspace = get_workspace(routing.group, rows.device, "ep_combine", across_nodes=True)
    _check_turn(workspace, routing.operator, returning, "combine", halves)
    plan = workspace.prepare(routing.operator, fields, half_bytes, world_size * MAX_CHUNKS)
    workspace.kept["pending"] = returning if halves == "send" else None
    workspace.before_launch()
    kernel, programs, args, constants = combine_call(workspace.ctx, routing, returning, plan, config, halves)
    kernel[(programs,)](*args, **constants)
    workspace.after_launch()


def combine_call(ctx, routing, returning, plan, config, halves="both"):
    """(kernel, programs, arguments, constants) of a launch."""
    rows, crossing = returning.rows, routing.crossing
    width, item_bytes = rows.shape[1], rows.element_size()
    programs, extents = _extents(routing, config, halves, _chunks_of_peers(routing), _chunks_at_most(routing))
    args = (
        ctx, rows, returning.row_weights, returning.row_numbers, returning.weights, *routing.known,
        returning.y, returning.numbers, routing.tokens, routing.config.chunk_tokens, *extents, width, plan,
    )  # fmt: skip
    constants = {
        "ADVANCE": halves != "send", "PER_EXPERT": returning.per_expert, "DTYPE": _FLOATS[rows.dtype],
        "ALIGNED": width * item_bytes % 16 == 0, "BLOCK": _block(width, item_bytes, config.block_bytes),
        **_constants_of(routing), "num_warps": config.num_warps,
    }  # fmt: skip
    return ep_combine_kernel if crossing is None else ep_combine_nodes_kernel, programs, args, constants
