"""Work items for communication of ag_gemm on several nodes."""

from typing import TYPE_CHECKING

from tdkernels.ops.collectives.kernel_async_multinode import num_pieces
from tdkernels.rounding import cdiv

if TYPE_CHECKING:
    from tdkernels.symm.topology import Topology


def comm_pieces(num_comm: int, num_chunks: int, topology: "Topology") -> tuple[int, int]:
    """Return (number of work items that send, push or relay, maximum number of trace events of one of them)."""
    others, elsewhere = topology.local_world_size - 1, topology.num_nodes - 1
    send, push = num_pieces(num_comm, num_chunks, topology.local_world_size)
    turns = cdiv(num_chunks, send) * elsewhere
    if push:
        relays = cdiv(num_chunks * others * elsewhere, push)
        turns = max(turns, cdiv(num_chunks * others, push) + 2 * relays)  # a relay waits, then pushes
    return send + push, turns
