"""MoeRouting, the routing of a call of tp_moe, and the launches that compute it; see ``kernel_route``."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.collectives.async_all_gather import slot_rows_of
from tdkernels.ops.collectives.op import all_gather
from tdkernels.ops.experts.tp_moe.kernel_ag_gemm import BLOCK_TOKENS
from tdkernels.ops.experts.tp_moe.kernel_route import (
    MAX_STAGES,
    TILE_WORDS,
    moe_count_kernel,
    moe_order_kernel,
    moe_pack_kernel,
    moe_place_kernel,
    moe_scales_kernel,
)
from tdkernels.rounding import cdiv, next_power_of_2, round_up
from tdkernels.runtime.kernel_launch import (
    CALL_NUMBER,
    Launch,
    launch_cached,
    local_workspace_of,
    output_spec,
    pointer_signature,
)
from tdkernels.symm import get_workspace

if TYPE_CHECKING:
    import torch.distributed as dist

_TILES_OF_A_PROGRAM, _TILES_AT_ONCE = 32, 128
_MOST_IDS = 4096  # that a program of moe_count_kernel reads at a time
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
        weights: Routing weights of all ranks, [M, k] fp32, or None if they are not gathered with the ids.
        scales: Scales of the token of each row, [M * k, ·] fp32, or None if they are not gathered with the ids.
        group: The process group.
        world_size: Number of ranks W.
        tokens: Number of tokens per rank, M / W.
        num_experts: Number of experts E.
        num_choices: Number of experts per token, k.
        chunk_rows: Number of tokens per chunk, at most that of the config.
        num_chunks: Number of chunks of a rank's tokens.
        num_stages: Number of overlap stages.
        sizes: Tuple of all numbers that determine a launch.
    """

    def __init__(
        self, group: "dist.ProcessGroup | Any", ids: torch.Tensor, weights: torch.Tensor | None, tokens: int,
        num_experts: int, chunk_rows: int, stages: int,
    ) -> None:
        self.group, self.ids, self.weights = group, ids, weights
        self.scales: torch.Tensor | None = None
        self.tokens, self.num_experts = tokens, num_experts
        self.world_size = group.size()
        self.num_choices = ids.shape[1]
        self.chunk_rows = chunk_rows_of(tokens, chunk_rows)
        self.num_chunks = cdiv(tokens, self.chunk_rows)
        # At most one stage per chunk of the peers.
        self.num_stages = min(stages, _MAX_STAGES, 1 + (self.world_size - 1) * self.num_chunks)
        self.sizes = self.world_size, tokens, num_experts, self.num_choices, self.chunk_rows, self.num_stages
        new = partial(torch.empty, dtype=torch.int32, device=ids.device)
        self.splits, self.choices, self.rows = new(num_experts), new(ids.numel()), new(ids.shape)
        self._tilings: dict[int, Tiling] = {}

    @property
    def slot_rows(self) -> int:
        """Number of rows reserved for each rank in a buffer of gathered tokens."""
        return slot_rows_of(self.tokens) if self.world_size > 1 else self.tokens

    @property
    def slots(self) -> torch.Tensor:
        """Index of each row's token in a buffer of gathered tokens, [M * k] int32, with ``slot_rows`` rows per rank."""
        tokens = torch.div(self.choices, self.num_choices, rounding_mode="floor")
        if self.slot_rows == self.tokens:
            return tokens
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


def chunk_rows_of(tokens: int, max_rows: int) -> int:
    """Return the number of tokens per chunk, at most ``max_rows``. All chunks have about the same size.

    Otherwise the last chunk would have signals, and work items that add rows, without tokens.
    """
    return round_up(cdiv(max(tokens, 1), max(cdiv(tokens, max_rows), 1)), BLOCK_TOKENS)


def _error_of_note(operator, num_experts, name, kind, count, *_):
    return ValueError(f"{operator}: {count} of all ranks' topk_ids are not -1 to num_experts - 1 = {num_experts - 1}")


def route(
    operator: str, topk_ids: torch.Tensor, num_experts: int, group: "dist.ProcessGroup", chunk_rows: int,
    tile_rows: int, stages: int, topk_weights: torch.Tensor | None = None, scale_x: torch.Tensor | None = None,
) -> MoeRouting:
    """Compute the MoeRouting of the ids of all ranks. Collective.

    Args:
        operator: Name of the operator, for errors.
        topk_ids: Ids of this rank, [T, k]. T is the same on all ranks.
        num_experts: Number of experts.
        group: The process group.
        chunk_rows: Maximum number of tokens per chunk.
        tile_rows: Height of tiles for which a Tiling is computed right away.
        stages: Number of overlap stages.
        topk_weights: Routing weights [T, k] that are gathered with the ids, or None on all ranks.
        scale_x: Scales [T, ·] fp32 of the tokens that are gathered, too, or None on all ranks.

    Raises:
        ValueError: On every rank, if an id is out of range (on a GPU at a later call or at ``synchronize``).
    """
    (tokens, choices), ranks, device = topk_ids.shape, group.size(), topk_ids.device
    workspace = get_workspace(group, device, "moe_route", across_nodes=True)
    messages = _message(topk_ids, topk_weights, scale_x, num_experts)
    words = messages.numel()
    if ranks > 1:
        messages = all_gather(messages, group=group)
        ids = torch.empty(ranks * tokens, choices, dtype=torch.int32, device=device)
        weights = None if topk_weights is None else torch.empty_like(ids, dtype=torch.float32)
    else:
        ids, weights = _parts(messages, topk_ids, topk_weights)
    routing = MoeRouting(group, ids, weights, tokens, num_experts, chunk_rows, stages)
    workspace.expect_note(partial(_error_of_note, operator, num_experts))
    copies = (ids, weights) if ranks > 1 else (None, None)
    launch_cached(
        workspace, (operator, ids.shape, words, num_experts), (messages, *copies, routing.splits),
        lambda *of: _count(workspace, routing, operator, words, of), signature=pointer_signature,
    )
    routing._tilings[tile_rows] = _tile(workspace, routing, tile_rows)
    if scale_x is not None:
        routing.scales = _scales_of_rows(routing, messages, words, scale_x.shape[1])
    return routing


def _message(topk_ids, topk_weights, scale_x, num_experts):
    """Return the ids of this rank, its routing weights and the scales of its tokens, unless they are None."""
    workspace, num_ids = local_workspace_of(topk_ids.device), topk_ids.numel()
    operands = [part if part is None else part.detach().contiguous() for part in (topk_ids, topk_weights, scale_x)]
    words = sum(part.numel() for part in operands if part is not None)
    message = torch.empty(words, dtype=torch.int32, device=topk_ids.device)
    launch_cached(
        workspace, ("moe_route", num_ids, words, num_experts), (*operands, message),
        lambda *of: _pack(workspace, num_experts, of), signature=pointer_signature,
    )
    return message


def _pack(workspace, num_experts, operands):
    """Return the Launch that writes a message."""
    ids, _, scale_x, _ = operands
    num_ids, num_scales = ids.numel(), 0 if scale_x is None else scale_x.numel()
    args, grid = (*operands, num_ids, num_scales, num_experts), (cdiv(max(num_ids, num_scales), 1024),)
    return Launch(workspace, moe_pack_kernel, grid, args, {"BLOCK": 1024}, operands, [], [], checks_errors=False)


def _scales_of_rows(routing, messages, words, columns):
    """Return the scales of the token of each row, from the messages of all ranks."""
    workspace = local_workspace_of(messages.device)
    key = "moe_scales", *routing.sizes, words, columns
    return launch_cached(
        workspace, key, (messages, routing.choices), lambda *of: _scales(workspace, routing, words, columns, of),
        signature=pointer_signature,
    )[0]


def _scales(workspace, routing, words, columns, operands):
    """Return the Launch that stores the scales of the token of each row."""
    rows, block_c = routing.choices.numel(), min(next_power_of_2(columns), 128)
    out = output_spec(operands[0], rows, columns, dtype=torch.float32)
    args = *operands, out, rows, routing.num_choices, routing.tokens, words, columns
    constants = {"BLOCK_R": 1024 // block_c, "BLOCK_C": block_c}
    grid = (cdiv(rows, constants["BLOCK_R"]),)
    return Launch(workspace, moe_scales_kernel, grid, args, constants, operands, [out], [], checks_errors=False)


def _parts(message, topk_ids, topk_weights):
    """Return (ids, routing weights or None) of a message of one rank."""
    ids = message[: topk_ids.numel()].view(topk_ids.shape)
    if topk_weights is None:
        return ids, None
    return ids, message[ids.numel() : 2 * ids.numel()].view(torch.float32).view(topk_ids.shape)


def _count(workspace, routing, operator, words, operands):
    """Return the Launch that counts the rows of each expert."""
    experts, num_ids = routing.num_experts, routing.ids.numel()
    workspace.prepare(operator, {"num_experts": experts}, 256, 1)
    ranks, of_rank = routing.world_size, num_ids // routing.world_size
    args = workspace.ctx, *operands, of_rank, words, experts, CALL_NUMBER
    block = min(next_power_of_2(max(of_rank, 1)), _MOST_IDS)
    constants = {"RANKS": min(next_power_of_2(ranks), _MOST_IDS // block), "BLOCK": block, "num_warps": 8}
    # No check for host errors: ``route`` has just done it.
    return Launch(
        workspace, moe_count_kernel, (experts,), args, constants, operands, [], [workspace.ctx], checks_errors=False
    )


def unrouted(
    world_size: int, tokens: int, choices: int, num_experts: int, config: Any, device: torch.device,
) -> MoeRouting:
    """Return a MoeRouting with uninitialized contents, for ``tokens`` tokens per rank. Kernels can be compiled with it.

    ``config`` is a MoeTpConfig with tiles.
    """
    ids = torch.empty(world_size * tokens, choices, dtype=torch.int32, device=device)
    group = SimpleNamespace(size=lambda: world_size)
    routing = MoeRouting(group, ids, None, tokens, num_experts, config.chunk_rows, max(config.stages, 1))
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
    constants = {
        "EXPERTS": next_power_of_2(experts), "ALIGNED": routing.tokens * routing.num_choices % 4 == 0, "PIECES": 32,
        "PIECE": 128, "BLOCK_TILES": 64, "num_warps": 16,
    }
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
