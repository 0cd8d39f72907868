"""The plain collectives that the references and the method "torch" are made of."""

import torch.distributed as dist


def all_gather_rows(x, group=None):
    """All ranks' x [rows, …] below each other, [W * rows, …]."""
    full = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(full, x.contiguous(), group=group)
    return full


def reduce_scatter_rows(partial, group=None):
    """This rank's rows of the sum of all ranks' partial [W * rows, …]."""
    z = partial.new_empty(partial.shape[0] // dist.get_world_size(group), *partial.shape[1:])
    dist.reduce_scatter_tensor(z, partial.contiguous(), op=dist.ReduceOp.SUM, group=group)
    return z

