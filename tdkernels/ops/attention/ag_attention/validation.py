"""Validation of the arguments of ag_attention, before anything is launched."""

import math
from typing import TYPE_CHECKING, Any

from tdkernels.ops.attention.ag_attention.config import AgAttentionConfig
from tdkernels.ops.attention.ag_attention.vendor_attention import KERNELS
from tdkernels.ops.common.config import check_config
from tdkernels.ops.common.validation import check_floats

if TYPE_CHECKING:
    import torch

SHARDINGS = ("contiguous", "zigzag")
LEAST, MOST = 16, 256  # limits of the head dimensions D and Dv


def check_attention(
    operator: str, q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", causal: Any, scale: Any, sharding: Any,
    config: Any,
) -> None:
    """Raise TypeError or ValueError if the arguments are invalid. The message names the argument and its shape."""
    tensors = {"q": q, "k": k, "v": v}
    check_floats(operator, tensors, memory=True)
    for name, tensor in tensors.items():
        _check_shape(operator, name, tensor)
    _check_shapes(operator, q, k, v)
    if not isinstance(causal, bool):
        raise TypeError(f"{operator}: causal must be True or False, not {causal!r}")
    if sharding not in SHARDINGS:
        raise ValueError(f'{operator}: sharding must be "contiguous" or "zigzag", not {sharding!r}')
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise TypeError(f"{operator}: scale must be a number or None, not {type(scale).__name__}")
    if scale is not None and not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"{operator}: scale must be positive and finite, not {scale}")
    check_config(operator, config, AgAttentionConfig, q)
    if config is not None:
        _check_widths(operator, config, q, v)


def _check_widths(operator, config, q, v):
    """Raise ValueError if a head dimension is too large for the torch kernel of the config."""
    for name in ("method", "backward"):
        kernel = KERNELS.get(getattr(config, name))
        if kernel is not None and max(q.shape[3], v.shape[3]) > kernel.widest:
            raise ValueError(
                f"{operator}: config: {name} {getattr(config, name)!r} takes heads of at most {kernel.widest} "
                f"elements, not q {list(q.shape)}, v {list(v.shape)}"
            )


def _check_shape(operator, name, tensor):
    if tensor.dim() != 4:
        raise ValueError(
            f"{operator}: {name} must have 4 dimensions [B, S / W, heads, D], its shape is {list(tensor.shape)}"
        )
    if not LEAST <= tensor.shape[3] <= MOST:
        raise ValueError(f"{operator}: the heads of {name} {list(tensor.shape)} must have {LEAST} to {MOST} elements")
    if tensor.shape[0] == 0 or tensor.shape[2] == 0:
        raise ValueError(f"{operator}: {name} {list(tensor.shape)} has an empty dimension; only S / W may be 0")


def _check_shapes(operator, q, k, v):
    shapes = {name: list(tensor.shape) for name, tensor in (("q", q), ("k", k), ("v", v))}
    for name in ("k", "v"):
        if shapes[name][:2] != shapes["q"][:2]:
            raise ValueError(f"{operator}: q {shapes['q']} and {name} {shapes[name]} must have the same B and S / W")
    if shapes["k"][2] != shapes["v"][2]:
        raise ValueError(f"{operator}: k {shapes['k']} and v {shapes['v']} must have the same number of heads")
    if shapes["q"][2] % shapes["k"][2]:
        raise ValueError(
            f"{operator}: the number of heads of q {shapes['q']} must be a multiple of the number of heads of k "
            f"{shapes['k']}"
        )
    if shapes["q"][3] != shapes["k"][3]:
        raise ValueError(f"{operator}: the last dimension of q {shapes['q']} and of k {shapes['k']} must be the same D")
