"""Launch the kernel of ag_gemm on several nodes, or compile it ahead of time."""

from tdkernels.ops.collectives.kernel_async_multinode import num_pieces
from tdkernels.rounding import cdiv


def comm_pieces(num_comm, num_chunks, topology):
    """How many pieces send, push and relay, and how many things, at most, one of them does."""
    others, elsewhere = topology.local_world_size - 1, topology.num_nodes - 1
    send, push = num_pieces(num_comm, num_chunks, topology.local_world_size)
    turns = cdiv(num_chunks, send) * elsewhere
    if push:
        relays = cdiv(num_chunks * others * elsewhere, push)
        turns = max(turns, cdiv(num_chunks * others, push) + 2 * relays)  # for each it waits, then pushes
    return send + push, turns
