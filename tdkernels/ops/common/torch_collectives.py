"""The plain collectives that the references and the method "torch" are made of.

They have no gradient, or a wrong one, so the references that are made of them (``gemm_rs_ref`` and others) give none.
"""

import torch.distributed as dist

# torch 2.13 has given them new names and warns about the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_rows(x, group=None):
    """All ranks' x [rows, …] below each other, [W * rows, …]."""
    full = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    _all_gather(full, x.contiguous(), group=group)
    return full


def reduce_scatter_rows(partial, group=None):
    """This rank's rows of the sum of all ranks' partial [W * rows, …]."""
    z = partial.new_empty(partial.shape[0] // dist.get_world_size(group), *partial.shape[1:])
    _reduce_scatter(z, partial.contiguous(), op=dist.ReduceOp.SUM, group=group)
    return z


def all_gather_beside(full, x, group=None):
    """Begin to gather x into ``full``; wait() of what it returns makes the current stream wait for it."""
    return _all_gather(full, x, group=group, async_op=True)


def reduce_scatter_beside(z, partial, group=None):
    """Begin to reduce and scatter ``partial`` into z; as ``all_gather_beside``."""
    return _reduce_scatter(z, partial, op=dist.ReduceOp.SUM, group=group, async_op=True)


def all_reduce(partial, group=None):
    """The sum of all ranks' partial, of the same shape on all of them; in place where it is contiguous."""
    total = partial.contiguous()
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return total
