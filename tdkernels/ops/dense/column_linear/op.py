"""column_linear: y = x @ weight.T for a replicated x. The gradient of x is summed over the ranks while it is computed.

    x [M, K], equal on all ranks, weight [N / W, K] (this rank's rows)  ->  y [M, N / W]

The forward is local. In the backward each rank computes a partial gradient of x, from its columns of y. The all-reduce
of these is overlapped with the GEMMs (``backward``):

    dx = all_reduce(dy @ weight)        dweight = dy.T @ x        dbias = dy.sum(0)

With a list of weights, dx is the sum over them, with one all-reduce.

Example:
    y = tdkernels.column_linear(x, weight)      # instead of y = F.linear(copy_to_tensor_parallel_region(x), weight)
"""

from collections.abc import Sequence
from typing import Any, overload

import torch
import torch.nn.functional as F

from tdkernels.ops.common import validation
from tdkernels.ops.common.config import as_argument, check_config
from tdkernels.ops.common.torch_collectives import all_reduce
from tdkernels.ops.dense.column_linear import backward as _backward  # noqa: F401  registers the backward
from tdkernels.ops.dense.gemm_ar.config import GemmArConfig
from tdkernels.ops.dense.local import linear
from tdkernels.ops.dense.operand_lists import (
    LISTS,
    as_lists,
    bias_gradients,
    divided,
    joined,
    main_grads_of,
    without_none,
)
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


def column_linear_ref(x: torch.Tensor, weight: Any, bias: Any = None, *, group: GroupLike = None) -> Any:
    """Compute ``column_linear`` in plain torch, with its gradients. Arguments as for ``column_linear``."""
    x = _SumOfGradients.apply(x, resolve_group(group))
    ys = [F.linear(x, *one) for one in zip(*as_lists("column_linear", weight, bias), strict=True)]
    return ys if isinstance(weight, LISTS) else ys[0]


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, config, main_grads, number, *weights_and_biases):
        weights, biases = weights_and_biases[:number], weights_and_biases[number:]
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.config, ctx.main_grads = group, config, main_grads
        ctx.set_materialize_grads(False)
        return tuple(linear(x, *one) for one in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx, *dys):
        autograd.reject_second_derivatives("column_linear")
        x, *weights = ctx.saved_tensors
        number = len(weights)
        need_dx, _, _, _, _, *needed = ctx.needs_input_grad
        need_dweights, need_dbiases = needed[:number], needed[number:]
        dx, dweights, dbiases = None, [None] * number, [None] * number
        dys = without_none(dys, x, weights)
        if dys:
            if need_dx or any(need_dweights):
                dy, weight = joined(dys, 1), joined(weights, 0)
                dx, dweight = torch.ops.tdkernels.column_linear_backward(
                    dy, x, weight, ctx.main_grads, need_dx, any(need_dweights), ctx.group, ctx.config
                )
                dweights = divided(dweight, weights, need_dweights, ctx.main_grads)
            dbiases = bias_gradients(dys, need_dbiases)
        return dx if need_dx else None, None, None, None, None, *dweights, *dbiases


@overload
def column_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, main_grad: torch.Tensor | None = None,
    group: GroupLike = None, config: GemmArConfig | None = None,
) -> torch.Tensor: ...


@overload
def column_linear(
    x: torch.Tensor, weight: Sequence[torch.Tensor], bias: Sequence[torch.Tensor | None] | None = None, *,
    main_grad: Sequence[torch.Tensor] | None = None, group: GroupLike = None, config: GemmArConfig | None = None,
) -> list[torch.Tensor]: ...


def column_linear(
    x: torch.Tensor, weight: Any, bias: Any = None, *, main_grad: Any = None, group: GroupLike = None,
    config: GemmArConfig | None = None,
) -> Any:
    """Multiply a replicated x by ``weight.T``. In the backward, all-reduce the gradient of x while it is computed.

    It is the column-parallel layer of tensor parallelism without sequence parallelism, and ``gemm_ar`` is the
    row-parallel one.

    Args:
        x: [M, K] in bf16, fp16 or fp32, equal on all ranks. Further leading dimensions are flattened and restored:
            [B, S, K] gives [B, S, N / W].
        weight: This rank's rows of the full weight, [N / W, K] as in torch.nn.Linear, in the dtype of x. Or a list of
            weights [N_i / W, K], such as those of q, k and v: the backward has one all-reduce for all of them.
        bias: [N / W] in the dtype of x, or None. For a list of weights, a list of the same length, or None.
        main_grad: A tensor with the shape of weight, in fp32 or in the dtype of weight, or None. The backward adds
            dweight to it in the GEMM, and weight gets no gradient: the fused gradient accumulation of Megatron-LM. For
            a list of weights, a list of the same length; all of the weights must then need a gradient.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the default group (W ranks).
        config: GemmArConfig, the same on all ranks: a ``gemm_ar`` of dy [M, N / W] and the transposed weight computes
            dx. None uses the best known config of that (see tdkernels.autotune), or overlaps the all-reduce with both
            GEMMs of the backward, if they are large.

    Returns:
        y [M, N / W] in the dtype of x, as computed by ``torch.nn.functional.linear``, or by ``group_gemm`` in the
        batch-invariant mode; for a list of weights, a list of
        outputs.

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
    weights, biases = as_lists("column_linear", weight, bias)
    x, *others = autograd.apply_autocast(x, *weights, *biases)
    weights, biases = others[: len(weights)], others[len(weights) :]
    for one, its_bias in zip(weights, biases, strict=True):
        validation.check_operands("column_linear", x, one, its_bias)
    main_grads = main_grads_of("column_linear", weight, main_grad, weights)
    check_config("column_linear", config, GemmArConfig, x)
    if autograd.may_be_differentiated((x, *weights, *biases)):
        rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
        settings = group.group_name, as_argument(config), main_grads, len(weights)
        results = _ColumnLinear.apply(rows, *settings, *weights, *biases)
        ys = [y.view(*x.shape[:-1], y.shape[1]) for y in results]
    else:
        ys = [linear(x, *one) for one in zip(weights, biases, strict=True)]
    return ys if isinstance(weight, LISTS) else ys[0]
