"""What tensor-parallel experts know of a routing, and the launches that find it; see ``kernel_route``."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch

from tdkernels.ops.collectives.async_all_gather import slot_rows_of
from tdkernels.ops.collectives.op import all_gather
from tdkernels.ops.experts.tp_moe.kernel_route import (
    MAX_STAGES,
    TILE_WORDS,
    moe_count_kernel,
    moe_order_kernel,
    moe_place_kernel,
)
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime.kernel_launch import CALL_NUMBER, Launch, launch_cached, pointer_signature
from tdkernels.symm import get_workspace

_TILES_OF_A_PROGRAM, _TILES_AT_ONCE = 32, 128
_MAX_STAGES = MAX_STAGES.value


@dataclass
class Tiling:
    """The tiles of ``tile_rows`` rows, in order."""

    table: torch.Tensor  # int32 [at most so many tiles, TILE_WORDS]
    begins: torch.Tensor  # int32: of each stage, how many tiles come before it
    most: int  # tiles that there can be


class MoeRouting:
    """Which rows the choices of all tokens have; made by ``moe_ag_gemm``, for ``moe_gemm_rs``.

    splits:   [E] int32, the rows of each expert
    choices:  [M * k] int32, of each row the choice ``token * k + j`` of the gathered tokens that it is of
    rows:     [M, k] int32, the row of each choice, or -1 for one that was dropped
    sizes:    all that launches follow from, beside its tensors

    An expert's rows lie in an order of this rank's own: its tokens first, then as the other ranks' come here.
    """

    def __init__(self, group, ids, tokens, num_experts, chunk_rows, stages):
        self.group, self.ids = group, ids
        self.tokens, self.num_experts = tokens, num_experts  # tokens of a rank
        self.world_size = group.size()
        self.num_choices = ids.shape[1]
        self.chunk_rows = chunk_rows
        self.num_chunks = cdiv(tokens, chunk_rows)  # of a rank's tokens
        # No more than there are chunks to share.
        self.num_stages = min(stages, _MAX_STAGES, 1 + (self.world_size - 1) * self.num_chunks)
        self.sizes = self.world_size, tokens, num_experts, self.num_choices, chunk_rows, self.num_stages
        new = partial(torch.empty, dtype=torch.int32, device=ids.device)
        self.splits, self.rows = new(num_experts), new(ids.shape)
        # Rows past the last expert's, as many as choices were dropped, are of some choice too: nobody minds which.
        self.choices = torch.zeros_like(ids).view(-1)
        self._tilings = {}

    @property
    def slot_rows(self):
        """Rows from the tokens of one rank to those of the next, where all are gathered."""
        return slot_rows_of(self.tokens) if self.world_size > 1 else self.tokens

    @property
    def slots(self):
        """[M * k] int32, of each row where its token lies among those of all ranks, ``slot_rows`` from rank to rank."""
        tokens = torch.div(self.choices, self.num_choices, rounding_mode="floor")
        source = torch.div(tokens, self.tokens, rounding_mode="floor")
        return tokens + source * (self.slot_rows - self.tokens)

    def __repr__(self):
        return (
            f"MoeRouting({self.world_size} x {self.tokens} tokens, {self.num_choices} of {self.num_experts} experts "
            f"each)"
        )

    def tiling(self, tile_rows):
        """The Tiling for tiles of so many rows; launched when it is first asked for."""
        if tile_rows not in self._tilings:
            workspace = get_workspace(self.group, self.ids.device, "moe_route", across_nodes=True)
            self._tilings[tile_rows] = _tile(workspace, self, tile_rows)
        return self._tilings[tile_rows]


def _error_of_note(operator, num_experts, name, kind, count, *_):
    return ValueError(f"{operator}: {count} of all ranks' topk_ids are not -1 to num_experts - 1 = {num_experts - 1}")


def route(operator, topk_ids, num_experts, group, chunk_rows, tile_rows, stages):
    """The MoeRouting of this rank's topk_ids [T, k], the same T on all ranks.

    Raises:
        ValueError: on every rank for ids that are none (on a GPU at a later call or at ``synchronize``)
    """
    if topk_ids.dtype == torch.int64:
        topk_ids = topk_ids.clamp(-2, num_experts)  # or the upper half of a wrong one would be lost
    ids = topk_ids.to(torch.int32).contiguous()
    if group.size() > 1:
        ids = all_gather(ids, group=group)
    routing = MoeRouting(group, ids, topk_ids.shape[0], num_experts, chunk_rows, stages)
    workspace = get_workspace(group, ids.device, "moe_route", across_nodes=True)
    workspace.expect_note(partial(_error_of_note, operator, num_experts))
    launch_cached(
        workspace, (operator, ids.numel(), num_experts), (ids, routing.splits),
        lambda *of: _count(workspace, operator, num_experts, of), signature=pointer_signature,
    )
    routing._tilings[tile_rows] = _tile(workspace, routing, tile_rows)
    return routing


def _count(workspace, operator, num_experts, operands):
    """The Launch that counts the rows of each expert."""
    workspace.prepare(operator, {"num_experts": num_experts}, 256, 1)
    ids, splits = operands
    args = workspace.ctx, ids, splits, ids.numel(), num_experts, CALL_NUMBER
    constants = {"BLOCK": 4096, "num_warps": 8}
    # ``route`` has just checked for errors of earlier launches.
    return Launch(
        workspace, moe_count_kernel, (num_experts,), args, constants, operands, [], [workspace.ctx], checks_errors=False
    )


def unrouted(world_size, tokens, choices, num_experts, config, device):
    """A MoeRouting that nobody has found, of so many tokens a rank: what kernels can be compiled with."""
    ids = torch.empty(world_size * tokens, choices, dtype=torch.int32, device=device)
    group = SimpleNamespace(size=lambda: world_size)
    routing = MoeRouting(group, ids, tokens, num_experts, config.chunk_rows, max(config.stages, 1))
    table, begins = (torch.empty(size, dtype=torch.int32, device=device) for size in ((1, TILE_WORDS.value), 2))
    routing._tilings[config.tiles.block_m] = Tiling(table, begins, 1)
    return routing


def _tile(workspace, routing, tile_rows):
    """The Tiling of a routing."""
    ids, experts = routing.ids, routing.num_experts
    most = ids.numel() // tile_rows + min(experts, ids.numel())
    new = partial(torch.empty, dtype=torch.int32, device=ids.device)
    stages, table, begins = new(most), new(most, TILE_WORDS.value), new(2 * _MAX_STAGES)
    key = *routing.sizes, tile_rows
    launch_cached(
        workspace, ("place", *key), (ids, routing.splits, routing.choices, routing.rows, stages),
        lambda *of: _place(workspace, routing, tile_rows, of), signature=pointer_signature,
    )
    launch_cached(
        workspace, ("order", *key), (routing.splits, stages, table, begins),
        lambda *of: _order(workspace, routing, tile_rows, most, of), signature=pointer_signature,
    )
    return Tiling(table, begins, most)


def _place(workspace, routing, tile_rows, operands):
    """The Launch that finds each choice's row, and each tile's stage."""
    experts = routing.num_experts
    args = (
        workspace.ctx, *operands, experts, routing.num_choices, routing.chunk_rows, routing.tokens, tile_rows,
        routing.num_stages,
    )
    constants = {"EXPERTS": next_power_of_2(experts), "BLOCK": 1024, "BLOCK_TILES": 64, "num_warps": 4}
    # In the middle of an operator, forward or backward: the counts of this very routing may have had something to tell.
    return Launch(
        workspace, moe_place_kernel, (experts + 1,), args, constants, operands, [], [workspace.ctx], checks_errors=False
    )


def _order(workspace, routing, tile_rows, most, operands):
    """The Launch that puts the tiles in the order of their stages."""
    args = *operands, routing.num_experts, tile_rows
    constants = {
        "EXPERTS": next_power_of_2(routing.num_experts), "BLOCK": _TILES_OF_A_PROGRAM, "AT_ONCE": _TILES_AT_ONCE,
        "num_warps": 4,
    }
    grid = (cdiv(most, _TILES_OF_A_PROGRAM),)
    return Launch(workspace, moe_order_kernel, grid, args, constants, operands, [], [], checks_errors=False)
