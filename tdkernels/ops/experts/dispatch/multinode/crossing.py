"""What launches of a group on several nodes have beyond those on one: memory for what crosses the network."""

from dataclasses import dataclass

import torch

from tdkernels.ops.experts.dispatch.multinode import layout
from tdkernels.rounding import round_up


@dataclass
class Crossing:
    """Of a routing: which tokens cross to other nodes, and what is passed on."""

    local_world_size: int  # L
    tables: torch.Tensor  # int32, see ep_nodes_tables
    most: int = 0  # slots that are enough, on any rank, for what it sends to other nodes, and for what it passes on
    passed: torch.Tensor | None = None  # int32, see ep_nodes_tables: what has been passed on

    def make_passed(self, k):
        length = layout.passed_length(self.most, self.local_world_size, k)
        self.passed = torch.empty(length, dtype=torch.int32, device=self.tables.device)


def make_crossing(world_size, local_world_size, tokens, tiles, device):
    """The Crossing of a routing that is to be found; None for a group on one node."""
    if local_world_size >= world_size:
        return None
    length = layout.length(world_size // local_world_size, world_size, tokens, tiles)
    return Crossing(local_world_size, torch.empty(length, dtype=torch.int32, device=device))


def line_bytes(num_experts, world_size, local_world_size):
    """Bytes of a rank's totals; see ``ep_route_nodes_kernel.line_words``."""
    return 4 * round_up(num_experts + world_size + 2 + world_size // local_world_size, 4)


def crossing_slot_memory(row_bytes, scale_bytes, k, local_world_size):
    """Bytes of a slot of ``ep_dispatch_nodes_kernel`` for what crosses the network."""
    return round_up(round_up(row_bytes, 16) + round_up(scale_bytes, 16) + 4 * (3 * k + local_world_size), 128)


def sum_slot_memory(row_bytes, k):
    """Bytes of a slot of ``ep_combine_nodes_kernel`` for what crosses the network."""
    return round_up(round_up(row_bytes, 16) + 4 * k, 128)
