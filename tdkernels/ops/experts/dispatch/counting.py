"""Launches that count tokens, exchange the counts between the ranks, and compute the destination of every row.

Without max_tokens the host waits for the exact number of rows. With max_tokens it does not wait. Groups on several
nodes use other kernels.
"""

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from tdkernels.ops.common.config import as_argument
from tdkernels.ops.experts.dispatch import layout
from tdkernels.ops.experts.dispatch.counted import CountedRouting, Reach, empty_splits, slots_for
from tdkernels.ops.experts.dispatch.device_errors import TopkIds, too_many_tokens
from tdkernels.ops.experts.dispatch.kernel_route import NOTE_BAD_IDS, ep_agree_kernel, ep_route_kernel
from tdkernels.ops.experts.dispatch.layout import Fact
from tdkernels.ops.experts.dispatch.multinode import layout as multinode_layout
from tdkernels.ops.experts.dispatch.multinode.kernel_route import (
    ep_agree_nodes_kernel,
    ep_places_kernel,
    ep_route_nodes_kernel,
)
from tdkernels.ops.experts.dispatch.multinode.routing import MultinodeRouting, line_bytes
from tdkernels.ops.experts.dispatch.request import RoutingShape
from tdkernels.rounding import cdiv, next_power_of_2, round_up_to_part
from tdkernels.runtime.kernel_launch import CALL_NUMBER, Launch, launch_cached, pointer_signature
from tdkernels.symm import get_workspace

if TYPE_CHECKING:
    from tdkernels.ops.experts.dispatch.device_errors import Splits
    from tdkernels.ops.experts.dispatch.request import DispatchRequest, RoutePlan
    from tdkernels.symm.workspace import Workspace

_FEW_TILES = 32  # with at most so many tiles, the last program adds up the counts; with more, a second launch does
_NO_LIMIT = (1 << 31) - 1
_FEWEST_ROWS = 64


class _Counting(NamedTuple):
    """Everything that decides the launches, except the group."""

    shape: RoutingShape
    config: str  # the given config as text, for the consensus check
    per_choice: bool
    local_world_size: int | None  # None if the group is on one node

    @property
    def tiles(self):
        """Number of tiles of tokens, and of programs that count."""
        return layout.num_tiles(self.shape.tokens, self.shape.choices)

    @property
    def columns(self):
        """Number of totals of a rank."""
        return self.shape.num_experts + self.shape.world_size + 2

    @property
    def agrees_apart(self):
        """Whether a separate launch adds up the counts of the tiles."""
        return self.shape.tokens > layout.tile_tokens(self.shape.choices) * _FEW_TILES


def count(plan: "RoutePlan", request: "DispatchRequest") -> CountedRouting:
    """Count the tokens of a request and return its routing, a MultinodeRouting if the group is on several nodes.

    Raises:
        ValueError: On every rank, if ids are invalid or there are more rows than max_tokens. On a GPU with max_tokens
            it is raised later, see ``Workspace.check``.
        RuntimeError: If a CUDA graph is captured and there is no max_tokens.
    """
    shape, device = plan.shape, request.ids.device
    workspace = get_workspace(request.group, device, "ep_counts", across_nodes=True)
    if shape.max_tokens is None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{shape.operator}: without max_tokens the host waits for the number of rows, which a CUDA graph cannot "
            "capture"
        )
    local = workspace.group.local_world_size
    local = None if local >= shape.world_size else local
    counting = _Counting(shape, as_argument(plan.config if plan.config_is_given else None), plan.per_choice, local)
    tables = _new_tables(counting, device)
    splits = empty_splits(shape, device)
    is_bounded = shape.max_tokens_per_rank is not None
    listen(workspace, shape.operator, request.operand or TopkIds(request.ids, shape.num_experts), is_bounded)
    _launch(workspace, counting, request.ids.contiguous(), request.error_code, tables, splits)
    summary = None
    if shape.max_tokens is None:
        begin = layout.summary_begin(shape.num_experts, shape.world_size)
        summary = tables[0][begin : begin + layout.SUMMARY_WORDS.value].tolist()
        workspace.check()
    common = {
        "shape": shape, "group": request.group, "config": plan.config, "config_is_given": plan.config_is_given,
        "tables": tables[0], "splits": splits, "note_call": workspace.note_call,
    }
    if local is not None:
        return _multinode_routing(common, local, tables[1], summary)
    return _counted_routing(common, plan.per_choice, summary)


def _new_tables(counting, device):
    """Allocate the tables and, if the group is on several nodes, the tables of ``multinode.layout``."""
    shape, tiles = counting.shape, counting.tiles
    length = layout.length(shape, tiles)
    tables = (torch.empty(length, dtype=torch.int32, device=device),)
    if counting.local_world_size is None:
        return tables
    nodes = shape.world_size // counting.local_world_size
    length = multinode_layout.length(nodes, shape.world_size, shape.tokens, tiles)
    return *tables, torch.empty(length, dtype=torch.int32, device=device)


def _counted_routing(common, per_choice, summary):
    shape = common["shape"]
    rows = staged = shape.max_tokens
    reach = None
    if summary is not None:
        rows, staged = summary[Fact.ROWS], summary[Fact.MOST_STAGED]
        reach = Reach(_rows_for(summary[Fact.MOST_ROWS]), _rows_for(summary[Fact.MOST_TOKENS] * shape.choices))
    elif per_choice:
        tokens = shape.max_tokens_per_rank or shape.max_tokens
        reach = Reach(_rows_for(rows), _rows_for(min(rows, shape.choices * tokens)))
    return CountedRouting(**common, rows=rows, staged=staged, slots=slots_for(staged), reach=reach)


def _multinode_routing(common, local_world_size, node_tables, summary):
    rows = staged = crossing = common["shape"].max_tokens
    if summary is not None:
        rows, staged, crossing = summary[Fact.ROWS], summary[Fact.MOST_HERE], summary[Fact.MOST_PASSED]
    return MultinodeRouting(
        **common, rows=rows, staged=staged, slots=slots_for(staged), local_world_size=local_world_size,
        node_tables=node_tables, node_slots=slots_for(crossing),
    )


def _rows_for(most):
    """Return the rows to allocate for an upper bound, rounded up: fewer distinct sizes need fewer consensus checks."""
    return round_up_to_part(max(most, 1), parts=16, least=_FEWEST_ROWS)


# ---- errors ----


def listen(workspace: "Workspace", operator: str, operand: "TopkIds | Splits", is_bounded: bool) -> None:
    """Begin a call in a workspace. Errors that its kernel reports name the operator and the operand.

    ``is_bounded``: whether the call has a max_tokens_per_rank, which a rank may exceed (``route.raise_too_many``).
    """
    workspace.expect_note(partial(_error_of_note, operator, operand, workspace.rank), is_bounded)


def _error_of_note(operator, operand, here, name, kind, first, second, third):
    """Return the exception for a note of ``ep_route_kernel`` or ``ep_direct_kernel``."""
    if kind == NOTE_BAD_IDS.value:
        return too_many_tokens(operator, first, -second) if second < 0 else operand.refused(operator, first, here)
    return ValueError(
        f"{operator}: max_tokens={third} is too small: a rank receives {first} rows, and a rank stages up to {second} "
        "tokens (each counted once for each peer, or once for each of its choices if rows are sent straight to "
        "experts); nothing was sent"
    )


# ---- launches ----


def _launch(workspace, counting, ids, error_code, tables, splits):
    steps = [_count, *([_agree] if counting.agrees_apart else [])]
    if counting.local_world_size is not None:
        steps.append(_place)
    for step in steps:
        launch_cached(
            workspace, (step, counting), (ids, error_code, *tables, splits),
            lambda *of, step=step: step(workspace, counting, of), signature=pointer_signature,
        )


def _agreed_plan(workspace, counting):
    """Return the id of the launch plan; see ``Workspace.prepare``."""
    shape, local = counting.shape, counting.local_world_size
    fields = {
        "num_experts": shape.num_experts, "k": shape.choices, "max_tokens": shape.max_tokens,
        "max_tokens_per_rank": shape.max_tokens_per_rank, "config": counting.config, "whole": counting.per_choice,
    }
    line = 4 * counting.columns if local is None else line_bytes(shape.num_experts, shape.world_size, local)
    return workspace.prepare(shape.operator, fields, shape.world_size * line, shape.world_size, num_flags=1)


def _constants(counting, block, at_once):
    """Return constexpr arguments of the kernels that count and of those that exchange the totals."""
    shape, local = counting.shape, counting.local_world_size
    own = {"WHOLE": counting.per_choice} if local is None else {"LOCAL": local}
    block = min(next_power_of_2(counting.columns), block)
    return {
        "BY_SOURCE": shape.by_source, **layout.table_constants(shape), **own, "BLOCK": block, "AT_ONCE": at_once,
        "num_warps": 8,
    }


def _count(workspace, counting, operands):
    """Return the Launch that counts a rank's ids. With few tiles it also exchanges totals and computes all offsets."""
    ids, error_code, *written = operands
    shape, plan = counting.shape, _agreed_plan(workspace, counting)
    args = workspace.ctx, ids, error_code, *written, shape.tokens, shape.max_tokens or _NO_LIMIT, plan, CALL_NUMBER
    constants = _constants(counting, block=512, at_once=16) | {
        "N": layout.tile_ids(shape.choices), "AGREE": not counting.agrees_apart,
    }
    kernel = ep_route_kernel if counting.local_world_size is None else ep_route_nodes_kernel
    grid = (counting.tiles,)
    # ``listen`` has just checked for errors of earlier launches.
    return Launch(workspace, kernel, grid, args, constants, operands, [], [workspace.ctx], checks_errors=False)


def _agree(workspace, counting, operands):
    """Return the Launch that adds up many tiles, exchanges totals and computes all offsets."""
    _, error_code, *written = operands
    shape, plan = counting.shape, _agreed_plan(workspace, counting)
    constants = _constants(counting, block=8, at_once=512)
    capacity = shape.max_tokens or _NO_LIMIT
    args = workspace.ctx, error_code, *written, shape.tokens, counting.tiles, capacity, plan, CALL_NUMBER
    kernel = ep_agree_kernel if counting.local_world_size is None else ep_agree_nodes_kernel
    grid = (cdiv(counting.columns, constants["BLOCK"]),)
    return Launch(workspace, kernel, grid, args, constants, operands, [], [workspace.ctx], checks_errors=False)


def _place(workspace, counting, operands):
    """Return the Launch that completes the row numbers and lists the tokens for each other node."""
    shape = counting.shape
    args = workspace.ctx, *operands[2:4], shape.tokens
    constants = {
        "TILE_TOKENS": layout.tile_tokens(shape.choices), "num_warps": 1, **layout.table_constants(shape),
        "LOCAL": counting.local_world_size,
    }
    return Launch(
        workspace, ep_places_kernel, (counting.tiles,), args, constants, operands, [], [workspace.ctx],
        checks_errors=False,
    )
