"""What the launches of all operators with a residual addition and a norm share: options, outputs and constants."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tdkernels.ops.common.fp8_codes import format_for
from tdkernels.ops.common.norm_rows import Norm
from tdkernels.runtime import gpu
from tdkernels.runtime.kernel_launch import output_spec


class Options(NamedTuple):
    """What is computed, in addition to the operands.

    Attributes:
        operator: Name of the operator, which ends with "rms_norm" or "layer_norm".
        eps: Added to the mean of squares.
        quantize: None or "fp8".
    """

    operator: str
    eps: float
    quantize: str | None

    @property
    def is_layer_norm(self) -> bool:
        """Whether the norm is LayerNorm."""
        return self.operator.endswith("layer_norm")


def output_specs(x: torch.Tensor, shape: Sequence[int], options: Options) -> list[torch.Tensor]:
    """Return placeholders of y and r, with fp8 the scales [..., 1], and the statistics [rows, 2].

    ``shape`` is that of r, [..., hidden]. r has the dtype of x.
    """
    y = output_spec(x, *shape, dtype=gpu.e4m3_dtype(x.device) if options.quantize else None)
    scale = [output_spec(x, *shape[:-1], 1, dtype=torch.float32)] if options.quantize else []
    rows = torch.Size(shape[:-1]).numel()
    return [y, output_spec(x, *shape), *scale, output_spec(x, rows, 2, dtype=torch.float32)]


def uninitialized(x: torch.Tensor, specs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return uninitialized tensors on the device of x, for fake implementations and calls without rows."""
    return [x.new_empty(spec.shape, dtype=spec.dtype) for spec in specs]


def kernel_outputs(x: torch.Tensor, shape: Sequence[int], options: Options) -> list[torch.Tensor]:
    """Return ``output_specs`` with codes as uint8: Triton has no pointers to e4m3 before sm_89."""
    y, *others = output_specs(x, shape, options)
    return [output_spec(x, *y.shape, dtype=torch.uint8) if options.quantize else y, *others]


def with_codes(y: torch.Tensor, options: Options) -> torch.Tensor:
    """Return y of ``kernel_outputs`` in the dtype of ``output_specs``."""
    return y.view(gpu.e4m3_dtype(y.device)) if options.quantize else y


def constants(
    x: torch.Tensor, hidden: int, residual: torch.Tensor | None, bias: torch.Tensor | None, options: Options
) -> dict[str, Any]:
    """Return the constants NORM and FORMAT for rows of ``hidden`` elements; ``bias`` is that of the norm."""
    codes = gpu.e4m3_dtype(x.device)
    return {
        "NORM": Norm(options.is_layer_norm, residual is not None, bias is not None, hidden % 16 == 0),
        "FORMAT": format_for(codes, gpu.converts_to_e4m3(x.device)) if options.quantize else None,
    }
