"""Functions at the border of a tensor-parallel region, where a tensor is equal on all ranks on one side.

    function        forward                 backward "sum"          backward "slice"
    copy_to_ranks   identity                all-reduce
    gather_rows     all-gather of rows      reduce-scatter          this rank's rows
    scatter_rows    this rank's rows        all-gather              this rank's rows, and zeros

With "sum" the gradients of all ranks are added: what follows differs between the ranks. With "slice" a rank uses its
own gradient only. Both give the same loss, so a wrong choice shows only in the gradients.

Example:
    y = tdkernels.copy_to_ranks(x)                      # before a column-parallel layer
    h = tdkernels.gather_rows(h, backward="slice")      # before layers that every rank computes alike
"""

from typing import Literal

import torch

from tdkernels.ops.collectives.op import all_gather
from tdkernels.ops.common import validation
from tdkernels.runtime import autograd
from tdkernels.symm import GroupLike, resolve_group

Backward = Literal["sum", "slice"]


def _own_rows(x, rank, world_size):
    """Return the rows of x [W * R, ...] that belong to a rank."""
    rows = x.shape[0] // world_size
    return x[rank * rows : (rank + 1) * rows]


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        autograd.reject_second_derivatives("copy_to_ranks")
        return torch.ops.tdkernels.all_reduce_of_gradient(dy, ctx.group, ""), None


class _GatherRows(torch.autograd.Function):
    """The gradient is this rank's rows. That of ``all_gather`` is summed."""

    @staticmethod
    def forward(ctx, x, group, rank, world_size):
        ctx.rank, ctx.world_size = rank, world_size
        return torch.ops.tdkernels.all_gather(x, group, "")

    @staticmethod
    def backward(ctx, dy):
        autograd.reject_second_derivatives("gather_rows")
        return _own_rows(dy, ctx.rank, ctx.world_size), None, None, None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, rank, world_size, backward):
        ctx.group, ctx.rank, ctx.world_size, ctx.direction = group, rank, world_size, backward
        return _own_rows(x, rank, world_size).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, dy):
        autograd.reject_second_derivatives("scatter_rows")
        if ctx.direction == "sum":
            dx = torch.ops.tdkernels.all_gather(dy, ctx.group, "")
        else:
            dx = dy.new_zeros(ctx.world_size * dy.shape[0], *dy.shape[1:])
            _own_rows(dx, ctx.rank, ctx.world_size).copy_(dy)
        return dx, None, None, None, None


def _check(function, x, backward="sum"):
    """Raise TypeError or ValueError if the arguments are invalid on this rank."""
    validation.check_tensor(function, "x", x, validation.DTYPES, memory=False)
    validation.check_device(function, "x", x)
    if backward not in ("sum", "slice"):
        raise ValueError(f'{function}: backward must be "sum" or "slice", not {backward!r}')
    if function != "copy_to_ranks" and x.dim() == 0:
        raise ValueError(f"{function}: x must have at least one dimension, the rows; it is a scalar")


def copy_to_ranks(x: torch.Tensor, *, group: GroupLike = None) -> torch.Tensor:
    """Return x, and all-reduce its gradient.

    It belongs in front of layers whose weights are divided between the ranks, if x is equal on all ranks. Megatron's
    name is copy_to_tensor_model_parallel_region. ``column_linear`` includes it.

    Args:
        x: In bf16, fp16 or fp32, with any shape, equal on all ranks.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the default group (W ranks).

    Returns:
        y, a view of x.

    Gradient:
        dx = all_reduce(dy), equal on all ranks.

    Raises:
        TypeError, ValueError: If x is invalid. Nothing has been launched.
        ValueError, PeerTimeoutError: In the backward, as for ``all_reduce``.
        RuntimeError: In a backward with ``create_graph=True``.

    Contract:
        The forward is local. The backward is collective over ``group``, as ``all_reduce``.

    Source:
        The operator f of Megatron-LM (https://arxiv.org/abs/1909.08053).
    """
    group = resolve_group(group)
    _check("copy_to_ranks", x)
    return _CopyToRanks.apply(x, group.group_name)


def gather_rows(x: torch.Tensor, *, backward: Backward, group: GroupLike = None) -> torch.Tensor:
    """All-gather x along its first dimension, with a backward that the caller names.

    Args:
        x: This rank's rows, [R, ...] in bf16, fp16 or fp32, with the same shape on all ranks.
        backward: "sum" if the ranks use y in different ways, such as in layers whose weights are divided. "slice" if
            all ranks compute the same with y.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the default group (W ranks).

    Returns:
        y [W * R, ...], in which block r of R rows is the x of rank r.

    Gradient:
        "sum": dx = reduce_scatter(dy). "slice": this rank's rows of dy, without communication.

    Raises:
        TypeError, ValueError: If x or backward is invalid. Nothing has been launched.
        ValueError, PeerTimeoutError: As for ``all_gather``.
        RuntimeError: In a backward with ``create_graph=True``.

    Contract:
        As for ``all_gather``.

    Source:
        Megatron-LM (https://arxiv.org/abs/2205.05198): gather_from_sequence_parallel_region and its argument
        tensor_parallel_output_grad.
    """
    group = resolve_group(group)
    _check("gather_rows", x, backward)
    if backward == "sum":
        return all_gather(x, group=group)
    return _GatherRows.apply(x, group.group_name, group.rank(), group.size())


def scatter_rows(x: torch.Tensor, *, backward: Backward, group: GroupLike = None) -> torch.Tensor:
    """Return this rank's rows of an x that is equal on all ranks, with a backward that the caller names.

    Args:
        x: [W * R, ...] in bf16, fp16 or fp32, equal on all ranks.
        backward: "sum" if what has computed x expects its whole gradient on every rank, such as replicated layers.
            "slice" if the gradients of the ranks are added later, such as by ``copy_to_ranks``.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the default group (W ranks).

    Returns:
        y [R, ...], a new tensor: block r of x on rank r.

    Gradient:
        "sum": dx = all_gather(dy). "slice": dy in this rank's rows of dx, and zeros in the others, without
        communication.

    Raises:
        TypeError, ValueError: If x or backward is invalid, such as rows that are not divisible by W. Nothing has been
            launched.
        ValueError, PeerTimeoutError: In the backward, as for ``all_gather``.
        RuntimeError: In a backward with ``create_graph=True``.

    Contract:
        The forward is local. The backward with "sum" is collective over ``group``, as ``all_gather``.

    Source:
        Megatron-LM (https://arxiv.org/abs/2205.05198): scatter_to_sequence_parallel_region.
    """
    group = resolve_group(group)
    _check("scatter_rows", x, backward)
    if x.shape[0] % group.size():
        raise ValueError(
            f"scatter_rows: the first dimension of x {list(x.shape)} must be divisible by the group's {group.size()} "
            f"ranks"
        )
    return _ScatterRows.apply(x, group.group_name, group.rank(), group.size(), backward)
