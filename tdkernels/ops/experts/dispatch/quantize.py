"""What rows that were quantized for the way stand for."""

import torch

from tdkernels.ops.experts.dispatch.kernel_payload import QUANTUM


def dequantize(codes, scales, dtype):
    """What codes [R, H] stand for, in ``dtype``: each times the scale, of [R, ceil(H / 128)], of its 128 channels."""
    by_channel = scales.repeat_interleave(QUANTUM.value, dim=1)[:, : codes.shape[1]]
    return (codes.to(torch.float32) * by_channel).to(dtype)
