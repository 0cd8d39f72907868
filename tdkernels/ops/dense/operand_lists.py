"""Operators that take one weight or a list of weights for the same x: arguments, and gradients of the list.

In the backward the gradients of the outputs are concatenated, and so are the weights. So dx is one GEMM with one
collective, and dweight is one GEMM.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tdkernels.ops.dense.weight_gradient import check_main_grad, returned_gradient

LISTS = (list, tuple)


def as_lists(operator: str, weight: Any, bias: Any) -> tuple[list[Any], list[Any]]:
    """Return the arguments weight and bias of an operator as lists of equal length.

    Raises:
        TypeError: If only one of them is a list.
        ValueError: If the list of weights is empty or the lists differ in length.
    """
    if not isinstance(weight, LISTS):
        if isinstance(bias, LISTS):
            raise TypeError(f"{operator}: bias is a list, so weight must be a list of the same length")
        return [weight], [bias]
    if not weight:
        raise ValueError(f"{operator}: the list of weights is empty")
    if bias is None:
        return list(weight), [None] * len(weight)
    if not isinstance(bias, LISTS):
        raise TypeError(f"{operator}: weight is a list, so bias must be a list or None, not {type(bias).__name__}")
    if len(bias) != len(weight):
        raise ValueError(f"{operator}: there are {len(weight)} weights but {len(bias)} biases")
    return list(weight), list(bias)


def main_grads_of(operator: str, weight: Any, main_grad: Any, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the argument main_grad of an operator as a list, empty for None; ``weights`` is weight as a list.

    Raises:
        TypeError, ValueError: If it does not fit the weights.
    """
    if main_grad is None:
        return []
    several = isinstance(weight, LISTS)
    if several != isinstance(main_grad, LISTS):
        raise TypeError(f"{operator}: main_grad must be a list if weight is a list, and only then")
    main_grads = list(main_grad) if several else [main_grad]
    if len(main_grads) != len(weights):
        raise ValueError(f"{operator}: there are {len(weights)} weights but {len(main_grads)} tensors in main_grad")
    if any(one is None for one in main_grads):
        raise TypeError(f"{operator}: main_grad must be None or contain a tensor for each weight")
    for one, its_main_grad in zip(weights, main_grads, strict=True):
        check_main_grad(operator, one, its_main_grad)
    need = [one.requires_grad for one in weights]
    if any(need) and not all(need):
        raise ValueError(f"{operator}: main_grad is given, but weight {need.index(False)} needs no gradient")
    return main_grads


def joined(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenate tensors; return a single tensor as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


# ---- backward ----


def without_none(
    dys: Sequence[torch.Tensor | None], x: torch.Tensor, weights: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the gradients of the outputs with zeros in place of None; an empty list if all are None."""
    rows = next((dy.shape[0] for dy in dys if dy is not None), None)
    if rows is None:
        return []
    return [x.new_zeros(rows, w.shape[0]) if dy is None else dy for dy, w in zip(dys, weights, strict=True)]


def divided(
    dweight: torch.Tensor, weights: Sequence[torch.Tensor], needed: Sequence[bool], main_grads: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return the gradients of the weights for autograd: None for those that are not needed.

    Args:
        dweight: The gradient of the concatenated weights; empty if it was added to ``main_grads``.
        weights: The weights.
        needed: Whether each of them needs a gradient.
        main_grads: See ``weight_gradient``.
    """
    if not any(needed):
        return [None] * len(weights)
    if len(main_grads):
        return [returned_gradient(None, weight, accumulated=True) for weight in weights]
    parts = dweight.split([weight.shape[0] for weight in weights])
    return [part if need else None for part, need in zip(parts, needed, strict=True)]


def bias_gradients(dys: Sequence[torch.Tensor], needed: Sequence[bool]) -> list[torch.Tensor | None]:
    """Return the gradients of the biases for autograd: the sums of ``dys`` over the rows, or None if not needed."""
    return [
        dy.sum(0, dtype=torch.float32).to(dy.dtype) if need else None for dy, need in zip(dys, needed, strict=True)
    ]
