"""all_reduce_rms_norm and all_reduce_layer_norm in torch: forward with torch.distributed, and the backward."""

import torch
import torch.nn.functional as F

from tdkernels.ops.common import torch_collectives as plain
from tdkernels.ops.quantize.op import quantize_fp8
from tdkernels.runtime import gpu
from tdkernels.symm import GroupLike, resolve_group


def norm_ref(
    r: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, is_layer_norm: bool
) -> torch.Tensor:
    """Return RMSNorm or LayerNorm of r [..., hidden], computed in fp32 and rounded to the dtype of r.

    A weight of another dtype than r is fp32; torch's norms would then return fp32.
    """
    x = r if weight.dtype == r.dtype else r.float()
    if is_layer_norm:
        return F.layer_norm(x, weight.shape, weight, bias, eps).to(r.dtype)
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, eps).to(r.dtype)
    wide = torch.promote_types(r.dtype, torch.float32)  # so that y is not rounded before the bias is added
    return (F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps) + bias).to(r.dtype)


def forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, eps: float,
    is_layer_norm: bool, quantize: str | None, group: torch.distributed.ProcessGroup,
) -> tuple[torch.Tensor, ...]:
    """Return (y, r), or (codes, r, scale) with ``quantize``, each a new tensor. No gradient."""
    r = x.clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        r = plain.all_reduce(r, group)
    if residual is not None:
        r += residual
    y = norm_ref(r, weight, bias, eps, is_layer_norm)
    if quantize is None:
        return y, r
    codes, scale = quantize_fp8(y.view(-1, y.shape[-1]), dtype=gpu.e4m3_dtype(x.device))
    return codes.view(y.shape), r, scale.view(*y.shape[:-1], 1)


@torch.no_grad()
def all_reduce_rms_norm_ref(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float = 1e-6, *,
    bias: torch.Tensor | None = None, quantize: str | None = None, group: GroupLike = None,
) -> tuple[torch.Tensor, ...]:
    """Compute ``all_reduce_rms_norm`` with torch.distributed and torch's norm; no gradient.

    The sum over the ranks is rounded before the residual is added.
    """
    return forward(x, residual, weight, bias, eps, False, quantize, resolve_group(group))


@torch.no_grad()
def all_reduce_layer_norm_ref(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None = None,
    eps: float = 1e-5, *, quantize: str | None = None, group: GroupLike = None,
) -> tuple[torch.Tensor, ...]:
    """Compute ``all_reduce_layer_norm`` with torch.distributed and torch's norm; no gradient.

    The sum over the ranks is rounded before the residual is added.
    """
    return forward(x, residual, weight, bias, eps, True, quantize, resolve_group(group))


# ---- backward ----


def statistics(r: torch.Tensor, eps: float, is_layer_norm: bool) -> torch.Tensor:
    """Return mean (0 for RMSNorm) and reciprocal of the deviation of the rows of r, fp32 [rows, 2]."""
    rows = r.view(-1, r.shape[-1]).float()
    mean = rows.mean(-1) if is_layer_norm else rows.new_zeros(rows.shape[0])
    centered = rows - mean.unsqueeze(-1) if is_layer_norm else rows
    return torch.stack([mean, torch.rsqrt(centered.square().mean(-1) + eps)], -1)


def gradients(
    dy: torch.Tensor, r: torch.Tensor, weight: torch.Tensor, stats: torch.Tensor, is_layer_norm: bool,
    wanted: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of r, weight and bias of a norm, each None unless ``wanted``. ``stats`` of ``statistics``.

    torch's fused backward is used on GPUs, where it exists for r and weight of one dtype.
    """
    want_r, want_weight, want_bias = wanted
    # torch's fused backward reads mean and rstd as contiguous tensors without checking it.
    mean, rstd = (column.view(*r.shape[:-1], 1) for column in stats.t().contiguous())
    if r.device.type == "cuda" and r.numel() and weight.dtype == r.dtype and (want_r or want_weight):
        dr, dweight = _fused_gradients(dy, r, weight, mean, rstd, is_layer_norm, want_r, want_weight)
    else:
        dr, dweight = _plain_gradients(dy, r, weight, mean, rstd, is_layer_norm, want_r, want_weight)
    return dr, dweight, _sum_of_rows(dy).to(weight.dtype) if want_bias else None


def _fused_gradients(dy, r, weight, mean, rstd, is_layer_norm, want_r, want_weight):
    """Return the gradients of r and weight from torch's kernels."""
    if is_layer_norm:
        wanted = [want_r, want_weight, False]
        return torch.ops.aten.native_layer_norm_backward(dy, r, weight.shape, mean, rstd, weight, None, wanted)[:2]
    return torch.ops.aten._fused_rms_norm_backward(dy, r, weight.shape, rstd, weight, [want_r, want_weight])


def _plain_gradients(dy, r, weight, mean, rstd, is_layer_norm, want_r, want_weight):
    """Return the gradients of r and weight, computed in fp32."""
    normalized, scaled = (r.float() - mean) * rstd, dy.float() * weight.float()
    dr = dweight = None
    if want_r:
        dr = scaled - normalized * (scaled * normalized).mean(-1, keepdim=True)
        dr = dr - scaled.mean(-1, keepdim=True) if is_layer_norm else dr
        dr = (dr * rstd).to(r.dtype)
    if want_weight:
        dweight = _sum_of_rows(dy.float() * normalized).to(weight.dtype)
    return dr, dweight


def _sum_of_rows(dy):
    """Return the sum of all rows in fp32."""
    return dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32)
