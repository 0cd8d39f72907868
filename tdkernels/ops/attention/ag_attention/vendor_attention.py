"""Attention kernels of torch (cuDNN and flash attention) behind one interface.

    forward(q, k, v, causal, scale) -> (o, lse)
    backward(q, o, lse, do, k, v, causal, scale) -> (dq, dk, dv)

Shapes are q, o, do [B, n, Hq, D] and k, v [B, m, Hkv, D], with a contiguous last dimension; lse is [B, n, Hq] fp32, in
natural log. With ``causal``, n = m. The lse allows results over different keys to be merged. In the backward, o and lse
may cover more keys than k has; the result is then the contribution of the keys in k.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tdkernels.runtime import gpu

_aten = torch.ops.aten
_HAS_CUDNN = torch.backends.cudnn.is_available()  # evaluated at import, since torch.compile cannot trace the call
_HAS_FLASH = torch.backends.cuda.is_flash_attention_available()


class TorchKernel(NamedTuple):
    """An attention kernel of torch.

    Attributes:
        forward: See the module.
        backward: See the module.
        why_not: (device) -> why the kernel is not available, or None if it is.
        widest: Largest head dimension.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    why_not: Callable[[torch.device], str | None]
    widest: int


def _by_head(*tensors):
    """Return tensors [B, n, H, ·] as [B, H, n, ·]."""
    return [x.transpose(1, 2) for x in tensors]


def _by_row(*tensors):
    """Return tensors [B, H, n, ·] as contiguous [B, n, H, ·]."""
    return [x.transpose(1, 2).contiguous() for x in tensors]


# ---- cuDNN ----


def _cudnn_forward(q, k, v, causal, scale):
    o, lse, *_ = _aten._scaled_dot_product_cudnn_attention(*_by_head(q, k, v), None, True, 0.0, causal, scale=scale)
    return _by_row(o, lse.view(o.shape[:3]))


def _cudnn_backward(q, o, lse, do, k, v, causal, scale):
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # unused, since there is no dropout
    lse = lse.transpose(1, 2).contiguous()[..., None]
    gradients = _aten._scaled_dot_product_cudnn_attention_backward(
        *_by_head(do, q, k, v, o), lse, seed, seed, None, None, None, q.shape[1], k.shape[1], 0.0, causal, scale=scale
    )
    return _by_head(*gradients)


def _why_not_cudnn(device):
    if device.type != "cuda" or torch.version.hip:
        return "cuDNN runs on NVIDIA GPUs"
    if gpu.capability(device) < (8, 0) or not _HAS_CUDNN:
        return "cuDNN attention needs a GPU of sm_80 or later, and a torch build with cuDNN"
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
        return "flash attention needs a GPU of sm_80 or later, and a torch build with it"
    return None


# ---- flash attention on CPUs, which does not support grouped heads ----


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


def why_not(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernel with a name cannot run with a device and a dtype, or None if it can."""
    reason = KERNELS[name].why_not(device)
    if reason is None and dtype == torch.float32 and device.type != "cpu":
        return f"{name} supports bf16 and fp16 only"
    return reason
