"""Gradients of weights: left.T @ right, returned or added to an accumulator, which Megatron-LM calls ``main_grad``.

A training step with several microbatches sums the gradients of a bf16 weight in fp32. If the GEMM adds its product to
the sum, the product is neither written in bf16 nor read again.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tdkernels.ops.common.validation import check_tensor, shape_of
from tdkernels.runtime import torch_op


def check_main_grad(operator: str, weight: torch.Tensor, main_grad: Any) -> None:
    """Raise TypeError or ValueError unless ``main_grad`` is None or can accumulate the gradient of ``weight``."""
    if main_grad is None:
        return
    check_tensor(operator, "main_grad", main_grad, (torch.float32, weight.dtype), weight, "weight")
    if main_grad.shape != weight.shape:
        raise ValueError(
            f"{operator}: main_grad {shape_of(main_grad)} must have the shape of weight {shape_of(weight)}"
        )
    if main_grad.requires_grad:
        raise ValueError(f"{operator}: main_grad {shape_of(main_grad)} must not require a gradient")


def as_list(main_grad: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the argument ``main_grad`` of an operator with one weight as a list: empty for None."""
    return [] if main_grad is None else [main_grad]


def weight_gradient(
    left: torch.Tensor, right: torch.Tensor, main_grads: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """Return left.T @ right, or add it to ``main_grads`` and return an empty tensor.

    Args:
        left: [rows, N].
        right: [rows, K].
        main_grads: Accumulators [N_i, K], whose N_i sum to N: the rows of the product are divided between them. Empty:
            the product [N, K] is returned in the dtype of the operands.
    """
    if not main_grads:
        return left.t() @ right
    for main_grad, columns in zip(main_grads, left.split([one.shape[0] for one in main_grads], 1), strict=True):
        _accumulate(main_grad, columns, right)
    return right.new_empty(0)


def _accumulate(main_grad, left, right):
    """Compute main_grad += left.T @ right, rounded once to the dtype of ``main_grad``."""
    if main_grad.dtype == left.dtype:
        main_grad.addmm_(left.t(), right)
    elif main_grad.device.type == "cuda":
        torch.addmm(main_grad, left.t(), right, out_dtype=main_grad.dtype, out=main_grad)
    else:
        main_grad.addmm_(left.t().to(main_grad.dtype), right.to(main_grad.dtype))


def _accumulate_product(main_grads, left, right):
    weight_gradient(left, right, main_grads)


def returned_gradient(dweight: torch.Tensor | None, weight: torch.Tensor, accumulated: bool) -> torch.Tensor | None:
    """Return the gradient of ``weight`` for autograd.

    It is ``dweight``, or None if that has been added to an accumulator. The gradient hooks of Megatron-LM run only if
    there is a gradient. So if the weight has Megatron-LM's attribute ``grad_added_to_main_grad``, it is set to True and
    a placeholder is returned. The placeholder is zero if the attribute ``zero_out_wgrad`` is true, otherwise undefined.
    """
    if not accumulated:
        return dweight
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


# torch.compile traces the backward of gemm_ar. It cannot trace a GEMM whose result has another dtype.
torch_op.register(
    "accumulate_weight_gradient(Tensor(a!)[] main_grads, Tensor left, Tensor right) -> ()",
    _accumulate_product,
    lambda main_grads, left, right: None,
)


def local_weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, main_grads: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """Return the gradient dy.T @ x of ``weight`` for autograd, in a backward that is no torch.library op."""
    if not main_grads:
        return dy.t() @ x
    torch.ops.tdkernels.accumulate_weight_gradient(main_grads, dy, x)
    return returned_gradient(None, weight, accumulated=True)
