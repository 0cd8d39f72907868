"""What autograd and autocast ask of an operator: whether it has to go through them, and how gradients go back."""

import torch
from torch.autograd import forward_ad

DEVICES = ("cpu", "cuda")  # AMD's are called cuda too


def reject_second_derivatives(operator):
    """Raise in a backward that is to be differentiated itself: autograd would leave terms out with a mere warning."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{operator}: second derivatives (create_graph=True) are not supported")


def apply(function, op, *call):
    """``op`` of a call, through its autograd Function only where a gradient may be asked for: that takes time."""
    tensors = [arg for arg in call if isinstance(arg, torch.Tensor)]
    return function.apply(*call) if may_be_differentiated(tensors) else op(*call)


def may_be_differentiated(tensors):
    """Whether autograd has to hear of an operation, be it only to refuse forward mode and functorch's transforms.

    Args:
        tensors: the operands, None among them
    """
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return True
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def apply_autocast(x, *others):
    """The operands as ``torch.matmul`` would take them under ``torch.autocast``."""
    known = isinstance(x, torch.Tensor) and x.device.type in DEVICES  # what is not is refused by check_operands
    if known and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        floats = [isinstance(t, torch.Tensor) and t.is_floating_point() for t in (x, *others)]
        return tuple(t.to(dtype) if is_float else t for t, is_float in zip((x, *others), floats, strict=True))
    return (x, *others)


# ---- gradients through torch.library, which has no None: what is not wanted is an empty tensor ----


def pack_gradients(gradients, operands, wanted):
    """What an operator gives: gradients like their operands, contiguous, each another tensor; empty if not wanted."""
    triples = zip(gradients, operands, wanted, strict=True)
    return tuple(dx.to(x.dtype).contiguous() if wants else x.new_empty(0) for dx, x, wants in triples)


def fake_gradients(operands, wanted):
    """What its fake implementation gives, and what it gives itself of operands that are empty."""
    return tuple(x.new_empty(x.shape if wants else (0,)) for x, wants in zip(operands, wanted, strict=True))


def unpack_gradients(gradients, wanted):
    """What a backward returns for them."""
    return [dx if wants else None for dx, wants in zip(gradients, wanted, strict=True)]
