"""Launch the kernel of gemm_ar on several nodes, or compile it ahead of time."""

from dataclasses import dataclass, replace

import torch

from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.staging import COPY_WORDS
from tdkernels.ops.dense.gemm_ar.kernel_multinode import gemm_ar_nodes_kernel
from tdkernels.ops.dense.gemm_ar.tile import slice_columns
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, output_spec

# What a network of 400 Gb/s carries in the time of one more trip, 10 us: reckoned, for want of two hosts.
_TRIP_BYTES = 450_000


def adds_once(num_nodes, owned_bytes):
    """Whether one owner of a tile adds all nodes' sums and puts the total back, instead of each owner for its node.

    Args:
        owned_bytes: of the tiles of a rank's items
    """
    saved = (num_nodes - 1) * (num_nodes - 2) / num_nodes * owned_bytes  # of N - 1 times, by 2 (N - 1) / N times
    return saved > _TRIP_BYTES


@dataclass(frozen=True)
class _Schedule:
    """How many rounds there are, and by how much the roles follow one another."""

    rounds: int
    lag: int
    sum_after: int
    total_after: int
    relay_after: int
    receive_after: int
    relays: bool

    @classmethod
    def of(cls, tiles, item_tiles, local, num_sms, relays):
        items = cdiv(tiles, item_tiles)
        rounds = cdiv(items, local)
        lag = min(cdiv(num_sms, item_tiles), rounds * local)
        # The last partial is on its way after a wave. A program that comes too early keeps a multiprocessor waiting,
        # one that comes late costs nothing but at the end: so one more wave for partials to arrive, one for sums and
        # one for totals, on each of their trips. What is no more than a wave is at its end from the beginning.
        wave = cdiv(lag, local)
        gap = wave + 1 if lag < rounds * local else 0
        sum_after, total_after, relay_after = (wave + trips * gap for trips in (1, 2, 3))
        return cls(rounds, lag, sum_after, total_after, relay_after, relay_after + relays * gap, relays)

    @property
    def delays(self):
        """The kernel's arguments from ``lag`` to ``receive_after``."""
        return self.lag, self.sum_after, self.total_after, self.relay_after, self.receive_after

    def num_pieces(self, item_tiles, local):
        per_round = local * (local > 1) + (2 * local + 1 + self.relays) * item_tiles
        return (self.rounds + self.receive_after) * per_round


def _arguments(ctx, x, weight, bias, z, stage, schedule, plan, world_size, num_nodes, config):
    """The kernel's arguments."""
    tiles = config.tiles
    m, k = x.shape
    n = weight.shape[0]
    by_tma = config.exchange != "one_shot"  # whose tiles are for few rows, and chosen for a kernel that reads without
    weight, stride_w, x_desc, w_desc, constants = gemm_operands.product(x, weight, bias, tiles, by_tma)
    args = (
        ctx, x, x_desc, weight, w_desc, bias, z, stage,
        m, n, k, stride_w, *schedule.delays, plan, config.item_tiles, tiles.group_m,
    )
    nodes = {"NODES": num_nodes, "LOCAL": world_size // num_nodes, "ADDS_ONCE": schedule.relays}
    return args, {"COPY_WORDS": COPY_WORDS, "SLICE_N": slice_columns(tiles), **nodes, **constants}


def _relays(x, weight, world_size, num_nodes):
    """Whether one owner adds all nodes' sums of a tile, for x [M, K] and weight [N, K]; the same on all ranks."""
    owned_bytes = x.shape[0] * weight.shape[0] * x.element_size() * num_nodes // world_size
    return adds_once(num_nodes, owned_bytes)


def compile(x, weight, bias, world_size, config, num_nodes):
    """Compile what ``launch`` with the same operands would launch, into Triton's cache; launches nothing."""
    x = gemm_operands.rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    z = stage = x.new_empty(1)
    schedule = _Schedule(1, 1, 1, 1, 1, 1, _relays(x, weight, world_size, num_nodes))
    args, constants = _arguments(ctx, x, weight, bias, z, stage, schedule, 0, world_size, num_nodes, config)
    gemm_ar_nodes_kernel.warmup(*args, grid=(1,), **constants)


def prepare(workspace, x, weight, bias, config, fields):
    """The Launch for operands that are ``ready``."""
    topology = workspace.group.topology
    ranks, nodes, local = topology.world_size, topology.num_nodes, topology.local_world_size
    m, n = x.shape[0], weight.shape[0]
    tiles = config.tiles
    count = tiles.count(m, n)
    relays = _relays(x, weight, ranks, nodes)
    # Of few tiles each rank that adds shall own some.
    config = replace(config, item_tiles=min(config.item_tiles, cdiv(count, ranks if relays else local)))
    schedule = _Schedule.of(count, config.item_tiles, local, gpu.num_sms(x.device), relays)
    slots = schedule.rounds * config.item_tiles  # tiles of a rank's items, the last one filled up
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
