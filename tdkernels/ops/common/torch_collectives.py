"""Collectives of torch.distributed, for the reference implementations and for method "torch".

They have no gradient, or a wrong one. So the references that use them (``gemm_rs_ref`` and others) have no gradient.

In solo mode they raise NotImplementedError: torch's collectives do not communicate there, and would take no time.
"""

from typing import TYPE_CHECKING

import torch.distributed as dist

from tdkernels.symm.group import states

if TYPE_CHECKING:
    import torch

# torch 2.13 renames these functions and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _linked(group):
    """Return the group unless it is one of solo mode."""
    used = dist.group.WORLD if group is None else group
    state = states.get(used) if isinstance(used, dist.ProcessGroup) else None  # otherwise torch raises its error
    if state is not None and not state.has_link:
        raise NotImplementedError("not in solo mode: torch's collectives do not communicate there")
    return group


def all_gather_rows(x: "torch.Tensor", group: dist.ProcessGroup | None = None) -> "torch.Tensor":
    """All-gather x [rows, ...] along the first dimension, to [W * rows, ...]."""
    full = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    _all_gather(full, x.contiguous(), group=_linked(group))
    return full


def reduce_scatter_rows(partial: "torch.Tensor", group: dist.ProcessGroup | None = None) -> "torch.Tensor":
    """Sum ``partial`` [W * rows, ...] over the ranks and return this rank's rows [rows, ...]."""
    z = partial.new_empty(partial.shape[0] // dist.get_world_size(group), *partial.shape[1:])
    _reduce_scatter(z, partial.contiguous(), op=dist.ReduceOp.SUM, group=_linked(group))
    return z


def all_gather_beside(full: "torch.Tensor", x: "torch.Tensor", group: dist.ProcessGroup | None = None) -> dist.Work:
    """Start an asynchronous all-gather of x into ``full``. ``wait()`` makes the current stream wait for the result."""
    return _all_gather(full, x, group=_linked(group), async_op=True)


def reduce_scatter_beside(
    z: "torch.Tensor", partial: "torch.Tensor", group: dist.ProcessGroup | None = None
) -> dist.Work:
    """Start an asynchronous reduce-scatter of ``partial`` into z. ``wait()`` as for ``all_gather_beside``."""
    return _reduce_scatter(z, partial, op=dist.ReduceOp.SUM, group=_linked(group), async_op=True)


def all_reduce(partial: "torch.Tensor", group: dist.ProcessGroup | None = None) -> "torch.Tensor":
    """Return the sum of ``partial`` over the ranks. A contiguous ``partial`` is modified in place."""
    total = partial.contiguous()
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=_linked(group))
    return total
