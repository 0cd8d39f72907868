"""CountedRouting: the two-phase strategy. Ranks exchange counts first, so each knows the destination of every token.

A dispatch and a combine are one kernel launch each. ``launch`` prepares the operands and calls the hooks of the routing
for what differs between strategies.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tdkernels.ops.experts.dispatch import launch, layout
from tdkernels.ops.experts.dispatch.kernel_combine import ep_combine_kernel
from tdkernels.ops.experts.dispatch.kernel_dispatch import ep_dispatch_kernel
from tdkernels.ops.experts.dispatch.payload import MAX_CHUNKS, as_memories, pieces_trace
from tdkernels.ops.experts.dispatch.routing import Routing
from tdkernels.rounding import next_power_of_2, round_up, round_up_to_part
from tdkernels.runtime.kernel_launch import launch_cached, pointer_signature
from tdkernels.symm.early_error import part_of_call
from tdkernels.symm.group import group_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tdkernels.ops.experts.dispatch.config import EpConfig
    from tdkernels.ops.experts.dispatch.payload import DispatchTensors
    from tdkernels.ops.experts.dispatch.request import RoutingShape
    from tdkernels.symm.workspace import Workspace

_FEWEST_SLOTS = 64


class Reach(NamedTuple):
    """Upper bounds over all ranks. They are the same on each rank, for memory with the same layout on all of them."""

    rows: int  # rows that a rank receives
    choices: int  # assignments of a rank's tokens


@dataclass(eq=False, kw_only=True)
class CountedRouting(Routing):
    """A routing for kernels with symmetric memory, for groups on one node.

    Attributes:
        tables: Routing tables, int32, see ``layout``.
        slots: Number of staging slots, enough for any rank.
        reach: Set if each assignment is sent separately, or if the host has waited for the counts.
        received: Received-slot map, int32, see ``layout``: the tokens in each slot. The first dispatch writes it.
        note_call: ``Workspace.note_call`` of the call that counts, in the workspace ``counts_in``.
    """

    if TYPE_CHECKING:
        config: EpConfig  # set before any launch

    tables: torch.Tensor
    slots: int
    reach: Reach | None = None
    received: torch.Tensor | None = None
    note_call: int = 0
    launch_key: tuple = field(init=False)  # everything that decides a launch, except the operands

    counts_in = "ep_counts"

    def __post_init__(self):
        self.launch_key = self.shape, self.slots, self.config

    def part_of_call(self, state=None):
        return part_of_call(state or group_state(self.group), self.counts_in, self.note_call)

    def dismiss_error(self):
        group_state(self.group).workspaces[self.counts_in, self.splits.device].dismiss_note(self.note_call)

    def dispatch(self, x, *, scales=None, weights=None, quantize=False):
        tensors = launch.prepare_dispatch(self, x, scales, weights, quantize)
        launch.launch_dispatch(self, tensors)
        return tensors.rows, tensors.row_scales, tensors.row_weights

    def send_dispatch(self, x, *, scales=None, weights=None, quantize=False):
        tensors = launch.prepare_dispatch(self, x, scales, weights, quantize)
        launch.launch_dispatch(self, tensors, "send")

        def receive():
            launch.launch_dispatch(self, tensors, "receive")
            return tensors.rows, tensors.row_scales, tensors.row_weights

        return receive

    def dispatch_gradient(self, dy, expert_rows, weights, want_dots):
        tensors = launch.prepare_gradient(self, dy, expert_rows, weights, want_dots)
        launch.launch_dispatch(self, tensors)
        return tensors.rows, tensors.dots

    def combine(self, rows, *, weights=None, row_weights=None, row_numbers=None, config=None):
        config = config or self.config
        tensors = launch.prepare_combine(self, rows, weights, row_weights, row_numbers, config)
        launch.launch_combine(self, tensors, config)
        return tensors.y, tensors.numbers

    def send_combine(self, rows, *, weights=None, row_weights=None, config=None):
        config = config or self.config
        tensors = launch.prepare_combine(self, rows, weights, row_weights, None, config)
        launch.launch_combine(self, tensors, config, "send")

        def receive():
            launch.launch_combine(self, tensors, config, "receive")
            return tensors.y

        return receive

    def weighs_rows(self, config):
        return config.combine == "per_rank"  # then the ranks of the rows compute the weighted sums

    def for_operator(self, operator: str, config: "EpConfig") -> "CountedRouting":
        """Return this routing for use in another operator, with that operator's config."""
        return replace(self, shape=self.shape._replace(operator=operator), config=config)

    def add_spare_rows(self) -> None:
        """Round up the number of rows, if it is exact. Call it before the first dispatch.

        Grouped GEMMs and combines ignore spare rows, which belong to no group. Launches are cached by the number of
        rows, which otherwise differs from call to call. At most 1/32 of the rows are spare, or 15 rows.
        """
        assert self.received is None, "rows were received already"
        if self.shape.max_tokens is None:
            self.rows = round_up_to_part(self.rows, parts=64, least=16)

    # Used by ``launch``:

    @property
    def maps(self) -> tuple[torch.Tensor | None, ...]:
        """The tables and received-slot maps, in the order of the kernel parameters."""
        return self.tables, self.received

    def with_maps(self, maps: "Sequence[Any]") -> "CountedRouting":
        """Return a copy with other ``maps``."""
        return replace(self, tables=maps[0], received=maps[1])

    def make_received(self) -> None:
        """Allocate the received-slot map for the first dispatch."""
        length = layout.received_length(self.shape.world_size, self.slots, self.shape.choices)
        self.received = torch.empty(length, dtype=torch.int32, device=self.tables.device)

    def run_dispatch(self, workspace: "Workspace", tensors: "DispatchTensors", phase: str) -> None:
        """Launch the kernel for one phase of a dispatch or for both; see ``launch.launch_dispatch``."""
        x, scales = tensors.x, tensors.scales
        key = (
            phase, self.launch_key, x.dtype, x.shape[1], None if scales is None else scales.shape[1:],
            tensors.quantize, tensors.gradient, tensors.first,
        )
        operands = *as_memories(tensors.tensors), *self.maps
        launch_cached(
            workspace, key, operands, lambda *of: launch.new_dispatch(workspace, self, tensors, phase, of),
            signature=pointer_signature,
        )

    def agreed_slots(self) -> dict[str, int]:
        """Return the numbers of slots, for the consensus check."""
        return {"slots": self.slots}

    def dispatch_staging(self, row_bytes: int, scale_bytes: int) -> int:
        """Return the bytes of symmetric memory that a dispatch needs in each half of the workspace."""
        slot = slot_memory(row_bytes, scale_bytes, self.shape.choices)
        return 8 * self.shape.world_size * MAX_CHUNKS + slot * self.slots

    def combine_staging(self, row_bytes: int, per_expert: bool) -> int:
        """Return the bytes of symmetric memory that a combine needs in each half of the workspace."""
        return combine_slot_memory(row_bytes, self.shape.choices, per_expert) * self.slots

    def programs(self, config: "EpConfig", phase: str, senders: int, receivers: int) -> tuple[int, tuple[int, ...]]:
        """Return (programs of a launch, kernel arguments with numbers of programs and slots)."""
        return max(senders + receivers, 1), (senders,)

    def table_constants(self) -> dict[str, int]:
        """Return the constexpr arguments for the tables."""
        return layout.table_constants(self.shape)

    def dispatch_kernel(self, device: torch.device) -> tuple[Any, dict[str, Any]]:
        """Return (kernel of a dispatch, constexpr arguments that only this kernel has)."""
        trace = pieces_trace(device, self.shape.world_size)
        return ep_dispatch_kernel, {"TILE_TOKENS": layout.tile_tokens(self.shape.choices), "trace_ptr": trace}

    def combine_kernel(self, device: torch.device, width: int, block: int) -> tuple[Any, dict[str, Any]]:
        """Return (kernel of a combine, constexpr arguments that only this kernel has)."""
        trace = pieces_trace(device, self.shape.world_size)
        return ep_combine_kernel, {"WHOLE": width % block == 0, "trace_ptr": trace}


def routing_to_compile(
    shape: "RoutingShape", config: "EpConfig", device: torch.device, reach: Reach | None = None
) -> CountedRouting:
    """Return a CountedRouting without counts, which suffices to compile kernels."""
    tables = torch.empty(1, dtype=torch.int32, device=device)
    return CountedRouting(
        shape=shape, group=None, config=config, rows=1,  # type: ignore[arg-type]  # no group
        splits=tables, staged=1, tables=tables, slots=1, reach=reach,
    )


def empty_splits(shape: "RoutingShape", device: torch.device) -> torch.Tensor:
    """Allocate ``Routing.splits``."""
    local = shape.num_experts // shape.world_size
    return torch.empty((shape.world_size, local) if shape.by_source else (local,), dtype=torch.int32, device=device)


def slots_for(tokens: int) -> int:
    """Return the staging slots for an upper bound of tokens, rounded up: fewer sizes need fewer consensus checks."""
    return max(next_power_of_2(tokens), _FEWEST_SLOTS)


def slot_memory(row_bytes: int, scale_bytes: int, k: int) -> int:
    """Return the bytes of a slot of ``ep_dispatch_kernel``."""
    return round_up(round_up(row_bytes, 16) + round_up(scale_bytes, 16) + 8 * k, 128)


def combine_slot_memory(row_bytes: int, k: int, per_expert: bool, with_weights: bool = False) -> int:
    """Return the bytes of a slot of ``ep_combine_kernel``."""
    return round_up(round_up(row_bytes, 16) * (k if per_expert else 1) + (8 if with_weights else 4) * k, 128)
