"""Dequantization of rows that were sent in fp8."""

from typing import Any

import torch

from tdkernels.ops.experts.dispatch.kernel_payload import QUANTUM


def dequantize(codes: torch.Tensor, scales: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return codes [R, H], each multiplied by the scale of its 128 channels, in ``dtype``.

    Args:
        codes: [R, H] float8_e4m3fn.
        scales: Tensor [R, ceil(H / 128)], fp32. It is Any because ``EpTokens.scales`` may be None.
        dtype: The dtype of the result.
    """
    by_channel = scales.repeat_interleave(QUANTUM.value, dim=1)[:, : codes.shape[1]]
    return (codes.to(torch.float32) * by_channel).to(dtype)
