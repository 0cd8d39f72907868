"""Operands of a GEMM: memory layout, tensor descriptors and kernel arguments."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels.ops.common.gemm_tile import Product
from tdkernels.ops.common.scaling import Scales, out_dtype_of
from tdkernels.runtime.gpu import has_tma
from tdkernels.runtime.kernel_launch import bind_uncopied, launch_cached

if TYPE_CHECKING:
    from tdkernels.ops.common.tile_config import Tiles
    from tdkernels.runtime.kernel_launch import Launch
    from tdkernels.symm.workspace import Workspace


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy that is contiguous and 16-byte aligned, as pushes and tensor descriptors need."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def widened(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return x with its last dimension padded to ``width`` with zeros; x itself if it has this width."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def ready(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *scales: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Normalize operands: return the same tensors, or copies of those with a layout that the kernels do not support.

    ``scales``: those of x and of weight, for scaled operands.
    """
    weight = weight_layout(weight)[0]
    return rows_contiguous(x), weight, None if bias is None else bias.contiguous(), *map(rows_contiguous, scales)


def is_stored_kn(weight: torch.Tensor) -> bool:
    """Return whether the memory layout of a weight [N, K] is [K, N]: its columns are contiguous, its rows are not."""
    n, k = weight.shape
    lies_as_nk = weight.stride(1) == 1 and weight.stride(0) >= k
    return not lies_as_nk and weight.stride(0) == 1 and weight.stride(1) >= n


def weight_layout(weight: torch.Tensor) -> tuple[torch.Tensor, int, bool]:
    """Return (weight, stride, is_kn) of a weight [N, K]. It is copied if its layout is neither [N, K] nor [K, N].

    ``is_kn`` is whether the layout is [K, N]; ``stride`` is the distance between rows of the layout, in elements. A
    weight in fp8 is copied unless its layout is [N, K], because tensor cores read other layouts in 16-bit types only.
    """
    if is_stored_kn(weight) and weight.element_size() > 1:
        return weight, weight.stride(1), True
    if weight.stride(1) != 1 or weight.stride(0) < weight.shape[1]:
        weight = weight.contiguous()
    return weight, weight.stride(0), False


def tma_fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the kernel can read both operands through tensor descriptors (TMA) on this device."""
    size = x.element_size()
    stride = max(weight.stride())
    aligned = x.shape[1] * size % 16 == 0 and stride * size % 16 == 0 and weight.data_ptr() % 16 == 0
    # Only for types of at most 16 bits does the descriptor produce the shared-memory layout that wgmma needs.
    return has_tma(x.device) and aligned and size <= 2 and min(weight.shape) > 1


def aligned(*sizes: int) -> bool:
    """Return whether every size is a multiple of 16 elements; the compiler then uses wide loads and stores."""
    return all(size % 16 == 0 for size in sizes)


def compiled_for(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiles: "Tiles", scales: Scales | None = None
) -> Product:
    """Return the Product for which the kernel of x @ weight.T is compiled."""
    weight, stride_w, is_kn = weight_layout(weight)
    product = Product(
        tiles.block_m, tiles.block_n, tiles.block_k, x.element_size(), aligned(*weight.shape, stride_w),
        bias is not None, tma_fits(x, weight), is_kn, dot_precision(x.dtype), out_dtype_of(x, scales).itemsize,
    )
    if scales is None:
        return product
    imprecise_k = None if scales.use_fast_accum or scales.kind == "block" else tiles.block_k
    # The scale of a single row is row-wise, because ag_gemm gathers further rows.
    steps = int(scales.x.numel() > 1 or x.shape[0] == 1), int(scales.weight.numel() > 1)
    return product._replace(
        scaling=scales.kind, x_scale_step=steps[0], w_scale_step=steps[1], imprecise_k=imprecise_k
    )


def scale_pointers(scales: Scales | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the scales of x and of the weight as arguments of a kernel."""
    return (None, None) if scales is None else (scales.x, scales.weight)


def scale_operands(scales: Scales | None) -> tuple[torch.Tensor, ...]:
    """Return the scales of x and of the weight as further operands of a Launch, if there are any."""
    return () if scales is None else (scales.x, scales.weight)


def rows_descriptor(
    x: torch.Tensor, planes: int, rows: int, plane_stride: int, block_m: int, block_k: int
) -> TensorDescriptor:
    """Return a descriptor of [planes, rows, K] for memory that begins at x [..., K]; strides are in elements."""
    k = x.shape[-1]
    return TensorDescriptor(x, [planes, rows, k], [plane_stride, k, 1], [1, block_m, block_k])


def weight_descriptor(weight: torch.Tensor, is_kn: bool, block_n: int, block_k: int) -> TensorDescriptor:
    """Return a descriptor of a weight [N, K] in its memory layout, which is [K, N] if ``is_kn``."""
    if is_kn:
        return TensorDescriptor(weight, list(reversed(weight.shape)), [weight.stride(1), 1], [block_k, block_n])
    return TensorDescriptor(weight, list(weight.shape), [weight.stride(0), 1], [block_n, block_k])


def product_descriptors(
    x: torch.Tensor, weight: torch.Tensor, product: Product
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Return descriptors of x and weight for a kernel compiled for ``product``, or (None, None) without TMA."""
    if not product.use_tma:
        return None, None
    rows, k = x.shape
    return (
        rows_descriptor(x, 1, rows, rows * k, product.block_m, product.block_k),
        weight_descriptor(weight, product.w_is_kn, product.block_n, product.block_k),
    )


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiles: "Tiles", by_tma: bool = True,
    scales: Scales | None = None,
) -> tuple[torch.Tensor, int, TensorDescriptor | None, TensorDescriptor | None, dict[str, Any]]:
    """Return arguments for a kernel of x @ weight.T: (weight, its stride, descriptor of x, of weight, constants)."""
    weight, stride_w, _ = weight_layout(weight)
    constants = compiled_for(x, weight, bias, tiles, scales)
    constants = constants._replace(use_tma=constants.use_tma and by_tma)
    return weight, stride_w, *product_descriptors(x, weight, constants), {"PRODUCT": constants, **tiles.options()}


def products(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], tiles: "Tiles",
    scales: Scales | None = None,
) -> tuple[list[torch.Tensor], list[int], TensorDescriptor | None, list[TensorDescriptor | None], dict[str, Any]]:
    """Return arguments for a kernel of x @ weight.T for several weights.

    All weights have the same layout. The kernel is compiled for the properties that all of them have.

    Returns:
        (weights, their strides, descriptor of x, descriptors of the weights, constants).
    """
    each = [product(x, weight, bias, tiles, scales=scales) for weight, bias in zip(weights, biases, strict=True)]
    weights, strides, x_descs, w_descs, constants = map(list, zip(*each, strict=True))
    compiled = [one["PRODUCT"] for one in constants]
    common = compiled[0]._replace(
        aligned=all(one.aligned for one in compiled), use_tma=all(one.use_tma for one in compiled)
    )
    if not common.use_tma:
        x_descs, w_descs = [None], [None] * len(each)
    return weights, strides, x_descs[0], w_descs, {**constants[0], "PRODUCT": common}


def dot_precision(dtype: torch.dtype) -> str:
    """Return the ``input_precision`` of tl.dot that corresponds to torch's float32 matmul precision."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" and not torch.version.hip:
        return "tf32"
    return "ieee"


def launch_product(
    workspace: "Workspace", x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: Any,
    prepare: Callable[..., "Launch"], *more: Any, scales: Scales | None = None,
) -> list[torch.Tensor]:
    """Run ``launch_cached`` for a dense operator; return the tensors that the launch allocated, outputs first.

    Args:
        prepare: (workspace, x, weight, bias, config, *more) -> Launch, called with normalized operands (``ready``), and
            with the keyword argument ``scales`` if there are scales.
        more: Other properties of the launch.
        scales: The scales of scaled operands.
    """
    return launch_cached(*_product_call(workspace, x, weight, bias, config, prepare, more, scales))


def bind_product(
    workspace: "Workspace", x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: Any,
    prepare: Callable[..., "Launch"], *more: Any, scales: Scales | None = None,
) -> "Launch | None":
    """Return the Launch of ``launch_product`` for these operands, or None if one of them must be copied."""
    call = _product_call(workspace, x, weight, bias, config, prepare, more, scales)
    return bind_uncopied((x, weight, bias, *scale_operands(scales)), *call)


def _product_call(workspace, x, weight, bias, config, prepare, more, scales):
    key = config, dot_precision(x.dtype), *more
    if scales is None:
        return workspace, key, (x, weight, bias), lambda *of: prepare(workspace, *of, config, *more), ready

    def prepare_scaled(x, weight, bias, scale_x, scale_w):
        given = scales._replace(x=scale_x, weight=scale_w)
        return prepare(workspace, x, weight, bias, config, *more, scales=given)

    return workspace, (*key, scales.key), (x, weight, bias, scales.x, scales.weight), prepare_scaled, ready
