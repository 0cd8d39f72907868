"""Checks of what a user passes to the Ulysses projections, before anything is launched."""

import torch

from tdkernels.ops.common.validation import DTYPES
from tdkernels.runtime.autograd import DEVICES


def _shape(tensor):
    return list(tensor.shape)


def _check_tensor(operator, name, tensor, first, first_name):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{operator}: {name} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{operator}: {name} is {tensor.dtype}; bfloat16, float16 and float32 are supported")
    if tensor.dtype != first.dtype:
        raise TypeError(f"{operator}: {first_name} is {first.dtype} but {name} is {tensor.dtype}")
    if tensor.device != first.device:
        raise ValueError(f"{operator}: {first_name} is on {first.device} but {name} is on {tensor.device}")


def check_product(operator, name, rows, weight, bias, divided_by):
    """Raise unless rows @ weight.T + bias makes sense, where rows have one of ``divided_by`` parts of the columns."""
    for each, tensor in ((name, rows), ("weight", weight), ("bias", bias)):
        if tensor is not None or each != "bias":
            _check_tensor(operator, each, tensor, rows, name)
    if rows.device.type not in DEVICES:
        raise ValueError(f"{operator}: {name} is on {rows.device}; cpu and cuda (NVIDIA, AMD) are supported")
    columns = "K" if divided_by == 1 else "K / W"
    if rows.dim() < 2:
        raise ValueError(
            f"{operator}: {name} must have at least 2 dimensions [positions, {columns}], its shape is {_shape(rows)}"
        )
    if weight.dim() != 2:
        raise ValueError(f"{operator}: weight must have 2 dimensions [N, K], its shape is {_shape(weight)}")
    if weight.shape[0] == 0 or weight.shape[1] == 0:
        raise ValueError(f"{operator}: weight {_shape(weight)} has an empty dimension")
    if rows.shape[-1] * divided_by != weight.shape[1]:
        times = "" if divided_by == 1 else f", times the group's {divided_by} ranks,"
        raise ValueError(
            f"{operator}: the last dimension of {name} {_shape(rows)}{times} must be the K of weight {_shape(weight)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{operator}: bias {_shape(bias)} must have one element for each row of weight {_shape(weight)}"
        )


def check_divided(operator, name, tensor, dimension, size, world_size):
    """Raise unless a dimension, which is called ``size``, can be divided between the ranks."""
    if tensor.shape[dimension] % world_size:
        raise ValueError(
            f"{operator}: {size} = {tensor.shape[dimension]} of {name} {_shape(tensor)} must be divisible by the "
            f"group's {world_size} ranks"
        )
