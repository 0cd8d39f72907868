"""Validation of the arguments of operators, before anything is launched. Errors name the argument and its shape."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tdkernels.runtime.autograd import DEVICES

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int32, torch.int64)


def shape_of(tensor: torch.Tensor) -> list[int]:
    """Return the shape for error messages."""
    return list(tensor.shape)


def _supported(dtypes):
    """Return the beginning of "a, b and c are supported"."""
    *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(others)} and {last} are" if others else f"{last} is"


def check_tensor(
    operator: str, name: str, value: Any, dtypes: Sequence[torch.dtype] | None = None,
    like: torch.Tensor | None = None, like_name: str = "x", words: str | None = None, memory: bool = True,
) -> None:
    """Raise an error if an argument is not a tensor, or not a supported one.

    Args:
        operator: The operator, for errors.
        name: Name of the argument, for errors.
        value: The argument.
        dtypes: The supported dtypes, described by ``words`` in errors. None: all dtypes.
        like: Another argument, with the name ``like_name``. ``value`` must be on the same device.
        like_name: See ``like``.
        words: See ``dtypes``.
        memory: Whether the tensor must be dense and store its values itself. False if the tensor goes through torch's
            dispatcher, which ensures this.

    Raises:
        TypeError: If it is not a tensor, or has an unsupported layout, class or dtype.
        ValueError: If it is on another device than ``like``.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{operator}: {name} must be a torch.Tensor, not {type(value).__name__}")
    if memory:
        if value.layout != torch.strided:
            raise TypeError(f"{operator}: {name} must be a plain dense tensor, not {value.layout}")
        reject_tensor_subclasses(operator, name, value)
    elif not torch.compiler.is_compiling():
        _reject_dtensor(operator, name, value)
    if dtypes is not None and value.dtype not in dtypes:
        raise TypeError(f"{operator}: {name} is {value.dtype}; {words or _supported(dtypes)} supported")
    if like is not None and value.device != like.device:
        raise ValueError(f"{operator}: {like_name} is on {like.device} but {name} is on {value.device}")


def check_wire_format(operator: str, name: str, value: Any) -> None:
    """Raise ValueError unless an argument is "fp8", the only format for compressed transfers."""
    if type(value) is not str or value != "fp8":
        raise ValueError(f'{operator}: {name} must be None or "fp8", not {value!r}')


def reject_tensor_subclasses(operator: str, name: str, tensor: torch.Tensor) -> None:
    """Raise an error for a tensor whose memory does not store its values, such as a DTensor or a negated view.

    For operators that do not go through torch's dispatcher: they read the memory. The dispatcher resolves such tensors.

    Raises:
        TypeError: If the tensor is a DTensor or a negated view.
        RuntimeError: In a transform of torch.func, whose tensors have no memory.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{operator}: transforms of torch.func (functorch) are not supported")
    _reject_dtensor(operator, name, tensor)
    if tensor.is_neg():
        raise TypeError(f"{operator}: {name} {shape_of(tensor)} is a view that negates its memory; pass resolve_neg()")


def _reject_dtensor(operator, name, tensor):
    """Raise TypeError for a DTensor: its shape is the global shape."""
    if hasattr(tensor, "to_local"):
        raise TypeError(f"{operator}: {name} {shape_of(tensor)} is a {type(tensor).__name__}; pass its to_local()")


def check_device(operator: str, name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError if a tensor is on an unsupported device."""
    if tensor.device.type not in DEVICES:
        raise ValueError(f"{operator}: {name} is on {tensor.device}; cpu and cuda (NVIDIA, AMD) are supported")


def check_rows(operator: str, name: str, x: Any, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    """Raise an error if an argument is not a tensor [rows, H] with H > 0."""
    check_tensor(operator, name, x, dtypes)
    check_device(operator, name, x)
    if x.dim() != 2:
        raise ValueError(f"{operator}: {name} must have 2 dimensions [rows, H], its shape is {shape_of(x)}")
    if x.shape[1] == 0:
        raise ValueError(f"{operator}: {name} {shape_of(x)} has empty rows")


def check_floats(operator: str, tensors: Mapping[str, Any], memory: bool = False) -> None:
    """Raise an error unless all arguments are floating-point tensors with the dtype and device of the first one.

    Args:
        operator: The operator, for errors.
        tensors: The arguments by name.
        memory: As for ``check_tensor``.
    """
    (first_name, first), *_ = tensors.items()
    for name, tensor in tensors.items():
        check_tensor(operator, name, tensor, DTYPES, first, first_name, memory=memory)
        if tensor.dtype != first.dtype:
            raise TypeError(f"{operator}: {first_name} is {first.dtype} but {name} is {tensor.dtype}")
    check_device(operator, first_name, first)


def check_weight(operator: str, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise ValueError unless weight is [N, K] without an empty dimension, and bias is [N] or None."""
    if weight.dim() != 2:
        raise ValueError(f"{operator}: weight must have 2 dimensions [N, K], its shape is {shape_of(weight)}")
    if weight.shape[0] == 0 or weight.shape[1] == 0:
        raise ValueError(f"{operator}: weight {shape_of(weight)} has an empty dimension")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{operator}: bias {shape_of(bias)} must have one element for each row of weight {shape_of(weight)}"
        )


def check_operands(operator: str, x: Any, weight: Any, bias: Any) -> None:
    """Raise TypeError or ValueError, with the argument and its shape, unless x @ weight.T + bias is valid."""
    check_floats(operator, {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias}))
    check_shapes(operator, x, weight, bias)


def check_shapes(operator: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise ValueError, with the argument and its shape, unless the shapes of x @ weight.T + bias fit."""
    if x.dim() < 2:
        raise ValueError(f"{operator}: x must have at least 2 dimensions [rows, K], its shape is {shape_of(x)}")
    if weight.dim() == 2 and x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{operator}: the last dimension of x {shape_of(x)} and of weight {shape_of(weight)} must be the same K"
        )
    check_weight(operator, weight, bias)
