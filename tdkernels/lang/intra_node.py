"""Signals between the ranks of one node, for kernels of groups that have several: all node peers at once."""

import triton.language as tl

from tdkernels.lang.context import MAX_RANKS, local_ranks, rank, symm_base
from tdkernels.lang.kernel import jit
from tdkernels.lang.signals import _set_all, _wait_each, wait_plan
from tdkernels.lang.targets import target


@jit
def _node(ctx):
    """(the first rank of our node, our number on it, how many there are)."""
    local = local_ranks(ctx)
    me = rank(ctx)
    return me // local * local, me % local, local


@jit
def notify_node(ctx, signal_ptr, value, CHECK_FAILED: tl.constexpr = False):
    """``notify`` every other rank of our node, all at the same time; as ``notify_all`` in a group of one node."""
    first, own, local = _node(ctx)
    offset = signal_ptr.to(tl.int64) - symm_base(ctx, first + own)
    numbers = tl.arange(0, MAX_RANKS)
    _set_all(ctx, offset, first + numbers, (numbers < local) & (numbers != own), value, CHECK_FAILED)


@jit
def wait_plan_node(ctx, first_ptr, stride, expected):
    """``wait_plan`` for a signal of every other rank of our node at once.

    That of the rank with number s on it is ``stride * s`` words behind first_ptr. What they have stored before is
    visible to the loads that follow, tensor descriptors excepted.
    """
    first, own, local = _node(ctx)
    if target() == "cuda":
        numbers = tl.arange(0, MAX_RANKS)
        is_peer = (numbers < local) & (numbers != own)
        # A thread without a peer looks at a word of our own, which is always late enough for it.
        offsets = tl.where(is_peer, numbers, own).to(tl.int64) * stride
        _wait_each(ctx, first_ptr + offsets, expected, first + numbers, is_peer)
        tl.debug_barrier()  # each thread has acquired from one peer; now all of them have from all
    else:
        for source in range(local):
            if source != own:
                wait_plan(ctx, first_ptr + source * stride, expected, first + source)
