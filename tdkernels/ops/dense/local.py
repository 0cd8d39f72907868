"""GEMMs on one rank without communication: torch's, or the grouped GEMM kernel in the batch-invariant mode.

torch's GEMM (cuBLAS) selects its kernel by the number of rows, so its results depend on the batch. In the mode, the
kernel of ``group_gemm`` runs with one expert and fixed tiles. A bias is then added to the rounded product.
"""

import torch
import torch.nn.functional as F

from tdkernels.autotune.invariance import is_batch_invariant
from tdkernels.ops.common.scaling import Scales, scaled_linear
from tdkernels.ops.experts.grouped_gemm.op import group_gemm


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias for x [..., K] and weight [N, K]."""
    if not is_batch_invariant():
        return F.linear(x, weight, bias)
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    splits = torch.full((1,), rows.shape[0], dtype=torch.int32, device=x.device)
    y = group_gemm(rows, weight.unsqueeze(0), splits)
    y = y if bias is None else y + bias
    return y.view(*x.shape[:-1], weight.shape[0])


def linear_of_scaled(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scales: Scales
) -> torch.Tensor:
    """Return ``linear`` of scaled fp8 operands [M, K] and [N, K]; see ``scaling.scaled_linear``."""
    if not is_batch_invariant():
        return scaled_linear(x, weight, bias, scales)
    splits = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
    y = torch.ops.tdkernels.group_gemm_scaled(
        x, weight.unsqueeze(0), splits, scales.x, scales.weight.unsqueeze(0), scales.kind, "", scales.out_dtype,
        scales.use_fast_accum, "",
    )
    return y if bias is None else y + bias
