"""Checks of the tensors that a user passes to an operator, before anything is launched."""

import torch

from tdkernels.runtime.autograd import DEVICES

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int32, torch.int64)


def check_operands(operator, x, weight, bias):
    """Raise TypeError or ValueError, naming the argument and its shape, unless x @ weight.T + bias makes sense."""
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is None and name == "bias":
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{operator}: {name} must be a torch.Tensor, not {type(tensor).__name__}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{operator}: {name} is {tensor.dtype}; bfloat16, float16 and float32 are supported")
        if tensor.dtype != x.dtype:
            raise TypeError(f"{operator}: x is {x.dtype} but {name} is {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"{operator}: x is on {x.device} but {name} is on {tensor.device}")
    if x.device.type not in DEVICES:
        raise ValueError(f"{operator}: x is on {x.device}; cpu and cuda (NVIDIA, AMD) are supported")
    if x.dim() < 2:
        raise ValueError(f"{operator}: x must have at least 2 dimensions [rows, K], its shape is {_shape(x)}")
    if weight.dim() != 2:
        raise ValueError(f"{operator}: weight must have 2 dimensions [N, K], its shape is {_shape(weight)}")
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{operator}: the last dimension of x {_shape(x)} and of weight {_shape(weight)} must be the same K"
        )
    if weight.shape[0] == 0 or weight.shape[1] == 0:
        raise ValueError(f"{operator}: weight {_shape(weight)} has an empty dimension")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{operator}: bias {_shape(bias)} must have one element for each row of weight {_shape(weight)}"
        )


def check_memory(operator, name, tensor):
    """Raise TypeError for a tensor with values that its memory does not hold, where torch does not see to that itself.

    It does for what goes through its dispatcher. Other operators would read what is there. RuntimeError in a transform
    of torch.func, whose tensors have no memory.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{operator}: transforms of torch.func (functorch) are not supported")
    if hasattr(tensor, "to_local"):
        raise TypeError(f"{operator}: {name} {_shape(tensor)} is a {type(tensor).__name__}; pass its to_local()")
    if tensor.is_neg():
        raise TypeError(f"{operator}: {name} {_shape(tensor)} is a view that negates its memory; pass resolve_neg()")


def check_tensor(operator, name, tensor, like=None):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{operator}: {name} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{operator}: {name} must be a plain dense tensor, not {tensor.layout}")
    check_memory(operator, name, tensor)
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{operator}: x is on {like.device} but {name} is on {tensor.device}")


def check_rows(operator, name, x, dtypes, dtype_words):
    check_tensor(operator, name, x)
    if x.dtype not in dtypes:
        raise TypeError(f"{operator}: {name} is {x.dtype}; {dtype_words} are supported")
    if x.device.type not in DEVICES:
        raise ValueError(f"{operator}: {name} is on {x.device}; cpu and cuda (NVIDIA, AMD) are supported")
    if x.dim() != 2:
        raise ValueError(f"{operator}: {name} must have 2 dimensions [rows, H], its shape is {_shape(x)}")
    if x.shape[1] == 0:
        raise ValueError(f"{operator}: {name} {_shape(x)} has empty rows")


def _shape(tensor):
    return list(tensor.shape)
