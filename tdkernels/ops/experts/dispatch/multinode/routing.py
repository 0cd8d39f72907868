"""MultinodeRouting: the two-phase strategy for groups on several nodes. A token crosses the network once per node."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.experts.dispatch import launch
from tdkernels.ops.experts.dispatch.counted import CountedRouting, combine_slot_memory
from tdkernels.ops.experts.dispatch.multinode import layout
from tdkernels.ops.experts.dispatch.multinode.kernel_combine import ep_combine_nodes_kernel
from tdkernels.ops.experts.dispatch.multinode.kernel_dispatch import ep_dispatch_nodes_kernel
from tdkernels.rounding import round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tdkernels.ops.experts.dispatch.config import EpConfig


@dataclass(eq=False, kw_only=True)
class MultinodeRouting(CountedRouting):
    """A CountedRouting whose ranks are on several nodes.

    Attributes:
        local_world_size: Number L of ranks per node.
        node_tables: Inter-node tables, int32, see ``multinode.layout``.
        node_slots: Number of slots, enough on any rank for the tokens that it sends to other nodes, and for the tokens
            that it relays.
        relayed: Relayed-token map, int32, see ``multinode.layout``. The first dispatch writes it.
    """

    local_world_size: int
    node_tables: torch.Tensor
    node_slots: int
    relayed: torch.Tensor | None = None

    def __post_init__(self):
        super().__post_init__()
        self.launch_key = *self.launch_key, self.local_world_size, self.node_slots

    def weighs_rows(self, config: "EpConfig") -> bool:
        return True  # each node computes its own weighted sum

    @property
    def maps(self) -> tuple[torch.Tensor | None, ...]:
        return self.tables, self.node_tables, self.received, self.relayed

    def with_maps(self, maps: "Sequence[Any]") -> "MultinodeRouting":
        return replace(self, tables=maps[0], node_tables=maps[1], received=maps[2], relayed=maps[3])

    def make_received(self) -> None:
        """Allocate the received-slot map and the relayed-token map for the first dispatch."""
        super().make_received()
        length = layout.relayed_length(self.node_slots, self.local_world_size, self.shape.choices)
        self.relayed = torch.empty(length, dtype=torch.int32, device=self.tables.device)

    def agreed_slots(self) -> dict[str, int]:
        return {"slots": self.slots, "crossing": self.node_slots}

    def dispatch_staging(self, row_bytes: int, scale_bytes: int) -> int:
        slot = crossing_slot_memory(row_bytes, scale_bytes, self.shape.choices, self.local_world_size)
        return super().dispatch_staging(row_bytes, scale_bytes) + 2 * slot * self.node_slots

    def combine_staging(self, row_bytes: int, per_expert: bool) -> int:
        slot = combine_slot_memory(row_bytes, self.shape.choices, per_expert, with_weights=per_expert)
        return slot * self.slots + 2 * sum_slot_memory(row_bytes, self.shape.choices) * self.node_slots

    def programs(self, config: "EpConfig", phase: str, senders: int, receivers: int) -> tuple[int, tuple[int, ...]]:
        """Do the same as ``CountedRouting.programs``. Relays wait for senders, so they run in the receive phase."""
        relays, nodes = 0, self.shape.world_size // self.local_world_size
        if phase != "send":
            relays = min(config.num_receivers, launch.chunks_at_most(self) * nodes)
        programs, _ = super().programs(config, phase, senders, receivers)
        return programs + relays, (senders, relays, self.slots, self.node_slots)

    def table_constants(self) -> dict[str, int]:
        return super().table_constants() | {"LOCAL": self.local_world_size}

    def dispatch_kernel(self, device: torch.device) -> tuple[Any, dict[str, Any]]:
        return ep_dispatch_nodes_kernel, {}

    def combine_kernel(self, device: torch.device, width: int, block: int) -> tuple[Any, dict[str, Any]]:
        return ep_combine_nodes_kernel, {}


def line_bytes(num_experts: int, world_size: int, local_world_size: int) -> int:
    """Return the bytes of a rank's count row; see ``multinode.kernel_route.line_words``."""
    return 4 * round_up(num_experts + world_size + 2 + world_size // local_world_size, 4)


def crossing_slot_memory(row_bytes: int, scale_bytes: int, k: int, local_world_size: int) -> int:
    """Return the bytes of a slot of ``ep_dispatch_nodes_kernel`` for a token that crosses the network."""
    return round_up(round_up(row_bytes, 16) + round_up(scale_bytes, 16) + 4 * (3 * k + local_world_size), 128)


def sum_slot_memory(row_bytes: int, k: int) -> int:
    """Return the bytes of a slot of ``ep_combine_nodes_kernel`` for a node's sum, which crosses the network."""
    return round_up(round_up(row_bytes, 16) + 4 * k, 128)
