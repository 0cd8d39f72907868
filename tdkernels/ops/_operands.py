"""Checks and layouts of what a user passes to a dense operator, before anything is launched."""

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d as c10d
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels.ops._device import has_tma

DEVICES = ("cpu", "cuda")  # AMD's are called cuda too
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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


def _shape(tensor):
    return list(tensor.shape)


def group_by_name(name):
    """The process group that an operator was called with, inside the torch.library op."""
    return c10d._resolve_process_group(name)


def world_size_by_name(name):
    return group_by_name(name).size()


def refuse_second_derivatives(operator):
    """Raise in a backward that is to be differentiated itself: autograd would leave terms out with a mere warning."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{operator}: second derivatives (create_graph=True) are not supported")


def apply(function, op, *call):
    """``op`` of a call, through its autograd Function only where a gradient may be asked for: that takes time."""
    tensors = [arg for arg in call if isinstance(arg, torch.Tensor)]
    return function.apply(*call) if may_be_differentiated(tensors) else op(*call)


def may_be_differentiated(tensors):
    """Whether autograd has to hear of an operation, be it only to refuse forward mode and functorch's transforms."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
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


def rows_contiguous(x):
    """x with contiguous rows that begin at a multiple of 16 bytes, as pushes and tensor descriptors need."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def widened(x, width):
    """x with a last dimension of ``width``, of zeros past its end; x itself where it has as many."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def ready(x, weight, bias):
    """The operands as launches take them: the same ones, unless one has to be copied."""
    return rows_contiguous(x), weight_layout(weight)[0], None if bias is None else bias.contiguous()


def lies_as_kn(weight):
    """Whether the weight's columns are contiguous and its rows are not: it lies as [K, N]."""
    n, k = weight.shape
    lies_as_nk = weight.stride(1) == 1 and weight.stride(0) >= k
    return not lies_as_nk and weight.stride(0) == 1 and weight.stride(1) >= n


def weight_layout(weight):
    """The weight, the stride of its rows, and whether it lies as [K, N] (True) or [N, K]; copied only if as neither."""
    if lies_as_kn(weight):
        return weight, weight.stride(1), True
    if weight.stride(1) != 1 or weight.stride(0) < weight.shape[1]:
        weight = weight.contiguous()
    return weight, weight.stride(0), False


def tma_fits(x, weight):
    """Whether tensor descriptors can be made for both operands on this device."""
    size = x.element_size()
    stride = max(weight.stride())
    aligned = x.shape[1] * size % 16 == 0 and stride * size % 16 == 0 and weight.data_ptr() % 16 == 0
    # The descriptor takes the shared-memory layout that wgmma wants for 16-bit types only.
    return has_tma(x.device) and aligned and size == 2 and min(weight.shape) > 1


def aligned(*sizes):
    """Whether every size is a multiple of 16 elements, which lets the compiler load and store in wide pieces."""
    return all(size % 16 == 0 for size in sizes)


def product_constants(x, weight, bias, tiles):
    """The constexpr arguments and launch options that the kernels of both dense operators take."""
    weight, stride_w, is_kn = weight_layout(weight)
    return {
        **tiles.constants(), "ELEM_BYTES": x.element_size(), "ALIGNED": aligned(*weight.shape, stride_w),
        "HAS_BIAS": bias is not None, "USE_TMA": tma_fits(x, weight), "W_IS_KN": is_kn,
        "PRECISION": dot_precision(x.dtype), **tiles.options(),
    }  # fmt: skip


def rows_descriptor(x, planes, rows, plane_stride, block_m, block_k):
    """Descriptor of [planes, rows, K] over the storage that begins at x."""
    k = x.shape[-1]
    return TensorDescriptor(x, [planes, rows, k], [plane_stride, k, 1], [1, block_m, block_k])


def weight_descriptor(weight, is_kn, block_n, block_k):
    if is_kn:
        return TensorDescriptor(weight, list(reversed(weight.shape)), [weight.stride(1), 1], [block_k, block_n])
    return TensorDescriptor(weight, list(weight.shape), [weight.stride(0), 1], [block_n, block_k])


def product_descriptors(x, weight, tiles, constants):
    """Descriptors of x and weight for kernels with these ``product_constants``; (None, None) where they use none."""
    if not constants["USE_TMA"]:
        return None, None
    rows, k = x.shape
    return (
        rows_descriptor(x, 1, rows, rows * k, tiles.block_m, tiles.block_k),
        weight_descriptor(weight, constants["W_IS_KN"], tiles.block_n, tiles.block_k),
    )


def product(x, weight, bias, tiles, by_tma=True):
    """What a kernel needs of x @ weight.T: (weight as it lies, its stride, descriptors of x and it, the constants)."""
    weight, stride_w, _ = weight_layout(weight)
    constants = product_constants(x, weight, bias, tiles)
    constants["USE_TMA"] &= by_tma
    return weight, stride_w, *product_descriptors(x, weight, tiles, constants), constants


def dot_precision(dtype):
    """How tl.dot multiplies fp32: as exactly as torch.matmul does under its current setting."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" and not torch.version.hip:
        return "tf32"
    return "ieee"
