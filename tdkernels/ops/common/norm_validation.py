"""Validation of the arguments that all operators with a residual addition and a norm share."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tdkernels.ops.common import validation
from tdkernels.ops.common.validation import shape_of
from tdkernels.runtime import autograd

_NAMES = {"residual": "residual", "weight": "weight", "bias": "bias"}


def check_dense(operator: str, name: str, tensor: torch.Tensor) -> None:
    """Raise TypeError if a tensor is sparse or quantized."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else tensor.layout
        raise TypeError(f"{operator}: {name} must be a plain dense tensor, not {kind}")


def check_norm(
    operator: str, shape: torch.Size, x: torch.Tensor, residual: Any, weight: Any, bias: Any, eps: Any,
    names: Mapping[str, str] = _NAMES,
) -> None:
    """Raise TypeError or ValueError unless residual, weight, bias and eps are valid.

    Args:
        operator: The operator, for errors.
        shape: Shape of the rows to be normalized, [..., hidden].
        x: A validated operand, with the dtype and device of the rows.
        residual: Must have this shape, or be None.
        weight: Must be [hidden], in the dtype of x or fp32.
        bias: Must be [hidden], in the dtype of weight, or None.
        eps: Must be a finite number of at least 0.
        names: Names of the arguments residual, weight and bias, for errors.
    """
    if residual is not None:
        validation.check_tensor(operator, names["residual"], residual, (x.dtype,), like=x, memory=False)
        check_dense(operator, names["residual"], residual)
        if residual.shape != shape:
            raise ValueError(f"{operator}: {names['residual']} {shape_of(residual)} must be {list(shape)}")
    dtypes = (x.dtype,) if x.dtype == torch.float32 else (x.dtype, torch.float32)
    for key, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None and key == "bias":
            continue
        supported = dtypes if key == "weight" else (weight.dtype,)
        validation.check_tensor(operator, names[key], tensor, supported, like=x, memory=False)
        check_dense(operator, names[key], tensor)
        if tensor.shape != shape[-1:]:
            raise ValueError(
                f"{operator}: {names[key]} {shape_of(tensor)} must be [{shape[-1]}] for rows of {shape[-1]} elements"
            )
    if type(eps) not in (int, float) or not 0 <= eps < math.inf:
        raise ValueError(f"{operator}: eps must be a finite number of at least 0, not {eps!r}")


def check_quantize(operator: str, quantize: Any, operands: Iterable[torch.Tensor | None]) -> None:
    """Raise an error unless ``quantize`` is None, or "fp8" with operands that need no gradient.

    Raises:
        ValueError: If it is another value.
        RuntimeError: If an operand needs a gradient: a quantized result has none.
    """
    if quantize is None:
        return
    validation.check_wire_format(operator, "quantize", quantize)
    if autograd.may_be_differentiated(operands):
        raise RuntimeError(f'{operator}: quantize="{quantize}" has no gradient; call it under torch.no_grad()')
