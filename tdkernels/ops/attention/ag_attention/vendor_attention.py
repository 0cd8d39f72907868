"""Attention kernels that torch brings, all called alike, with the lse that lets attention to parts be merged.

    forward(q, k, v, causal, scale) -> (o, lse)
    backward(q, o, lse, do, k, v, causal, scale) -> (dq, dk, dv)

q, o, do [B, n, Hq, D], k, v [B, m, Hkv, D] with a last dimension that is contiguous; lse [B, n, Hq] fp32, natural.
Causal, n = m. What o and lse the backward is given may be of more keys than k has: then it returns the share of these.
"""

from typing import NamedTuple

import torch

from tdkernels.runtime import gpu

_aten = torch.ops.aten
_HAS_CUDNN = torch.backends.cudnn.is_available()  # here, since torch.compile cannot ask
_HAS_FLASH = torch.backends.cuda.is_flash_attention_available()


class TorchKernel(NamedTuple):
    """One kernel of torch's.

    Attributes: ``why_not``: (device) -> why it is not there, or None; ``widest``: elements of a head that it can take
    """

    forward: object
    backward: object
    why_not: object
    widest: int


def _by_head(*tensors):
    """[B, H, n, ·] of tensors [B, n, H, ·]."""
    return [x.transpose(1, 2) for x in tensors]


def _by_row(*tensors):
    """Back again; contiguous."""
    return [x.transpose(1, 2).contiguous() for x in tensors]


# ---- cuDNN ----


def _cudnn_forward(q, k, v, causal, scale):
    o, lse, *_ = _aten._scaled_dot_product_cudnn_attention(*_by_head(q, k, v), None, True, 0.0, causal, scale=scale)
    return _by_row(o, lse.view(o.shape[:3]))


def _cudnn_backward(q, o, lse, do, k, v, causal, scale):
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # of a dropout that there is not
    lse = lse.transpose(1, 2).contiguous()[..., None]
    gradients = _aten._scaled_dot_product_cudnn_attention_backward(
        *_by_head(do, q, k, v, o), lse, seed, seed, None, None, None, q.shape[1], k.shape[1], 0.0, causal, scale=scale
    )
    return _by_head(*gradients)


def _why_not_cudnn(device):
    if device.type != "cuda" or torch.version.hip:
        return "cuDNN runs on NVIDIA GPUs"
    if gpu.capability(device) < (8, 0) or not _HAS_CUDNN:
        return "cuDNN's attention wants a GPU of sm_80 or later, and a torch that brings cuDNN"
    return None


# ---- flash attention on GPUs ----


def _flash_forward(q, k, v, causal, scale):
    if q.device.type == "cpu":
        return _cpu_forward(q, k, v, causal, scale)
    o, lse, *_ = _aten._scaled_dot_product_flash_attention(*_by_head(q, k, v), 0.0, causal, scale=scale)
    return _by_row(o, lse)


def _flash_backward(q, o, lse, do, k, v, causal, scale):
    if q.device.type == "cpu":
        return _cpu_backward(q, o, lse, do, k, v, causal, scale)
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    gradients = _aten._scaled_dot_product_flash_attention_backward(
        *_by_head(do, q, k, v, o), lse.transpose(1, 2).contiguous(), None, None, q.shape[1], k.shape[1], 0.0, causal,
        seed, seed, scale=scale,
    )
    return _by_head(*gradients)


def _why_not_flash(device):
    if device.type == "cpu":
        return None
    old = not torch.version.hip and gpu.capability(device) < (8, 0)
    if old or not _HAS_FLASH:
        return "flash attention wants a GPU of sm_80 or later, and a torch that brings it"
    return None


# ---- on CPUs, where heads cannot be grouped ----


def _repeated(group, *tensors):
    return [x.repeat_interleave(group, 2) for x in tensors]


def _cpu_forward(q, k, v, causal, scale):
    k, v = _repeated(q.shape[2] // k.shape[2], k, v)
    o, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*_by_head(q, k, v), 0.0, causal, scale=scale)
    return _by_row(o, lse)


def _cpu_backward(q, o, lse, do, k, v, causal, scale):
    group = q.shape[2] // k.shape[2]
    operands = _by_head(do, q, *_repeated(group, k, v), o, lse)
    dq, *of_keys = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*operands, 0.0, causal, scale=scale)
    dk, dv = (x.float().unflatten(1, (-1, group)).sum(2).to(k.dtype) for x in of_keys)
    return _by_head(dq, dk, dv)


KERNELS = {
    "cudnn": TorchKernel(_cudnn_forward, _cudnn_backward, _why_not_cudnn, 128),
    "flash": TorchKernel(_flash_forward, _flash_backward, _why_not_flash, 256),
}


def why_not(name, device, dtype):
    """Why the kernel of that name cannot run on a device, in a dtype; None when it can."""
    reason = KERNELS[name].why_not(device)
    if reason is None and dtype == torch.float32 and device.type != "cpu":
        return f"{name} has bf16 and fp16 only"
    return reason
