"""Signals between all ranks of one node at once, for kernels of multi-node groups."""

import triton.language as tl

from tdkernels.lang.context import MAX_RANKS, local_ranks, rank, symm_base
from tdkernels.lang.kernel import jit
from tdkernels.lang.signals import _set_all, _wait_each, wait_plan
from tdkernels.lang.targets import target


@jit
def _node(ctx):
    """Return (first rank of this node, index of this rank on the node, number of ranks on the node)."""
    local = local_ranks(ctx)
    me = rank(ctx)
    return me // local * local, me % local, local


@jit
def notify_node(ctx, signal_ptr, value, CHECK_FAILED: tl.constexpr = False):
    """``notify`` every other rank of this node at the same time, as ``notify_all`` does in a single-node group.

    Args:
        signal_ptr: the signal, in this rank's buffer. The same word is set in the buffer of each node peer.
        value: the value to set.
        CHECK_FAILED: as for ``notify``.
    """
    first, own, local = _node(ctx)
    offset = signal_ptr.to(tl.int64) - symm_base(ctx, first + own)
    numbers = tl.arange(0, MAX_RANKS)
    _set_all(ctx, offset, first + numbers, (numbers < local) & (numbers != own), value, CHECK_FAILED)


@jit
def wait_plan_node(ctx, first_ptr, stride, expected):
    """``wait_plan`` for one signal of every other rank of this node, all at once.

    Data that these ranks stored before their signal is visible to the loads that follow, except loads through tensor
    descriptors.

    Args:
        first_ptr: the signal of the first rank of the node, in this rank's buffer.
        stride: distance in words between the signals of consecutive ranks of the node.
        expected: the signal value, from ``call``.
    """
    first, own, local = _node(ctx)
    if target() == "cuda":
        numbers = tl.arange(0, MAX_RANKS)
        is_peer = (numbers < local) & (numbers != own)
        # A thread without a peer reads a word of this rank: any value satisfies its wait.
        offsets = tl.where(is_peer, numbers, own).to(tl.int64) * stride
        _wait_each(ctx, first_ptr + offsets, expected, first + numbers, is_peer)
        tl.debug_barrier()  # each thread has acquired from one peer; after the barrier, all threads have from all peers
    else:
        for source in range(local):
            if source != own:
                wait_plan(ctx, first_ptr + source * stride, expected, first + source)
