"""MoeRouting, the routing of a call of tp_moe, and the launches that compute it; see ``kernel_route``."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    import torch.distributed as dist

_TILES_OF_A_PROGRAM, _TILES_AT_ONCE = 32, 128
_MAX_STAGES = MAX_STAGES.value


@dataclass
class Tiling:
    """Ordered list of the tiles of a routing, for one tile height.

    Attributes:
        table: int32 [most, TILE_WORDS], see ``moe_order_kernel``.
        begins: int32, for each stage the number of tiles in earlier stages.
        most: Upper bound of the number of tiles.
    """

    table: torch.Tensor
    begins: torch.Tensor
    most: int


class MoeRouting:
    """Mapping between the top-k assignments of all tokens and the rows of the grouped GEMM.

    ``moe_ag_gemm`` creates it and ``moe_gemm_rs`` takes it. The rows of an expert are in an order specific to this
    rank: first the rows of its own tokens, then the rows of other tokens in order of arrival.

    Attributes:
        splits: Number of rows of each expert, [E] int32.
        choices: Assignment of each row, [M * k] int32: ``token * k + j`` for assignment j of a gathered token.
        rows: Row of each assignment, [M, k] int32, or -1 for a dropped assignment.
        ids: Expert ids of all ranks, [M, k] int32.
        group: The process group.
        world_size: Number of ranks W.
        tokens: Number of tokens per rank, M / W.
        num_experts: Number of experts E.
        num_choices: Number of experts per token, k.
        chunk_rows: Number of tokens per chunk.
        num_chunks: Number of chunks of a rank's tokens.
        num_stages: Number of overlap stages.
        sizes: Tuple of all numbers that determine a launch.
    """

    def __init__(
        self, group: "dist.ProcessGroup | Any", ids: torch.Tensor, tokens: int, num_experts: int, chunk_rows: int,
        stages: int,
    ) -> None:
        self.group, self.ids = group, ids
        self.tokens, self.num_experts = tokens, num_experts
        self.world_size = group.size()
        self.num_choices = ids.shape[1]
        self.chunk_rows = chunk_rows
        self.num_chunks = cdiv(tokens, chunk_rows)
        # At most one stage per chunk of the peers.
        self.num_stages = min(stages, _MAX_STAGES, 1 + (self.world_size - 1) * self.num_chunks)
        self.sizes = self.world_size, tokens, num_experts, self.num_choices, chunk_rows, self.num_stages
        new = partial(torch.empty, dtype=torch.int32, device=ids.device)
        self.splits, self.rows = new(num_experts), new(ids.shape)
        # Rows past the rows of the last expert, one per dropped assignment, must have a valid index too. It is 0.
        self.choices = torch.zeros_like(ids).view(-1)
        self._tilings: dict[int, Tiling] = {}

    @property
    def slot_rows(self) -> int:
        """Number of rows reserved for each rank in a buffer of gathered tokens."""
        return slot_rows_of(self.tokens) if self.world_size > 1 else self.tokens

    @property
    def slots(self) -> torch.Tensor:
        """Index of each row's token in a buffer of gathered tokens, [M * k] int32, with ``slot_rows`` rows per rank."""
        tokens = torch.div(self.choices, self.num_choices, rounding_mode="floor")
        source = torch.div(tokens, self.tokens, rounding_mode="floor")
        return tokens + source * (self.slot_rows - self.tokens)

    def __repr__(self) -> str:
        return (
            f"MoeRouting({self.world_size} x {self.tokens} tokens, {self.num_choices} of {self.num_experts} experts "
            f"each)"
        )

    def tiling(self, tile_rows: int) -> Tiling:
        """Return the Tiling for tiles of ``tile_rows`` rows. The first call with a height launches the kernels."""
        if tile_rows not in self._tilings:
            workspace = get_workspace(self.group, self.ids.device, "moe_route", across_nodes=True)
            self._tilings[tile_rows] = _tile(workspace, self, tile_rows)
        return self._tilings[tile_rows]


def _error_of_note(operator, num_experts, name, kind, count, *_):
    return ValueError(f"{operator}: {count} of all ranks' topk_ids are not -1 to num_experts - 1 = {num_experts - 1}")


def route(
    operator: str, topk_ids: torch.Tensor, num_experts: int, group: "dist.ProcessGroup", chunk_rows: int,
    tile_rows: int, stages: int,
) -> MoeRouting:
    """Compute the MoeRouting of the ids of all ranks. Collective.

    Args:
        operator: Name of the operator, for errors.
        topk_ids: Ids of this rank, [T, k]. T is the same on all ranks.
        num_experts: Number of experts.
        group: The process group.
        chunk_rows: Number of tokens per chunk.
        tile_rows: Height of tiles for which a Tiling is computed right away.
        stages: Number of overlap stages.

    Raises:
        ValueError: On every rank, if an id is out of range (on a GPU at a later call or at ``synchronize``).
    """
    if topk_ids.dtype == torch.int64:
        topk_ids = topk_ids.clamp(-2, num_experts)  # keeps an invalid id invalid when it is converted to int32
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
    """Return the Launch that counts the rows of each expert."""
    workspace.prepare(operator, {"num_experts": num_experts}, 256, 1)
    ids, splits = operands
    args = workspace.ctx, ids, splits, ids.numel(), num_experts, CALL_NUMBER
    constants = {"BLOCK": 4096, "num_warps": 8}
    # No check for host errors: ``route`` has just done it.
    return Launch(
        workspace, moe_count_kernel, (num_experts,), args, constants, operands, [], [workspace.ctx], checks_errors=False
    )


def unrouted(
    world_size: int, tokens: int, choices: int, num_experts: int, config: Any, device: torch.device,
) -> MoeRouting:
    """Return a MoeRouting with uninitialized contents, for ``tokens`` tokens per rank. Kernels can be compiled with it.

    ``config`` is a MoeTpConfig with tiles.
    """
    ids = torch.empty(world_size * tokens, choices, dtype=torch.int32, device=device)
    group = SimpleNamespace(size=lambda: world_size)
    routing = MoeRouting(group, ids, tokens, num_experts, config.chunk_rows, max(config.stages, 1))
    table, begins = (torch.empty(size, dtype=torch.int32, device=device) for size in ((1, TILE_WORDS.value), 2))
    routing._tilings[config.tiles.block_m] = Tiling(table, begins, 1)
    return routing


def _tile(workspace, routing, tile_rows):
    """Launch the kernels that compute the Tiling of a routing."""
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
    """Return the Launch that computes the row of each assignment and the stage of each tile."""
    experts = routing.num_experts
    args = (
        workspace.ctx, *operands, experts, routing.num_choices, routing.chunk_rows, routing.tokens, tile_rows,
        routing.num_stages,
    )
    constants = {"EXPERTS": next_power_of_2(experts), "BLOCK": 1024, "BLOCK_TILES": 64, "num_warps": 4}
    # No check for host errors in the middle of an operator: the error could be of this routing's own count.
    return Launch(
        workspace, moe_place_kernel, (experts + 1,), args, constants, operands, [], [workspace.ctx], checks_errors=False
    )


def _order(workspace, routing, tile_rows, most, operands):
    """Return the Launch that sorts the tiles by stage."""
    args = *operands, routing.num_experts, tile_rows
    constants = {
        "EXPERTS": next_power_of_2(routing.num_experts), "BLOCK": _TILES_OF_A_PROGRAM, "AT_ONCE": _TILES_AT_ONCE,
        "num_warps": 4,
    }
    grid = (cdiv(most, _TILES_OF_A_PROGRAM),)
    return Launch(workspace, moe_order_kernel, grid, args, constants, operands, [], [], checks_errors=False)
