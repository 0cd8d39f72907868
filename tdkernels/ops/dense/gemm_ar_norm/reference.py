"""gemm_ar_rms_norm and gemm_ar_layer_norm in plain torch."""

import torch
import torch.nn.functional as F

from tdkernels.ops.collectives.norm import reference as norm
from tdkernels.symm import GroupLike, resolve_group


def partial_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: torch.distributed.ProcessGroup
) -> torch.Tensor:
    """Return this rank's part of the sum, x @ weight.T. Rank 0 adds the bias, so that it is added once."""
    return F.linear(x, weight, bias if group.rank() == 0 else None)


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
    norm_weight: torch.Tensor, norm_bias: torch.Tensor | None, eps: float, is_layer_norm: bool, quantize: str | None,
    group: torch.distributed.ProcessGroup,
) -> tuple[torch.Tensor, ...]:
    """Return (y, r), or (codes, r, scale) with ``quantize``, for x [M, K / W]. No gradient."""
    partial = partial_product(x, weight, bias, group)
    return norm.forward(partial, residual, norm_weight, norm_bias, eps, is_layer_norm, quantize, group)


@torch.no_grad()
def gemm_ar_rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, norm_weight: torch.Tensor, eps: float = 1e-6,
    *, bias: torch.Tensor | None = None, norm_bias: torch.Tensor | None = None, quantize: str | None = None,
    group: GroupLike = None,
) -> tuple[torch.Tensor, ...]:
    """Compute ``gemm_ar_rms_norm`` with torch's GEMM, all-reduce and norm; no gradient."""
    group = resolve_group(group)
    return forward(x, weight, bias, residual, norm_weight, norm_bias, eps, False, quantize, group)


@torch.no_grad()
def gemm_ar_layer_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None = None, eps: float = 1e-5, *, bias: torch.Tensor | None = None,
    quantize: str | None = None, group: GroupLike = None,
) -> tuple[torch.Tensor, ...]:
    """Compute ``gemm_ar_layer_norm`` with torch's GEMM, all-reduce and norm; no gradient."""
    group = resolve_group(group)
    return forward(x, weight, bias, residual, norm_weight, norm_bias, eps, True, quantize, group)
