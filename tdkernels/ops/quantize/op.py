"""quantize_fp8: codes and scales of a matrix, or of its transpose.

    scaling      scale of x [rows, K]                                       reads of x
    "tensor"     one element                                                2, or 1 if it is given
    "row"        [rows, 1]                                                  1 if a row fits into registers, else 2
    "block"      [rows, ceil(K / 128)]; for a weight also per 128 rows      1

The scale of a group of elements is their largest magnitude over the largest value of the format. A code is the element
over its scale, rounded to nearest even. The results are those of IEEE divisions of fp32.
"""

from typing import Any

import torch

from tdkernels.ops.common import validation
from tdkernels.ops.common.fp8_codes import FP8_DTYPES
from tdkernels.ops.common.scaling import BLOCK, SCALINGS, quantize_ref
from tdkernels.ops.common.validation import shape_of
from tdkernels.ops.quantize import launch, launch_dequantize
from tdkernels.rounding import cdiv
from tdkernels.runtime import torch_op


def quantize_fp8_ref(
    x: torch.Tensor, scaling: str = "row", *, dtype: torch.dtype = torch.float8_e4m3fn, weight: bool = False,
    transpose: bool = False, scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``quantize_fp8`` in plain torch. Arguments as for ``quantize_fp8``.

    On a GPU torch divides by a number as it multiplies by its reciprocal, so the last bit of a scale may differ.
    """
    rows = x.reshape(-1, x.shape[-1])
    rows = rows.t() if transpose else rows
    if scale is None:
        codes, scale = quantize_ref(rows, scaling, dtype, weight)
    else:
        most = torch.finfo(dtype).max
        codes = torch.where(scale == 0, 0.0, rows.float() / scale).clamp(-most, most).to(dtype)
    if transpose or x.dim() == 2:
        return codes.contiguous(), scale
    leading = scale.numel() != 1 and scale.shape[0] == rows.shape[0] and not weight
    return codes.view(x.shape), scale.view(*x.shape[:-1], scale.shape[1]) if leading else scale


# ---- torch.library operators ----


def _tensor_scale(x, dtype):
    """Return the tensor-wise scale of x, [1, 1]. NaN if x has a NaN."""
    if not x.numel():
        return x.new_zeros(1, 1, dtype=torch.float32)
    largest = launch.largest_magnitude(x.reshape(-1, x.shape[-1])).view(1, 1)
    # Division by a number would be a multiplication on GPUs.
    return largest / torch.full_like(largest, torch.finfo(dtype).max)


def quantize_matrix(
    x: torch.Tensor, scaling: str, dtype: torch.dtype, weight: bool = False, transpose: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``quantize_fp8`` of a valid matrix [rows, K]. It does not check its arguments, and cannot be traced."""
    rows, k = x.shape[::-1] if transpose else x.shape
    if not x.numel():
        scale = x.new_zeros(launch.scale_shape(rows, k, scaling, weight), dtype=torch.float32)
        return x.new_empty(rows, k, dtype=dtype), scale
    if scaling == "tensor":
        return launch.by_tensor(x, dtype, transpose)
    if scaling == "row":
        return launch.by_row(x, dtype, transpose)
    return launch.by_block(x, dtype, weight, transpose)


def _fake_quantize(x, scaling, dtype, weight, transpose):
    rows, k = x.shape[::-1] if transpose else x.shape
    scale = x.new_empty(launch.scale_shape(rows, k, scaling, weight), dtype=torch.float32)
    return x.new_empty(rows, k, dtype=dtype), scale


def _quantize_by_scale(x, scale, dtype, transpose):
    if not x.numel():
        return _fake_quantize_by_scale(x, scale, dtype, transpose)
    return launch.by_given_scale(x, scale, dtype, transpose)


def _fake_quantize_by_scale(x, scale, dtype, transpose):
    return x.new_empty(x.shape[::-1] if transpose else x.shape, dtype=dtype)


torch_op.register(
    "quantize_fp8(Tensor x, str scaling, ScalarType dtype, bool weight, bool transpose) -> (Tensor, Tensor)",
    quantize_matrix,
    _fake_quantize,
)
torch_op.register(
    "quantize_fp8_by_scale(Tensor x, Tensor scale, ScalarType dtype, bool transpose) -> Tensor",
    _quantize_by_scale,
    _fake_quantize_by_scale,
)
torch_op.register(
    "tensor_scale_fp8(Tensor x, ScalarType dtype) -> Tensor",
    _tensor_scale,
    lambda x, dtype: x.new_empty(1, 1, dtype=torch.float32),
)


# ---- rows that were received in fp8 ----


def _dequantize_rows(codes, scale, dtype):
    if not codes.numel():
        return codes.new_empty(codes.shape, dtype=dtype)
    return launch_dequantize.rows_by_block(codes, scale, dtype)


torch_op.register(
    "dequantize_rows(Tensor codes, Tensor scale, ScalarType dtype) -> Tensor",
    _dequantize_rows,
    lambda codes, scale, dtype: codes.new_empty(codes.shape, dtype=dtype),
)


def dequantize_rows(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return codes [R, K] in float8_e4m3fn times their scales [R, ceil(K / 128)], in ``dtype``.

    The bits are those of ``dequantize`` in fp32, rounded to ``dtype``. The sign of a NaN is undefined.

    Raises:
        ValueError: If the shapes do not fit together.
    """
    rows, k = codes.shape
    if scale.shape != (rows, cdiv(k, BLOCK)):
        raise ValueError(f"dequantize_rows: scale {shape_of(scale)} must be [R, ceil(K / 128)] for {shape_of(codes)}")
    return torch.ops.tdkernels.dequantize_rows(codes, scale, dtype)


# ---- calls ----


def quantize_fp8(
    x: torch.Tensor, scaling: str = "row", *, dtype: torch.dtype = torch.float8_e4m3fn, weight: bool = False,
    transpose: bool = False, scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x to float8: x is approximately codes times scale.

    The results are operands of ``ag_gemm``, ``gemm_rs`` and ``gemm_ar``: pass the scale of x as ``scale_x``, and that
    of the weight as ``scale_w``.

    A scale is the largest magnitude of its elements over the largest value of ``dtype``, in fp32. A code is x / scale,
    rounded to nearest even.

    - If the scale is 0, because the elements are zeros or so small that the scale underflows, the codes are 0.
    - If a group has a NaN, its scale and all its codes are NaN. If it has an infinity and no NaN, its scale is
      infinite, the codes of infinities are NaN, and the others are 0. The sign of a NaN is undefined.
    - With a given ``scale``, larger quotients and infinities saturate at the largest value. NaN remains NaN.

    Args:
        x: [rows, K] in bf16, fp16 or fp32. Further leading dimensions are flattened and restored.
        scaling: "tensor": one scale. "row": one per row. "block": one per 128 elements of a row.
        dtype: torch.float8_e4m3fn, torch.float8_e5m2, or the "fnuz" formats that AMD's gfx942 multiplies.
        weight: With "block": whether a scale belongs to 128 × 128 elements, as for the weight of a GEMM. The leading
            dimensions of x are then flattened.
        transpose: Whether x.T is quantized, with a scale per row of x.T for "row". The backward of a linear layer needs
            the transposed weight.
        scale: With "tensor": the scale, fp32 with one element, such as one that the ranks have agreed on.

    Returns:
        (codes, scale). The codes have the shape of x, or [K, rows] with ``transpose``, and are contiguous. The scale is
        fp32: [1, 1] for "tensor" (``scale`` itself, if given), [rows, 1] for "row", [rows, ceil(K / 128)] for "block",
        [ceil(rows / 128), ceil(K / 128)] with ``weight``. With ``transpose``, rows and K are those of x.T. Leading
        dimensions of x are restored in scales per row.

    Gradient:
        None: autograd does not record the call.

    Raises:
        TypeError, ValueError: If an argument is invalid. Errors name the argument and its shape.

    Contract:
        Local. No host synchronization. Can be captured in a CUDA graph.

    Example:
        >>> x_codes, scale_x = tdkernels.quantize_fp8(x)
        >>> w_codes, scale_w = tdkernels.quantize_fp8(weight)
        >>> y = tdkernels.ag_gemm(x_codes, w_codes, scale_x=scale_x, scale_w=scale_w)
    """
    _check(x, scaling, dtype, weight, transpose, scale)
    rows = x.detach().reshape(x.shape[:-1].numel(), x.shape[-1])
    if scale is None:
        codes, scale = torch.ops.tdkernels.quantize_fp8(rows, scaling, dtype, weight, transpose)
        per_row = scaling != "tensor" and not weight and not transpose
        scale = scale.view(*x.shape[:-1], scale.shape[1]) if per_row else scale
    else:
        codes = torch.ops.tdkernels.quantize_fp8_by_scale(rows, scale.detach(), dtype, transpose)
    return codes if transpose else codes.view(x.shape), scale


def _check(x: Any, scaling: Any, dtype: Any, weight: Any, transpose: Any, scale: Any) -> None:
    """Raise TypeError or ValueError unless the arguments of ``quantize_fp8`` are valid."""
    name = "quantize_fp8"
    validation.check_tensor(name, "x", x, validation.DTYPES, memory=False)
    validation.check_device(name, "x", x)
    if x.dim() < 2:
        raise ValueError(f"{name}: x must have at least 2 dimensions [rows, K], its shape is {shape_of(x)}")
    if scaling not in SCALINGS:
        raise ValueError(f"{name}: scaling must be one of {', '.join(map(repr, SCALINGS))}, not {scaling!r}")
    if dtype not in FP8_DTYPES:
        raise TypeError(f"{name}: dtype is {dtype}; float8_e4m3fn, float8_e5m2 and their fnuz formats are supported")
    for argument, value in (("weight", weight), ("transpose", transpose)):
        if type(value) is not bool:
            raise TypeError(f"{name}: {argument} must be True or False, not {value!r}")
    if weight and scaling != "block":
        raise ValueError(f'{name}: weight=True is for scaling "block", not {scaling!r}')
    if scale is None:
        return
    if scaling != "tensor":
        raise ValueError(f'{name}: scale is for scaling "tensor", not {scaling!r}')
    validation.check_tensor(name, "scale", scale, (torch.float32,), like=x, memory=False)
    if scale.numel() != 1:
        raise ValueError(f"{name}: scale {shape_of(scale)} must have one element")
