"""How the operands of a matrix product lie in memory, and what a kernel is given of them."""

import torch
import torch.nn.functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels.ops.common.gemm_tile import Product
from tdkernels.runtime.gpu import has_tma
from tdkernels.runtime.kernel_launch import bind_uncopied, launch_cached


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


def compiled_for(x, weight, bias, tiles):
    """The Product that a kernel of x @ weight.T is compiled for."""
    weight, stride_w, is_kn = weight_layout(weight)
    return Product(
        tiles.block_m, tiles.block_n, tiles.block_k, x.element_size(), aligned(*weight.shape, stride_w),
        bias is not None, tma_fits(x, weight), is_kn, dot_precision(x.dtype),
    )


def rows_descriptor(x, planes, rows, plane_stride, block_m, block_k):
    """Descriptor of [planes, rows, K] over the storage that begins at x."""
    k = x.shape[-1]
    return TensorDescriptor(x, [planes, rows, k], [plane_stride, k, 1], [1, block_m, block_k])


def weight_descriptor(weight, is_kn, block_n, block_k):
    if is_kn:
        return TensorDescriptor(weight, list(reversed(weight.shape)), [weight.stride(1), 1], [block_k, block_n])
    return TensorDescriptor(weight, list(weight.shape), [weight.stride(0), 1], [block_n, block_k])


def product_descriptors(x, weight, product):
    """Descriptors of x and weight for a kernel that is compiled for a Product; (None, None) if it uses none."""
    if not product.use_tma:
        return None, None
    rows, k = x.shape
    return (
        rows_descriptor(x, 1, rows, rows * k, product.block_m, product.block_k),
        weight_descriptor(weight, product.w_is_kn, product.block_n, product.block_k),
    )


def product(x, weight, bias, tiles, by_tma=True):
    """Return what a kernel of x @ weight.T takes: (weight, its row stride, descriptors of x and weight, constants)."""
    weight, stride_w, _ = weight_layout(weight)
    constants = compiled_for(x, weight, bias, tiles)
    constants = constants._replace(use_tma=constants.use_tma and by_tma)
    return weight, stride_w, *product_descriptors(x, weight, constants), {"PRODUCT": constants, **tiles.options()}


def dot_precision(dtype):
    """How tl.dot multiplies fp32: as exactly as torch.matmul does under its current setting."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" and not torch.version.hip:
        return "tf32"
    return "ieee"


def launch_product(workspace, x, weight, bias, config, prepare):
    """``launch_cached`` of a dense operator.

    Args:
        prepare: (workspace, x, weight, bias, config) -> Launch, for operands that are ``ready``
    """
    return launch_cached(*_product_call(workspace, x, weight, bias, config, prepare))


def bind_product(workspace, x, weight, bias, config, prepare):
    """The Launch of ``launch_product`` with these operands, or None if one of them has to be copied first."""
    return bind_uncopied((x, weight, bias), *_product_call(workspace, x, weight, bias, config, prepare))


def _product_call(workspace, x, weight, bias, config, prepare):
    key = config, dot_precision(x.dtype)
    return workspace, key, (x, weight, bias), lambda *of: prepare(workspace, *of, config), ready
