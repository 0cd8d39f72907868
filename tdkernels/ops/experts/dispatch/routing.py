"""Which rows tokens go to: what operators of expert parallelism know of a routing, and the launches that find it.

``route`` counts and lays out. Where the number of rows is to be exact the host waits for it; with a capacity it never
does. A group on several nodes has kernels of its own, and its routing a ``Crossing``.
"""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch

from tdkernels.ops.common.config import as_argument
from tdkernels.ops.experts.dispatch import layout
from tdkernels.ops.experts.dispatch.config import EpConfig
from tdkernels.ops.experts.dispatch.device_errors import TopkIds, too_many_tokens
from tdkernels.ops.experts.dispatch.kernel_route import NOTE_BAD_IDS, ep_agree_kernel, ep_route_kernel
from tdkernels.ops.experts.dispatch.layout import Fact
from tdkernels.ops.experts.dispatch.multinode.crossing import Crossing, line_bytes, make_crossing
from tdkernels.ops.experts.dispatch.multinode.kernel_route import (
    ep_agree_nodes_kernel,
    ep_places_kernel,
    ep_route_nodes_kernel,
)
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime.kernel_launch import CALL_NUMBER, Launch, by_address, launch_kept
from tdkernels.symm import get_workspace

_TILE_IDS = 64  # ids that a counting program compares with each other
_FEW_TILES = 32  # so many are added up by the program that is done last
_NO_LIMIT = (1 << 31) - 1
_FEWEST_SLOTS = 64


class Reach(NamedTuple):
    """How much any rank has at most, for memory that is laid out alike on all of them: the same numbers everywhere."""

    rows: int  # that it receives
    choices: int  # of its tokens


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
    splits: torch.Tensor  # [E / W] int32: rows of each expert here; of rows laid out by source [W, E / W]
    came: torch.Tensor | None = None  # int32, see ep_tables: what has been received
    crossing: Crossing | None = None  # in a group on several nodes
    config_is_given: bool = True
    reach: Reach | None = None  # where ``whole`` was asked for, and where the host has waited, on one node
    most_tokens: int | None = None  # max_tokens_per_rank
    by_torch: object = None  # the ByTorch of what goes by torch's collectives
    uncounted: tuple | None = None  # the ids, and what else is wrong with them, that the first dispatch is to count
    given: object = None  # and those ids as errors name them, see ep_refusals

    @property
    def world_size(self):
        return self.group.size()

    @property
    def known(self):
        """The tables, as kernels take them."""
        if self.crossing is None:
            return self.tables, self.came
        return self.tables, self.crossing.tables, self.came, self.crossing.passed

    def with_known(self, known):
        """The same with other tables."""
        if self.crossing is None:
            return replace(self, tables=known[0], came=known[1])
        crossing = replace(self.crossing, tables=known[1], passed=known[3])
        return replace(self, tables=known[0], came=known[2], crossing=crossing)

    @property
    def sizes(self):
        """All that launches follow from, beside the tables."""
        crossing = None if self.crossing is None else (self.crossing.local_world_size, self.crossing.most)
        return self.operator, self.tokens, self.choices, self.num_experts, self.most_staged, self.config, crossing


def unrouted(
    operator, tokens, choices, num_experts, world_size, config, device, *, max_tokens=None, by_source=False, reach=None
):
    """A Routing that nobody has found: what kernels can be compiled with."""
    tables = torch.empty(1, dtype=torch.int32, device=device)
    return Routing(
        SimpleNamespace(size=lambda: world_size), config, operator, tokens, choices, num_experts, max_tokens, rows=1,
        staged=1, most_staged=1, tables=tables, splits=tables[None] if by_source else tables, reach=reach,
    )


def _error_of_note(operator, given, here, name, kind, first, second, third):
    """What a note of ``ep_route_kernel`` says, as an error."""
    if kind == NOTE_BAD_IDS.value:
        return too_many_tokens(operator, first, -second) if second < 0 else given.refused(operator, first, here)
    return ValueError(
        f"{operator}: max_tokens={third} is too small: a rank receives {first} rows, and {second} tokens are staged at "
        "most (on a rank, counted once for each peer; where rows go straight to experts, choices of tokens); nothing "
        "was sent"
    )


def route(
    operator, ids, num_experts, group, config, *, max_tokens=None, most_tokens=None, by_source=False, bad=None,
    whole=False, given=None,
):
    """The Routing of ids [T, K]; the host waits for it unless ``max_tokens`` says how many rows there may be.

    ``config``: None if it is to be chosen by what is found
    ``most_tokens``: max_tokens_per_rank, which goes with a ``max_tokens``; who has more says so by ``bad``
    ``bad``: an int32 scalar on the device, not zero if something is wrong with the ids that their values do not show:
              1, or minus the number of tokens that were too many to be among them
    ``whole``: each choice is to be sent by itself, and all choices of a rank have to fit ``max_tokens``, too. Not in a
    group on several nodes
    ``given``: what the ids were made of, see ``device_errors``; None: they are the topk_ids of the call
    Raises:   ValueError on every rank for wrong ids (-1 is a dropped choice) or more rows than ``max_tokens``: on a GPU
              with ``max_tokens`` later, see ``Workspace.check``
    """
    tokens, k = ids.shape
    device, world_size = ids.device, group.size()
    tiles = _tiles(tokens, k)
    workspace = get_workspace(group, device, "ep_counts", across_nodes=True)
    if max_tokens is None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{operator}: without max_tokens the host waits for the number of rows, which a CUDA graph cannot capture"
        )
    crossing = make_crossing(world_size, workspace.group.local_world_size, tokens, tiles, device)
    length = layout.length(num_experts, world_size, tokens, k, tiles)
    tables = torch.empty(length, dtype=torch.int32, device=device)
    local = num_experts // world_size
    splits = torch.empty((world_size, local) if by_source else (local,), dtype=torch.int32, device=device)
    counting = _Counting(
        operator, tokens, k, num_experts, max_tokens, most_tokens, by_source, as_argument(config), whole
    )
    listen(workspace, operator, given or TopkIds(ids, num_experts))
    _launch_route(workspace, counting, crossing, ids.contiguous(), bad, tables, splits)
    rows = staged = crosses = max_tokens
    if max_tokens is None:
        begin = layout.facts_begin(num_experts, world_size)
        facts = tables[begin : begin + layout.NUM_FACTS.value].tolist()
        workspace.check()
        rows, staged = facts[Fact.ROWS], facts[Fact.MOST_STAGED if crossing is None else Fact.MOST_HERE]
        crosses = facts[Fact.MOST_PASSED]
    reach, known = None, max_tokens is None
    if whole or (known and crossing is None):
        if known:
            most_rows, most_choices = facts[Fact.MOST_ROWS], facts[Fact.MOST_TOKENS] * k
        else:
            most_rows, most_choices = max_tokens, min(max_tokens, k * (most_tokens or max_tokens))
        reach = Reach(_room(most_rows), _room(most_choices))
    if crossing is not None:
        crossing.most = slots_for(crosses)
    return Routing(
        group, config, operator, tokens, k, num_experts, max_tokens, rows, staged, slots_for(staged), tables, splits,
        crossing=crossing, config_is_given=config is not None, reach=reach, most_tokens=most_tokens,
    )


class _Counting(NamedTuple):
    """All that the launches of a ``route`` follow from, beside its group."""

    operator: str
    tokens: int
    k: int
    num_experts: int
    max_tokens: int | None
    most_tokens: int | None
    by_source: bool
    config: str  # as text, for the ranks to agree on
    whole: bool


def listen(workspace, operator, given):
    """Make the note of this workspace's next call an error of an operator, after the notes of earlier calls."""
    workspace.check()
    workspace.explain_notes(partial(_error_of_note, operator, given, workspace.rank))


def _launch_route(workspace, counting, crossing, ids, bad, tables, splits):
    known = (tables,) if crossing is None else (tables, crossing.tables)
    steps = [_count, *([_agree] if _agrees_apart(counting.tokens, counting.k) else []), *([_place] if crossing else [])]
    for step in steps:
        key = step, counting, None if crossing is None else crossing.local_world_size
        launch_kept(
            workspace, key, (ids, bad, *known, splits), lambda *of, step=step: step(workspace, counting, crossing, of),
            lies=by_address,
        )


def _room(most):
    """Room for at most so many rows, a few more than must be: few different numbers ever have to be agreed upon."""
    step = max(next_power_of_2(most) // 16, _FEWEST_SLOTS)
    return max(cdiv(most, step), 1) * step


def slots_for(most):
    """How many slots there are for at most so many tokens: few different numbers ever have to be agreed upon."""
    return max(next_power_of_2(most), _FEWEST_SLOTS)


def _route_plan(workspace, counting, crossing):
    """The number of the plan; see ``Workspace.prepare``."""
    world_size, experts = workspace.world_size, counting.num_experts
    fields = {
        "num_experts": experts, "k": counting.k, "max_tokens": counting.max_tokens,
        "max_tokens_per_rank": counting.most_tokens, "config": counting.config, "whole": counting.whole,
    }
    columns = experts + world_size + 2
    line = 4 * columns if crossing is None else line_bytes(experts, world_size, crossing.local_world_size)
    return workspace.prepare(counting.operator, fields, world_size * line, world_size, num_flags=1)


def _route_places(workspace, counting, crossing):
    """What the launches of a ``route`` know when they are compiled."""
    places = places_constants(counting.k, counting.num_experts, workspace.world_size, crossing)
    return places if crossing is not None else {**places, "WHOLE": counting.whole}


def _count(workspace, counting, crossing, operands):
    """The Launch that counts a rank's ids, and where these are few adds up and lays out what all ranks send."""
    ids, bad, *written = operands
    plan, places = _route_plan(workspace, counting, crossing), _route_places(workspace, counting, crossing)
    constants, agreeing = _route_constants(counting.tokens, _columns(workspace, counting), counting.by_source, places)
    args = workspace.ctx, ids, bad, *written, counting.tokens, counting.max_tokens or _NO_LIMIT, plan, CALL_NUMBER
    kernel = ep_route_kernel if crossing is None else ep_route_nodes_kernel
    constants["AGREE"] = agreeing is None
    grid = (_tiles(counting.tokens, counting.k),)
    return Launch(workspace, kernel, grid, args, constants, operands, [], [workspace.ctx])


def _agree(workspace, counting, crossing, operands):
    """The Launch that adds up and lays out, where there are many ids."""
    _, bad, *written = operands
    plan, places = _route_plan(workspace, counting, crossing), _route_places(workspace, counting, crossing)
    columns = _columns(workspace, counting)
    _, constants = _route_constants(counting.tokens, columns, counting.by_source, places)
    kernel = ep_agree_kernel if crossing is None else ep_agree_nodes_kernel
    capacity = counting.max_tokens or _NO_LIMIT
    tiles = _tiles(counting.tokens, counting.k)
    args = workspace.ctx, bad, *written, counting.tokens, tiles, capacity, plan, CALL_NUMBER
    grid = (cdiv(columns, constants["BLOCK"]),)
    return Launch(workspace, kernel, grid, args, constants, operands, [], [workspace.ctx], looks=False)


def _place(workspace, counting, crossing, operands):
    """The Launch that finds the places of what crosses to other nodes."""
    args = workspace.ctx, *operands[2:4], counting.tokens
    places = _route_places(workspace, counting, crossing)
    constants = {"TILE_TOKENS": tile_tokens(counting.k), **places, "num_warps": 1}
    grid = (_tiles(counting.tokens, counting.k),)
    return Launch(workspace, ep_places_kernel, grid, args, constants, operands, [], [workspace.ctx], looks=False)


def _tile_ids(k):
    """Ids of a program that counts, at most."""
    return max(_TILE_IDS, next_power_of_2(k))


def tile_tokens(k):
    """Its tokens."""
    return _tile_ids(k) // k


def _tiles(tokens, k):
    """Programs that count."""
    return max(cdiv(tokens, tile_tokens(k)), 1)


def _agrees_apart(tokens, k):
    """Whether a launch of its own adds up what the programs have counted."""
    return tokens > tile_tokens(k) * _FEW_TILES


def _columns(workspace, counting):
    """Totals of a rank."""
    return counting.num_experts + workspace.world_size + 2


def _route_constants(tokens, columns, by_source, places):
    """(the constants of ``ep_route_kernel``, those of ``ep_agree_kernel`` or None where it is not needed)"""
    columns = next_power_of_2(columns)
    common = {"BY_SOURCE": by_source, **places, "num_warps": 8}
    route = {**common, "N": _tile_ids(places["K"]), "BLOCK": min(columns, 512), "AT_ONCE": 16}
    if not _agrees_apart(tokens, places["K"]):
        return route, None
    return route, {**common, "BLOCK": min(columns, 8), "AT_ONCE": 512}


def places_constants(k, num_experts, world_size, crossing):
    """What every kernel knows of a routing when it is compiled."""
    constants = {"K": k, "EXPERTS": num_experts, "RANKS": world_size}
    return constants if crossing is None else {**constants, "LOCAL": crossing.local_world_size}
