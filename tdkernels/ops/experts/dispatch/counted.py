"""CountedRouting: the ranks have exchanged their counts, so each knows the destination of every token."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from tdkernels.ops.experts.dispatch import launch, layout
from tdkernels.ops.experts.dispatch.kernel_combine import ep_combine_kernel
from tdkernels.ops.experts.dispatch.kernel_dispatch import ep_dispatch_kernel
from tdkernels.ops.experts.dispatch.payload import MAX_CHUNKS, as_memories, pieces_trace
from tdkernels.ops.experts.dispatch.routing import Routing
from tdkernels.rounding import next_power_of_2, round_up
from tdkernels.runtime.kernel_launch import launch_cached, pointer_signature

_FEWEST_SLOTS = 64


class Reach(NamedTuple):
    """Upper bounds over all ranks, the same numbers on each, for memory with the same layout on all ranks."""

    rows: int  # received rows
    choices: int  # choices of a rank's tokens


@dataclass(eq=False, kw_only=True)
class CountedRouting(Routing):
    """A routing by kernels and symmetric memory, in a group on one node.

    Attributes:
        tables: int32, see ``layout``
        slots: staging slots that are enough on any rank
        reach: set if each choice is sent by itself, or if the host has waited for the counts
        received: int32, see ``layout``: which tokens came in which slot; written by the first dispatch
    """

    tables: torch.Tensor
    slots: int
    reach: Reach | None = None
    received: torch.Tensor | None = None
    launch_key: tuple = field(init=False)  # everything but the operands that decides a launch

    def __post_init__(self):
        self.launch_key = self.shape, self.slots, self.config

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
        return config.combine == "per_rank"  # the sums are made where the rows are

    def for_operator(self, operator, config):
        """The same as a part of another operator, with its config."""
        return replace(self, shape=self.shape._replace(operator=operator), config=config)

    # ---- used by ``launch`` ----

    @property
    def maps(self):
        """The tables and received-slot maps, as kernels take them."""
        return self.tables, self.received

    def with_maps(self, maps):
        return replace(self, tables=maps[0], received=maps[1])

    def make_received(self):
        """Allocate the received-slot map for the first dispatch."""
        length = layout.came_length(self.shape.world_size, self.slots, self.shape.choices)
        self.received = torch.empty(length, dtype=torch.int32, device=self.tables.device)

    def run_dispatch(self, workspace, tensors, phase):
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

    def agreed_slots(self):
        """The fields about slots that all ranks agree on."""
        return {"slots": self.slots}

    def dispatch_staging(self, row_bytes, scale_bytes):
        """Bytes of symmetric memory that a dispatch takes."""
        slot = slot_memory(row_bytes, scale_bytes, self.shape.choices)
        return 8 * self.shape.world_size * MAX_CHUNKS + slot * self.slots

    def combine_staging(self, row_bytes, per_expert):
        """Bytes of symmetric memory that a combine takes."""
        return combine_slot_memory(row_bytes, self.shape.choices, per_expert) * self.slots

    def programs(self, config, phase, senders, receivers):
        """(programs of a launch, the numbers of programs and slots that its kernel takes)"""
        return max(senders + receivers, 1), (senders,)

    def table_constants(self):
        return layout.table_constants(self.shape)

    def dispatch_kernel(self, device):
        """(the kernel of a dispatch, the constants that only this one has)"""
        trace = pieces_trace(device, self.shape.world_size)
        return ep_dispatch_kernel, {"TILE_TOKENS": layout.tile_tokens(self.shape.choices), "trace_ptr": trace}

    def combine_kernel(self, device, width, block):
        """(the kernel of a combine, the constants that only this one has)"""
        trace = pieces_trace(device, self.shape.world_size)
        return ep_combine_kernel, {"WHOLE": width % block == 0, "trace_ptr": trace}


def routing_to_compile(shape, config, device, reach=None):
    """A CountedRouting without counts: enough to compile kernels."""
    tables = torch.empty(1, dtype=torch.int32, device=device)
    return CountedRouting(
        shape=shape, group=None, config=config, rows=1, splits=tables, staged=1, tables=tables, slots=1, reach=reach
    )


def empty_splits(shape, device):
    """Memory for ``Routing.splits``."""
    local = shape.num_experts // shape.world_size
    return torch.empty((shape.world_size, local) if shape.by_source else (local,), dtype=torch.int32, device=device)


def slots_for(tokens):
    """The staging slots for an upper bound of tokens, rounded up: fewer distinct sizes need fewer agreements."""
    return max(next_power_of_2(tokens), _FEWEST_SLOTS)


def slot_memory(row_bytes, scale_bytes, k):
    """Bytes of a slot of ``ep_dispatch_kernel``."""
    return round_up(round_up(row_bytes, 16) + round_up(scale_bytes, 16) + 8 * k, 128)


def combine_slot_memory(row_bytes, k, per_expert, with_weights=False):
    """Bytes of a slot of ``ep_combine_kernel``."""
    return round_up(round_up(row_bytes, 16) * (k if per_expert else 1) + (8 if with_weights else 4) * k, 128)
