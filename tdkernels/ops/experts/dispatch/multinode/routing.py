"""MultinodeRouting: in a group on several nodes, tokens cross the network once for each node."""

from dataclasses import dataclass, replace

import torch

from tdkernels.ops.experts.dispatch import launch
from tdkernels.ops.experts.dispatch.counted import CountedRouting, combine_slot_memory
from tdkernels.ops.experts.dispatch.multinode import layout
from tdkernels.ops.experts.dispatch.multinode.kernel_combine import ep_combine_nodes_kernel
from tdkernels.ops.experts.dispatch.multinode.kernel_dispatch import ep_dispatch_nodes_kernel
from tdkernels.rounding import round_up


@dataclass(eq=False, kw_only=True)
class MultinodeRouting(CountedRouting):
    """A CountedRouting whose ranks are on several nodes.

    Attributes:
        local_world_size: L, ranks of a node
        node_tables: int32, see ``multinode.layout``
        node_slots: slots that are enough, on any rank, for what it sends to other nodes, and for what it relays
        relayed: int32, see ``multinode.layout``: which tokens were relayed; written by the first dispatch
    """

    local_world_size: int
    node_tables: torch.Tensor
    node_slots: int
    relayed: torch.Tensor | None = None

    def __post_init__(self):
        super().__post_init__()
        self.launch_key = *self.launch_key, self.local_world_size, self.node_slots

    def weighs_rows(self, config):
        return True  # each node's part of a sum is made there

    @property
    def maps(self):
        return self.tables, self.node_tables, self.received, self.relayed

    def with_maps(self, maps):
        return replace(self, tables=maps[0], node_tables=maps[1], received=maps[2], relayed=maps[3])

    def make_received(self):
        super().make_received()
        length = layout.passed_length(self.node_slots, self.local_world_size, self.shape.choices)
        self.relayed = torch.empty(length, dtype=torch.int32, device=self.tables.device)

    def agreed_slots(self):
        return {"slots": self.slots, "crossing": self.node_slots}

    def dispatch_staging(self, row_bytes, scale_bytes):
        slot = crossing_slot_memory(row_bytes, scale_bytes, self.shape.choices, self.local_world_size)
        return super().dispatch_staging(row_bytes, scale_bytes) + 2 * slot * self.node_slots

    def combine_staging(self, row_bytes, per_expert):
        slot = combine_slot_memory(row_bytes, self.shape.choices, per_expert, with_weights=per_expert)
        return slot * self.slots + 2 * sum_slot_memory(row_bytes, self.shape.choices) * self.node_slots

    def programs(self, config, phase, senders, receivers):
        """As ``CountedRouting.programs``. Relays wait for senders, so they belong to the receive phase."""
        relays, nodes = 0, self.shape.world_size // self.local_world_size
        if phase != "send":
            relays = min(config.num_receivers, launch.chunks_at_most(self) * nodes)
        programs, _ = super().programs(config, phase, senders, receivers)
        return programs + relays, (senders, relays, self.slots, self.node_slots)

    def table_constants(self):
        return super().table_constants() | {"LOCAL": self.local_world_size}

    def dispatch_kernel(self, device):
        return ep_dispatch_nodes_kernel, {}

    def combine_kernel(self, device, width, block):
        return ep_combine_nodes_kernel, {}


def line_bytes(num_experts, world_size, local_world_size):
    """Bytes of a rank's totals; see ``ep_route_nodes_kernel.line_words``."""
    return 4 * round_up(num_experts + world_size + 2 + world_size // local_world_size, 4)


def crossing_slot_memory(row_bytes, scale_bytes, k, local_world_size):
    """Bytes of a slot of ``ep_dispatch_nodes_kernel`` for what crosses the network."""
    return round_up(round_up(row_bytes, 16) + round_up(scale_bytes, 16) + 4 * (3 * k + local_world_size), 128)


def sum_slot_memory(row_bytes, k):
    """Bytes of a slot of ``ep_combine_nodes_kernel`` for what crosses the network."""
    return round_up(round_up(row_bytes, 16) + 4 * k, 128)
