"""Grouped GEMMs with fp8 weights in layers of experts, for inference.

Rows are quantized before each GEMM, by the kind of the weight's scale:

    scale of a weight [E, N, K]          kind         scales of rows [R, K]
    [E, ceil(N / 128), ceil(K / 128)]    block-wise   [R, ceil(K / 128)]
    [E, N, 1], or one per expert: [E]    row-wise     [R, 1]

Codes that were sent with block-wise scales, such as those of ``ep_dispatch(quantize="fp8")``, are multiplied as they
are if the weight is block-wise. For a row-wise one they are quantized again.
"""

from collections.abc import Iterable
from typing import Any

import torch

from tdkernels.ops.common.scaling import (
    CODE_MULTIPLE,
    FNUZ,
    FP8,
    blocks,
    check_fp8,
    invalid_tiles,
    reject_gradients,
)
from tdkernels.ops.common.validation import check_floats, check_tensor, shape_of
from tdkernels.ops.experts.grouped_gemm.config import GroupGemmConfig
from tdkernels.ops.experts.grouped_gemm.op import group_gemm
from tdkernels.ops.experts.grouped_gemm.validation import check_expert_shapes
from tdkernels.ops.quantize.op import dequantize_rows, quantize_matrix


def check_fast_accum(operator: str, use_fast_accum: Any, scales: tuple[Any, Any] | None) -> None:
    """Raise TypeError unless ``use_fast_accum`` is False, or True with weights in fp8."""
    if type(use_fast_accum) is not bool:
        raise TypeError(f"{operator}: use_fast_accum must be True or False, not {use_fast_accum!r}")
    if use_fast_accum and scales is None:
        raise TypeError(f"{operator}: use_fast_accum is for weights in float8 with scale_gate_up and scale_down")


def check_scales_given(operator: str, scales: tuple[Any, Any]) -> None:
    """Raise TypeError if only one of the scales of both weights is given."""
    for name, scale in zip(("scale_gate_up", "scale_down"), scales, strict=True):
        if scale is None:
            raise TypeError(f"{operator}: {name} is None; weights in float8 need scale_gate_up and scale_down")


def check_fp8_experts(operator: str, x: Any, w: Any, scale: Any, name: str, scale_name: str) -> None:
    """Check rows x [R, K], and fp8 weights w [E, N, K], called ``name``, with their scale ``scale_name``.

    Raises:
        TypeError, ValueError: If they do not fit together. The message names the argument and its shape.
    """
    check_floats(operator, {"x": x}, memory=True)
    check_tensor(operator, name, w, None, x)
    check_fp8(operator, name, w)
    check_expert_shapes(operator, x, w, name)
    check_fp8_scale(operator, x, w, scale, name, scale_name)


def check_fp8_scale(operator: str, x: Any, w: Any, scale: Any, name: str, scale_name: str) -> None:
    """Check K and the scale of fp8 weights w [E, N, K], as ``check_fp8_experts``."""
    if w.shape[2] % CODE_MULTIPLE:
        raise ValueError(f"{operator}: the last dimension of {name} {shape_of(w)} must be a multiple of 16 for float8")
    check_tensor(operator, scale_name, scale, (torch.float32,), x)
    experts, n, _ = w.shape
    if shape_of(scale) not in (_block_shape(w), [experts, n, 1], [experts, 1, 1], [experts]):
        raise ValueError(
            f"{operator}: {scale_name} {shape_of(scale)} must have the shape {_block_shape(w)} (block-wise), "
            f"{[experts, n, 1]} (row-wise) or {[experts]} (one for each expert) for {name} {shape_of(w)}"
        )


def _block_shape(w):
    """Return the shape of the block-wise scales of weights."""
    return [w.shape[0], blocks(w.shape[1]), blocks(w.shape[2])]


def scale_kind(w: torch.Tensor, scale: torch.Tensor) -> str:
    """Return "block" or "row", the ``kind`` of ``Scales`` for fp8 weights and their scale."""
    return "block" if shape_of(scale) == _block_shape(w) else "row"


def check_fp8_tiles(
    operator: str, tiles: Any, weights: Iterable[torch.Tensor], scales: Iterable[torch.Tensor], field: str = ""
) -> None:
    """Raise ValueError if tiles do not suit the scales of one of the weights. ``field`` is the name of their config."""
    for w, scale in zip(weights, scales, strict=True):
        reason = invalid_tiles(tiles, scale_kind(w, scale))
        if reason is not None:
            raise ValueError(f"{operator}: config cannot run: {field}{reason}")


def reject_fp8_gradients(operator: str, *operands: torch.Tensor | None) -> None:
    """Raise RuntimeError if autograd would record a call with fp8 weights."""
    reject_gradients(operator, operands, "call it under torch.no_grad()")


def quantized(
    rows: torch.Tensor, w: torch.Tensor, kind: str, scales: torch.Tensor | None = None, dtype: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes, scales) of rows [R, K] for weights w. ``kind``: that of ``scale_kind``.

    With ``scales`` [R, ceil(K / 128)] the rows are codes already. If they must be quantized again, they are converted
    to ``dtype`` first.
    """
    form = FNUZ[0] if w.dtype in FNUZ else FP8[0]
    if scales is not None and kind == "block" and rows.dtype == form:  # gfx942 multiplies other formats
        return rows, scales
    return quantize_matrix(rows if scales is None else dequantize_rows(rows, scales, dtype), kind, form)


def fp8_product(
    rows: torch.Tensor, w: torch.Tensor, scale_w: torch.Tensor, splits: torch.Tensor, out_dtype: torch.dtype,
    activation: str | None = None, scales: torch.Tensor | None = None, config: GroupGemmConfig | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Multiply rows [R, K] by fp8 weights [E, N, K], and return y in ``out_dtype``.

    Args:
        rows: Rows in bf16, fp16 or fp32, or codes with ``scales``.
        w: Codes of the weights.
        scale_w: Their scale.
        splits: As for ``group_gemm``.
        out_dtype: See above.
        activation: As for ``group_gemm``.
        scales: Block-wise scales [R, ceil(K / 128)] of rows that are codes.
        config: As for ``group_gemm``.
        use_fast_accum: As for ``group_gemm``.
    """
    codes, scale_x = quantized(rows, w, scale_kind(w, scale_w), scales, out_dtype)
    return group_gemm(
        codes, w, splits, activation=activation, scale_x=scale_x, scale_w=scale_w, out_dtype=out_dtype,
        use_fast_accum=use_fast_accum, config=config,
    )
