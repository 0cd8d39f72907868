"""Scaled fp8 operands of a GEMM: which scales are supported, validation, quantization and GEMMs in plain torch.

The values of an fp8 operand are its elements times their scale, which is fp32:

    scaling         scale of x [M, K]       scale of weight [N, K]
    tensor-wise     one element             one element
    row-wise        [M, 1]                  [N, 1]
    block-wise      [M, ceil(K / 128)]      [ceil(N / 128), ceil(K / 128)]

Tensor-wise and row-wise scales can be combined. A kernel multiplies the accumulator by them after the main loop
("row"), and by block-wise scales after each block of K ("block").
"""

from typing import Any, NamedTuple

import torch

from tdkernels.ops.common import validation
from tdkernels.ops.common.validation import shape_of
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu

BLOCK = 128  # elements of K, and rows of the weight, that share a block-wise scale
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALINGS = ("tensor", "row", "block")
# AMD's gfx942 multiplies the "fnuz" formats only, all other devices the OCP formats.
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_E5M2 = FP8[1], FNUZ[1]
CODE_MULTIPLE = 16  # K: rows then begin at multiples of 16 bytes, as tensor descriptors and torch._scaled_mm need


class Scales(NamedTuple):
    """The scales of a call, and what else differs from a GEMM of 16-bit operands.

    Attributes:
        x: Scale of x, fp32, contiguous.
        weight: Scale of the weight, fp32, contiguous.
        kind: "row" (also tensor-wise) or "block".
        out_dtype: dtype of the output and of partial sums that are sent.
        use_fast_accum: Whether tensor cores accumulate all of K with their reduced precision.
    """

    x: torch.Tensor
    weight: torch.Tensor
    kind: str
    out_dtype: torch.dtype
    use_fast_accum: bool

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what a compiled kernel and a config depend on besides the operands."""
        return self.kind, self.x.numel() == 1, self.weight.numel() == 1, self.out_dtype, self.use_fast_accum

    @property
    def layout(self) -> str:
        """Return the ``layout`` of the tuner's Problem."""
        return layout_of(self.kind, self.use_fast_accum)

    def of_rows(self, first: int, count: int) -> "Scales":
        """Return the scales of some rows of x."""
        return self if self.x.numel() == 1 else self._replace(x=self.x[first : first + count])

    @property
    def fields(self) -> dict[str, Any]:
        """Return the properties that must be equal on all ranks."""
        return {"scaling": self.layout, "out_dtype": str(self.out_dtype)}


def layout_of(kind: str, use_fast_accum: bool) -> str:
    """Return the ``layout`` of the tuner's Problem for scaled operands."""
    return "scaled by block" if kind == "block" else "scaled fast" if use_fast_accum else "scaled"


LAYOUTS = ("scaled", "scaled fast", "scaled by block")


def is_fp8(tensor: Any) -> bool:
    """Return whether an argument is a tensor in one of the float8 formats."""
    return isinstance(tensor, torch.Tensor) and tensor.dtype in (*FP8, *FNUZ)


def out_dtype_of(x: torch.Tensor, scales: Scales | None) -> torch.dtype:
    """Return the dtype of the output of a GEMM."""
    return x.dtype if scales is None else scales.out_dtype


def blocks(size: int) -> int:
    """Return the number of block-wise scales for ``size`` elements."""
    return cdiv(size, BLOCK)


def row_bytes(scales: Scales | None) -> int:
    """Return the bytes of the scales of a row of x; 0 without scales."""
    return 0 if scales is None else scales.x.shape[1] * scales.x.element_size()


# ---- validation ----


def _kind_of(operator, x, weight, scale_x, scale_w):
    """Return "row" or "block"; raise ValueError if the shapes of the scales do not fit the operands."""
    rows, k = x.shape[:-1].numel(), x.shape[-1]
    n = weight.shape[0]
    fits_x = {"row": (rows, 1), "block": (rows, blocks(k))}
    fits_w = {"row": (n, 1), "block": (blocks(n), blocks(k))}
    # A scale of x may have the leading dimensions of x.
    has_lead = scale_x.dim() == x.dim() and scale_x.shape[:-1] == x.shape[:-1]
    shape_x = (rows, scale_x.shape[-1]) if has_lead else tuple(scale_x.shape)
    shape_w = tuple(scale_w.shape)
    for kind in ("row", "block"):
        any_x = kind == "row" and scale_x.numel() == 1
        any_w = kind == "row" and scale_w.numel() == 1
        if (any_x or shape_x == fits_x[kind]) and (any_w or shape_w == fits_w[kind]):
            return kind
    for name, scale, operand, fits in (("scale_x", scale_x, x, fits_x), ("scale_w", scale_w, weight, fits_w)):
        shape = shape_x if name == "scale_x" else shape_w
        if scale.numel() != 1 and shape not in fits.values():
            operand_name = "x" if name == "scale_x" else "weight"
            raise ValueError(
                f"{operator}: {name} {shape_of(scale)} must have one element, the shape {list(fits['row'])} (row-wise) "
                f"or {list(fits['block'])} (block-wise) for {operand_name} {shape_of(operand)}"
            )
    raise ValueError(
        f"{operator}: scale_x {shape_of(scale_x)} and scale_w {shape_of(scale_w)} must both be block-wise, or neither"
    )


def check_fp8(operator: str, name: str, tensor: torch.Tensor) -> None:
    """Raise TypeError unless the device can multiply tensors of this float8 format."""
    device = tensor.device
    if not is_fp8(tensor):
        raise TypeError(
            f"{operator}: {name} is {tensor.dtype}; with scales float8_e4m3fn and float8_e5m2 are supported"
        )
    fnuz = device.type == "cuda" and gpu.multiplies_fnuz(device)
    if tensor.dtype not in (FNUZ if fnuz else FP8):
        supported = " and ".join(str(dtype).removeprefix("torch.") for dtype in (FNUZ if fnuz else FP8))
        raise TypeError(f"{operator}: {name} is {tensor.dtype}; {supported} are supported on {device}")
    if device.type == "cuda" and not gpu.multiplies_fp8(device):
        gpu_name = torch.cuda.get_device_name(device)
        raise TypeError(f"{operator}: {name} is {tensor.dtype}, which {gpu_name} cannot multiply")


def checked_out_dtype(operator: str, out_dtype: Any, use_fast_accum: Any) -> torch.dtype:
    """Return ``out_dtype``, bf16 by default; raise TypeError if one of the two options is invalid."""
    out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"{operator}: out_dtype is {out_dtype}; bfloat16, float16 and float32 are supported")
    if type(use_fast_accum) is not bool:
        raise TypeError(f"{operator}: use_fast_accum must be True or False, not {use_fast_accum!r}")
    return out_dtype


def check_scaled_operands(
    operator: str, x: Any, weight: Any, bias: Any, scale_x: Any, scale_w: Any, out_dtype: Any, use_fast_accum: Any,
) -> Scales:
    """Validate scaled operands of x @ weight.T + bias, and return their scales.

    Raises:
        TypeError, ValueError: If they are invalid. Errors name the argument and its shape.
    """
    out_dtype = checked_out_dtype(operator, out_dtype, use_fast_accum)
    validation.check_tensor(operator, "x", x, memory=False)
    validation.check_device(operator, "x", x)
    validation.check_tensor(operator, "weight", weight, like=x, memory=False)
    for name, tensor in (("x", x), ("weight", weight)):
        check_fp8(operator, name, tensor)
    if bias is not None:
        validation.check_tensor(operator, "bias", bias, OUT_DTYPES, like=x, memory=False)
        if bias.dtype != out_dtype:
            raise TypeError(f"{operator}: bias is {bias.dtype} but out_dtype is {out_dtype}")
    validation.check_shapes(operator, x, weight, bias)
    if x.shape[-1] % CODE_MULTIPLE:
        raise ValueError(f"{operator}: K, the last dimension of x {shape_of(x)}, must be a multiple of 16 for float8")
    for name, scale in (("scale_x", scale_x), ("scale_w", scale_w)):
        validation.check_tensor(operator, name, scale, (torch.float32,), like=x, memory=False)
    kind = _kind_of(operator, x, weight, scale_x, scale_w)
    reject_gradients(operator, (x, weight, bias, scale_x, scale_w))
    columns = scale_x.shape[-1] if scale_x.numel() != 1 else 1
    scale_w = scale_w.reshape(1, 1) if scale_w.numel() == 1 else scale_w
    return Scales(scale_x.reshape(-1, columns).contiguous(), scale_w.contiguous(), kind, out_dtype, use_fast_accum)


_TRAINING = "for training use the layers of tdkernels.nn with float8="


def reject_gradients(operator: str, tensors: tuple[Any, ...], instead: str = _TRAINING) -> None:
    """Raise RuntimeError if autograd would record a call with scaled operands, which has no gradient.

    ``instead`` is the end of the message: what to do instead.
    """
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise RuntimeError(f"{operator}: operands with scales have no gradient; {instead}")


def invalid_tiles(tiles: Any, kind: str) -> str | None:
    """Return why a ``Tiles`` does not suit the scales ("row" or "block"), or None if it does or is None.

    A step of the main loop, and 128 columns of a tile, must have the same block-wise scale of the weight.
    """
    if kind != "block" or tiles is None:
        return None
    for name, most in (("block_k", BLOCK), ("block_n", 2 * BLOCK)):
        if getattr(tiles, name) > most:
            return f"{name} must be at most {most} with block-wise scales, not {getattr(tiles, name)}"
    return None


def check_no_scales(operator: str, x: Any) -> None:
    """Raise TypeError if x is fp8, in a call without scales."""
    if is_fp8(x):
        raise TypeError(f"{operator}: x {shape_of(x)} is {x.dtype}; pass scale_x and scale_w")


def check_scaled_call(
    operator: str, x: Any, main_grad: Any, scale_x: Any, scale_w: Any, out_dtype: Any, use_fast_accum: Any,
) -> None:
    """Raise TypeError if an argument for scaled operands is given without the others, or with ``main_grad``."""
    if scale_x is None and scale_w is None:
        name = "use_fast_accum" if out_dtype is None else "out_dtype"
        raise TypeError(f"{operator}: {name} is for float8 operands with scale_x and scale_w")
    if scale_x is None or scale_w is None:
        given, missing = ("scale_x", "scale_w") if scale_w is None else ("scale_w", "scale_x")
        raise TypeError(f"{operator}: {given} needs {missing}")
    if main_grad is not None:
        raise TypeError(f"{operator}: operands with scales have no gradient, so main_grad must be None")


# ---- quantization and GEMMs in plain torch ----


def quantize_ref(
    x: torch.Tensor, scaling: str, dtype: torch.dtype = torch.float8_e4m3fn, weight: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a matrix in plain torch: return (codes, scale) with x ≈ codes * scale.

    The scale is the largest magnitude over the largest fp8 value. A group of zeros gets the scale 0 and codes 0.

    Args:
        x: [rows, K].
        scaling: "tensor", "row" or "block".
        dtype: The float8 format of the codes.
        weight: With "block": whether a scale belongs to 128 × 128 elements instead of 1 × 128.
    """
    rows, k = x.shape
    most = torch.finfo(dtype).max
    wide = x.float()
    if scaling == "block":
        height = BLOCK if weight else 1
        padded = torch.nn.functional.pad(wide, (0, blocks(k) * BLOCK - k, 0, cdiv(rows, height) * height - rows))
        amax = padded.view(cdiv(rows, height), height, blocks(k), BLOCK).abs().amax((1, 3))
        scale = amax / most
        by_element = scale.repeat_interleave(height, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :k]
    else:
        amax = wide.abs().amax(1, keepdim=True) if scaling == "row" else wide.abs().amax().view(1, 1)
        by_element = scale = amax / most
    codes = torch.where(by_element == 0, 0.0, wide / by_element).clamp(-most, most).to(dtype)
    return codes, scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return codes [rows, K] times their scale, in ``dtype``.

    The scale has one element, [rows, 1], or a scale per block: [rows or ceil(rows / 128), ceil(K / 128)].
    """
    rows, k = codes.shape
    scale = scale.to(dtype)
    if scale.numel() != 1:
        if scale.shape[0] != rows:
            scale = scale.repeat_interleave(BLOCK, 0)[:rows]
        if scale.shape[1] != 1 or k <= BLOCK:
            scale = scale.repeat_interleave(BLOCK, 1)[:, :k]
    return codes.to(dtype) * scale


def scaled_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scales: Scales, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x @ weight.T + bias for 2-D scaled operands, by ``torch._scaled_mm`` if it supports them.

    Otherwise the operands are dequantized to fp32, which takes several times as long. That is the case on CPUs, if N is
    not a multiple of 16, if both operands are in float8_e5m2, and for block-wise scales on devices other than Hopper or
    if K is not a multiple of 512. The result is stored in ``out``, if it is given.
    """
    both_e5m2 = x.dtype == weight.dtype and x.dtype in _E5M2
    if x.device.type == "cuda" and x.shape[0] > 0 and weight.shape[0] % 16 == 0 and not both_e5m2:
        x, weight = row_major(x), row_major(weight)
        if scales.kind == "row":
            return _scaled_mm(x, weight, bias, scales, out)
        if multiplies_blocks(x.shape[0], x.shape[1], x.device):
            return _scaled_mm_by_blocks(x, weight, bias, scales, out)
    with torch.autocast(x.device.type, enabled=False):
        y = dequantize(x, scales.x) @ dequantize(weight, scales.weight).t()
        y = (y if bias is None else y + bias).to(scales.out_dtype)
    return y if out is None else out.copy_(y)


def row_major(operand: torch.Tensor) -> torch.Tensor:
    """Return an operand [rows, K], or a copy in the layout for ``torch._scaled_mm``: K-contiguous and aligned."""
    fits = operand.stride(1) == 1 and operand.stride(0) >= operand.shape[1]
    if fits and operand.stride(0) % CODE_MULTIPLE == 0 and operand.data_ptr() % CODE_MULTIPLE == 0:
        return operand
    return operand.clone(memory_format=torch.contiguous_format)


def _mm(x, weight, scale_x, scale_w, dtype, scales, out=None, bias=None):
    """Call ``torch._scaled_mm`` for x @ weight.T. cuBLAS reads vectors of scales at multiples of 16 bytes only."""
    scale_x, scale_w = (scale if scale.data_ptr() % 16 == 0 else scale.clone() for scale in (scale_x, scale_w))
    args = x, weight.t(), scale_x, scale_w, bias, None, dtype, scales.use_fast_accum
    return torch._scaled_mm(*args) if out is None else torch.ops.aten._scaled_mm.out(*args, out=out)


def _scaled_mm(x, weight, bias, scales, out):
    """Multiply operands with tensor-wise or row-wise scales.

    ``torch._scaled_mm`` has row-wise scales for both operands or neither, and for bf16 outputs only.
    """
    if scales.x.numel() == 1 and scales.weight.numel() == 1:
        # cuBLAS adds no bias to an fp32 output, and reads a bias as if it were contiguous.
        fused = None if bias is None or scales.out_dtype == torch.float32 else bias.contiguous()
        y = _mm(x, weight, scales.x.reshape(1, 1), scales.weight.reshape(1, 1), scales.out_dtype, scales, out, fused)
        return y if bias is None or fused is not None else y.add_(bias)
    scale_x = scales.x.reshape(-1, 1).expand(x.shape[0], 1).contiguous()
    scale_w = scales.weight.reshape(1, -1).expand(1, weight.shape[0]).contiguous()
    if scales.out_dtype == torch.bfloat16:
        y = _mm(x, weight, scale_x, scale_w, torch.bfloat16, scales, out)
        return y if bias is None else y.add_(bias)
    unit = scale_x.new_ones((1, 1))
    y = _mm(x, weight, unit, unit, torch.float32, scales).mul_(scale_x).mul_(scale_w)
    y = (y if bias is None else y.add_(bias)).to(scales.out_dtype)
    return y if out is None else out.copy_(y)


def multiplies_blocks(rows: int, k: int, device: torch.device) -> bool:
    """Return whether ``torch._scaled_mm`` has block-wise scales for x [rows, k]: on Hopper with CUDA 12.9 or newer.

    Versions of torch differ in the layout of the scales, except if K is a multiple of 512.
    """
    cuda = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return gpu.capability(device) == (9, 0) and cuda >= (12, 9) and rows % 4 == 0 and k % (4 * BLOCK) == 0


def _scaled_mm_by_blocks(x, weight, bias, scales, out):
    """Multiply operands with block-wise scales; those of x must be transposed in memory."""
    scale_x, scale_w = scales.x.t().contiguous().t(), scales.weight.t()
    precise = scales._replace(use_fast_accum=False)
    direct = out if scales.out_dtype == torch.bfloat16 else None
    y = _mm(x, weight, scale_x, scale_w, torch.bfloat16 if direct is not None else scales.out_dtype, precise, direct)
    y = y if bias is None else y.add_(bias)
    return y if out is None or direct is not None else out.copy_(y)
