"""column_linear: y = x @ weight.T for a replicated x. The gradient of x is summed over the ranks while it is computed.

    x [M, K], equal on all ranks, weight [N / W, K] (this rank's rows)  ->  y [M, N / W]

The forward is local. In the backward each rank computes a partial gradient of x, from its columns of y. The all-reduce
of these is overlapped with the GEMMs (``backward``):

    dx = all_reduce(dy @ weight)        dweight = dy.T @ x        dbias = dy.sum(0)

Example:
    y = tdkernels.column_linear(x, weight)      # instead of y = F.linear(copy_to_tensor_parallel_region(x), weight)
"""

import torch
import torch.nn.functional as F

from tdkernels.ops.common import validation
from tdkernels.ops.common.config import as_argument, check_config
from tdkernels.ops.common.torch_collectives import all_reduce
from tdkernels.ops.dense.column_linear import backward as _backward  # noqa: F401  registers the backward
from tdkernels.ops.dense.gemm_ar.config import GemmArConfig
from tdkernels.ops.dense.weight_gradient import as_list, check_main_grad, returned_gradient
from tdkernels.runtime import autograd
from tdkernels.symm import GroupLike, resolve_group


class _SumOfGradients(torch.autograd.Function):
    """The identity. Its gradient is summed over the ranks by torch."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return all_reduce(dy.clone(memory_format=torch.contiguous_format), ctx.group), None


def column_linear_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: GroupLike = None,
) -> torch.Tensor:
    """Compute ``column_linear`` in plain torch, with its gradients. Arguments as for ``column_linear``."""
    return F.linear(_SumOfGradients.apply(x, resolve_group(group)), weight, bias)


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group, config, main_grads):
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.config, ctx.main_grads = group, config, main_grads
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        autograd.reject_second_derivatives("column_linear")
        x, weight = ctx.saved_tensors
        need_dx, need_dweight, need_dbias = ctx.needs_input_grad[:3]
        dx = dweight = dbias = None
        if need_dx or need_dweight:
            dx, dweight = torch.ops.tdkernels.column_linear_backward(
                dy, x, weight, ctx.main_grads, need_dx, need_dweight, ctx.group, ctx.config
            )
        if need_dweight:
            dweight = returned_gradient(dweight, weight, len(ctx.main_grads) > 0)
        if need_dbias:
            dbias = dy.sum(0, dtype=torch.float32).to(dy.dtype)
        return dx if need_dx else None, dweight if need_dweight else None, dbias, None, None, None


def column_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, main_grad: torch.Tensor | None = None,
    group: GroupLike = None, config: GemmArConfig | None = None,
) -> torch.Tensor:
    """Multiply a replicated x by ``weight.T``. In the backward, all-reduce the gradient of x while it is computed.

    It is the column-parallel layer of tensor parallelism without sequence parallelism, and ``gemm_ar`` is the
    row-parallel one.

    Args:
        x: [M, K] in bf16, fp16 or fp32, equal on all ranks. Further leading dimensions are flattened and restored:
            [B, S, K] gives [B, S, N / W].
        weight: This rank's rows of the full weight, [N / W, K] as in torch.nn.Linear, in the dtype of x.
        bias: [N / W] in the dtype of x, or None.
        main_grad: A tensor with the shape of weight, in fp32 or in the dtype of weight, or None. The backward adds
            dweight to it in the GEMM, and weight gets no gradient: the fused gradient accumulation of Megatron-LM.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the default group (W ranks).
        config: GemmArConfig, the same on all ranks: a ``gemm_ar`` of dy [M, N / W] and the transposed weight computes
            dx. None uses the best known config of that (see tdkernels.autotune), or overlaps the all-reduce with both
            GEMMs of the backward, if they are large.

    Returns:
        y [M, N / W] in the dtype of x, as computed by ``torch.nn.functional.linear``.

    Gradient:
        dx = all_reduce(dy @ weight), equal on all ranks; dweight = dy.T @ x; dbias = dy.sum(0). If x needs no gradient,
        the backward has no communication.

    Raises:
        TypeError, ValueError: If operands or config are invalid. Errors name the argument and its shape. Nothing has
            been launched.
        ValueError: In the backward, on every rank, if the ranks disagree on shapes, dtype or config.
        PeerTimeoutError: If a peer does not run its backward in time. On a GPU it is raised by the next call or by
            ``tdkernels.synchronize()``.
        RuntimeError: In a backward with ``create_graph=True``.

    Contract:
        The forward is local; the backward is collective over ``group`` if x needs a gradient. No host synchronization,
        except in the first backward with a shape, which runs a consensus check and allocates. Can be captured in a CUDA
        graph after one forward and backward outside. The caller owns the output.

    Source:
        Megatron-LM (https://arxiv.org/abs/1909.08053), where the operator f is followed by the linear layer.
    """
    group = resolve_group(group)
    x, weight, bias = autograd.apply_autocast(x, weight, bias)
    validation.check_operands("column_linear", x, weight, bias)
    check_main_grad("column_linear", weight, main_grad)
    check_config("column_linear", config, GemmArConfig, x)
    if not autograd.may_be_differentiated((x, weight, bias)):
        return F.linear(x, weight, bias)
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    y = _ColumnLinear.apply(rows, weight, bias, group.group_name, as_argument(config), as_list(main_grad))
    return y.view(*x.shape[:-1], weight.shape[0])
