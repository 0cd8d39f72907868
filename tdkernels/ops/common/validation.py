"""Checks of what a user passes to an operator, before anything is launched. All errors name the argument."""

import torch

from tdkernels.runtime.autograd import DEVICES

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int32, torch.int64)


def shape_of(tensor):
    """Return the shape as errors show it."""
    return list(tensor.shape)


def _supported(dtypes):
    *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(others)} and {last} are" if others else f"{last} is"


def check_tensor(operator, name, value, dtypes=None, like=None, like_name="x", words=None, memory=True):
    """Raise TypeError or ValueError unless an argument is a tensor that fits.

    Args:
        dtypes: those that are supported, ``words`` in an error; None: all
        like: the argument, called ``like_name``, on whose device it must be
        memory: whether it must be dense and hold its values itself, which torch's dispatcher otherwise sees to
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


def reject_tensor_subclasses(operator, name, tensor):
    """Raise TypeError for a tensor with values that its memory does not hold, where torch does not see to that itself.

    It does for what goes through its dispatcher. Other operators would read what is there. RuntimeError in a transform
    of torch.func, whose tensors have no memory.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{operator}: transforms of torch.func (functorch) are not supported")
    _reject_dtensor(operator, name, tensor)
    if tensor.is_neg():
        raise TypeError(f"{operator}: {name} {shape_of(tensor)} is a view that negates its memory; pass resolve_neg()")


def _reject_dtensor(operator, name, tensor):
    """Raise TypeError for a DTensor, whose shape is that of all ranks."""
    if hasattr(tensor, "to_local"):
        raise TypeError(f"{operator}: {name} {shape_of(tensor)} is a {type(tensor).__name__}; pass its to_local()")


def check_device(operator, name, tensor):
    if tensor.device.type not in DEVICES:
        raise ValueError(f"{operator}: {name} is on {tensor.device}; cpu and cuda (NVIDIA, AMD) are supported")


def check_rows(operator, name, x, dtypes=DTYPES):
    """A tensor of [rows, H], H not 0."""
    check_tensor(operator, name, x, dtypes)
    check_device(operator, name, x)
    if x.dim() != 2:
        raise ValueError(f"{operator}: {name} must have 2 dimensions [rows, H], its shape is {shape_of(x)}")
    if x.shape[1] == 0:
        raise ValueError(f"{operator}: {name} {shape_of(x)} has empty rows")


def check_floats(operator, tensors, memory=False):
    """Tensors by their names, all of the first one's dtype and device; ``memory`` as for ``check_tensor``."""
    (first_name, first), *_ = tensors.items()
    for name, tensor in tensors.items():
        check_tensor(operator, name, tensor, DTYPES, first, first_name, memory=memory)
        if tensor.dtype != first.dtype:
            raise TypeError(f"{operator}: {first_name} is {first.dtype} but {name} is {tensor.dtype}")
    check_device(operator, first_name, first)


def check_weight(operator, weight, bias):
    """weight [N, K], no dimension empty, and a bias [N] or None."""
    if weight.dim() != 2:
        raise ValueError(f"{operator}: weight must have 2 dimensions [N, K], its shape is {shape_of(weight)}")
    if weight.shape[0] == 0 or weight.shape[1] == 0:
        raise ValueError(f"{operator}: weight {shape_of(weight)} has an empty dimension")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{operator}: bias {shape_of(bias)} must have one element for each row of weight {shape_of(weight)}"
        )


def check_operands(operator, x, weight, bias):
    """Raise TypeError or ValueError, naming the argument and its shape, unless x @ weight.T + bias makes sense."""
    check_floats(operator, {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias}))
    if x.dim() < 2:
        raise ValueError(f"{operator}: x must have at least 2 dimensions [rows, K], its shape is {shape_of(x)}")
    if weight.dim() == 2 and x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{operator}: the last dimension of x {shape_of(x)} and of weight {shape_of(weight)} must be the same K"
        )
    check_weight(operator, weight, bias)
