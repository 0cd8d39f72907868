"""Launch the kernel of gemm_ar on several nodes, or compile it ahead of time."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.staging import COPY_WORDS
from tdkernels.ops.dense.gemm_ar.kernel_multinode import gemm_ar_nodes_kernel
from tdkernels.ops.dense.gemm_ar.tile import slice_columns
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, output_spec

if TYPE_CHECKING:
    from tdkernels.symm.workspace import Workspace

# Bytes that a network of 400 Gb/s carries in 10 us, the time of one more trip. Estimated, not measured on two hosts.
_TRIP_BYTES = 450_000


def adds_once(num_nodes: int, owned_bytes: float) -> bool:
    """Return whether one owner of a tile adds all nodes' sums and returns the total, instead of one owner per node.

    Args:
        num_nodes: Number of nodes N.
        owned_bytes: Bytes of the tiles that a rank owns.
    """
    # Adding once sends 2 (N - 1) / N times the owned bytes, adding on every node N - 1 times.
    saved = (num_nodes - 1) * (num_nodes - 2) / num_nodes * owned_bytes
    return saved > _TRIP_BYTES


@dataclass(frozen=True)
class _Schedule:
    """Number of rounds, and delays between the roles of the kernel (see ``kernel_multinode``).

    ``lag`` is in tile groups, the other delays are in rounds.
    """

    rounds: int
    lag: int
    sum_after: int
    total_after: int
    relay_after: int
    receive_after: int
    relays: bool

    @classmethod
    def of(cls, tiles: int, item_tiles: int, local: int, num_sms: int, relays: bool) -> "_Schedule":
        """Return the schedule for an output of ``tiles`` tiles and ``local`` ranks per node."""
        items = cdiv(tiles, item_tiles)
        rounds = cdiv(items, local)
        lag = min(cdiv(num_sms, item_tiles), rounds * local)
        # The last partial is sent after a wave. An item that starts too early keeps an SM waiting; an item that starts
        # late only costs time at the end. So one more wave is left for each trip of partials, sums and totals. If there
        # is no more than one wave, the end is reached from the beginning, and no waves are added.
        wave = cdiv(lag, local)
        gap = wave + 1 if lag < rounds * local else 0
        sum_after, total_after, relay_after = (wave + trips * gap for trips in (1, 2, 3))
        return cls(rounds, lag, sum_after, total_after, relay_after, relay_after + relays * gap, relays)

    @property
    def delays(self) -> tuple[int, ...]:
        """Return the kernel's arguments from ``lag`` to ``receive_after``."""
        return self.lag, self.sum_after, self.total_after, self.relay_after, self.receive_after

    def num_pieces(self, item_tiles: int, local: int) -> int:
        """Return the number of work items."""
        per_round = local * (local > 1) + (2 * local + 1 + self.relays) * item_tiles
        return (self.rounds + self.receive_after) * per_round


def _arguments(ctx, x, weight, bias, z, stage, schedule, plan, world_size, num_nodes, config):
    """Return the kernel's arguments and constants."""
    tiles = config.tiles
    m, k = x.shape
    n = weight.shape[0]
    by_tma = config.exchange != "one_shot"  # the tiles of "one_shot" are selected for small M and a kernel without TMA
    weight, stride_w, x_desc, w_desc, constants = gemm_operands.product(x, weight, bias, tiles, by_tma)
    args = (
        ctx, x, x_desc, weight, w_desc, bias, z, stage,
        m, n, k, stride_w, *schedule.delays, plan, config.item_tiles, tiles.group_m,
    )
    nodes = {"NODES": num_nodes, "LOCAL": world_size // num_nodes, "ADDS_ONCE": schedule.relays}
    return args, {"COPY_WORDS": COPY_WORDS, "SLICE_N": slice_columns(tiles), **nodes, **constants}


def _relays(x, weight, world_size, num_nodes):
    """Return ``adds_once`` for x [M, K] and weight [N, K]; equal on all ranks."""
    owned_bytes = x.shape[0] * weight.shape[0] * x.element_size() * num_nodes // world_size
    return adds_once(num_nodes, owned_bytes)


def compile(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world_size: int, config: Any, num_nodes: int,
) -> None:
    """Compile the kernel for these operands into Triton's cache, without launching it."""
    x = gemm_operands.rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    z = stage = x.new_empty(1)
    schedule = _Schedule(1, 1, 1, 1, 1, 1, _relays(x, weight, world_size, num_nodes))
    args, constants = _arguments(ctx, x, weight, bias, z, stage, schedule, 0, world_size, num_nodes, config)
    gemm_ar_nodes_kernel.warmup(*args, grid=(1,), **constants)


def prepare(
    workspace: "Workspace", x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: Any,
    fields: Mapping[str, Any],
) -> Launch:
    """Return the Launch for normalized operands; ``fields`` as for ``Workspace.prepare``."""
    topology = workspace.group.topology
    ranks, nodes, local = topology.world_size, topology.num_nodes, topology.local_world_size
    m, n = x.shape[0], weight.shape[0]
    tiles = config.tiles
    count = tiles.count(m, n)
    relays = _relays(x, weight, ranks, nodes)
    # With few tiles, smaller groups, so that each rank that adds owns some tiles.
    config = replace(config, item_tiles=min(config.item_tiles, cdiv(count, ranks if relays else local)))
    schedule = _Schedule.of(count, config.item_tiles, local, gpu.num_sms(x.device), relays)
    slots = schedule.rounds * config.item_tiles  # tiles that a rank owns; the last group is padded
    tile_bytes = tiles.block_m * tiles.block_n * x.element_size()
    plan = workspace.prepare(
        "gemm_ar", fields, ((local + nodes) * slots + count) * tile_bytes,
        local * schedule.rounds + nodes * slots + count, num_flags=(local + 1) * slots,
    )
    stage = output_spec(x, local * slots * tiles.block_m * tiles.block_n)
    z = output_spec(x, m, n)
    args, constants = _arguments(workspace.ctx, x, weight, bias, z, stage, schedule, plan, ranks, nodes, config)
    pieces = schedule.num_pieces(config.item_tiles, local)
    programs = min(pieces, gpu.resident_programs(x.device, tiles, x.dtype))
    constants["trace_ptr"] = recorder.buffer(x.device, pieces, 1)
    operands, made = (x, weight, bias), (z, stage)
    return Launch(workspace, gemm_ar_nodes_kernel, (programs,), args, constants, operands, made, [workspace.ctx])
