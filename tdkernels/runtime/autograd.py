"""Helpers for autograd and autocast: decide whether an operator must go through them, and pack optional gradients."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

DEVICES = ("cpu", "cuda")  # AMD GPUs are "cuda", too


def reject_second_derivatives(operator: str) -> None:
    """Raise an error in a backward pass that is to be differentiated itself.

    Autograd would leave out terms and only warn.

    Raises:
        RuntimeError: if gradients are enabled in the backward pass (``create_graph=True``).
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{operator}: second derivatives (create_graph=True) are not supported")


def apply(
    function: type[torch.autograd.Function], op: Callable[..., Any], *call: Any, for_backward: Iterable[Any] = ()
) -> Any:
    """Call ``op``, through its autograd Function only if a gradient may be needed: the Function takes host time.

    Args:
        function: the autograd Function around ``op``.
        op: the operator.
        call: the arguments of both.
        for_backward: further arguments of ``function``.
    """
    tensors = [arg for arg in call if isinstance(arg, torch.Tensor)]
    return function.apply(*call, *for_backward) if may_be_differentiated(tensors) else op(*call)


def may_be_differentiated(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Return whether autograd must see an operation.

    This includes forward mode and functorch's transforms, which the autograd Function rejects.

    Args:
        tensors: the operands; entries may be None.
    """
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return True
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def apply_autocast(x: torch.Tensor, *others: Any) -> tuple[Any, ...]:
    """Return the operands as ``torch.matmul`` would convert them under ``torch.autocast``."""
    known = isinstance(x, torch.Tensor) and x.device.type in DEVICES  # check_operands rejects other operands
    if known and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        floats = [isinstance(t, torch.Tensor) and t.is_floating_point() for t in (x, *others)]
        return tuple(t.to(dtype) if is_float else t for t, is_float in zip((x, *others), floats, strict=True))
    return (x, *others)


def clear_unwritten_rows(gradient: torch.Tensor | None, splits: torch.Tensor) -> None:
    """With ``torch.autograd.detect_anomaly``, set the rows of a gradient that belong to no group to zero.

    Kernels do not write these rows, and nothing reads them, but that mode reports NaN in them. In a graph of
    torch.compile they stay as they are.

    Args:
        gradient: Rows sorted by group, [R, K], or None.
        splits: Number of rows of each group.
    """
    if gradient is not None and not torch.compiler.is_compiling() and torch.is_anomaly_enabled():
        rows = torch.arange(gradient.shape[0], device=gradient.device)
        gradient.masked_fill_((rows >= splits.sum()).unsqueeze(1), 0.0)


# ---- optional gradients through torch.library, which has no None: an unneeded gradient is an empty tensor ----


def pack_gradients(
    gradients: Iterable[Any], operands: Iterable[torch.Tensor], wanted: Iterable[bool]
) -> tuple[torch.Tensor, ...]:
    """Return the gradients as the outputs of a torch.library op: an empty tensor for each unneeded gradient.

    The others have the dtype of their operand and are contiguous. Every output is a separate tensor.
    """
    triples = zip(gradients, operands, wanted, strict=True)
    return tuple(dx.to(x.dtype).contiguous() if wants else x.new_empty(0) for dx, x, wants in triples)


def fake_gradients(operands: Iterable[torch.Tensor], wanted: Iterable[bool]) -> tuple[torch.Tensor, ...]:
    """Return uninitialized gradients, for the fake implementation of an op and for an op with empty operands."""
    return tuple(x.new_empty(x.shape if wants else (0,)) for x, wants in zip(operands, wanted, strict=True))


def unpack_gradients(gradients: Iterable[torch.Tensor], wanted: Iterable[bool]) -> list[torch.Tensor | None]:
    """Return the gradients of ``pack_gradients`` for autograd: None for each unneeded gradient."""
    return [dx if wants else None for dx, wants in zip(gradients, wanted, strict=True)]
