"""GEMMs on one rank without communication: torch's, or the grouped GEMM kernel in the batch-invariant mode.

torch's GEMM (cuBLAS) selects its kernel by the number of rows, so its results depend on the batch. In the mode, the
kernel of ``group_gemm`` runs with one expert and fixed tiles. A bias is then added to the rounded product.

With ``max_ranks`` of the mode, results have the bits of several ranks: the bias is added before rounding, and operators
whose ranks divide K sum it by a tree (``autotune.invariance``).
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from tdkernels.autotune.invariance import check_leaves, invariant_ranks, is_batch_invariant
from tdkernels.ops.common.config import as_argument
from tdkernels.ops.common.scaling import Scales, scaled_linear
from tdkernels.ops.common.tile_config import invariant_tiles
from tdkernels.ops.experts.grouped_gemm.config import GroupGemmConfig
from tdkernels.ops.experts.grouped_gemm.op import group_gemm

if TYPE_CHECKING:
    from tdkernels.ops.common.tile_config import Tiles


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias for x [..., K] and weight [N, K].

    With a bias it has no gradient if the mode has ``max_ranks``.
    """
    if not is_batch_invariant():
        return F.linear(x, weight, bias)
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    config = GroupGemmConfig(tiles=invariant_tiles(x.dtype, x.device, None, rows.shape[0], weight.shape[0]))
    if invariant_ranks() and bias is not None:
        y = torch.ops.tdkernels.linear_by_tree(rows, weight, bias, 0, as_argument(config))
    else:
        splits = torch.full((1,), rows.shape[0], dtype=torch.int32, device=x.device)
        y = group_gemm(rows, weight.unsqueeze(0), splits, config=config)
        y = y if bias is None else y + bias
    return y.view(*x.shape[:-1], weight.shape[0])


def linear_of_call(
    operator: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: Any
) -> torch.Tensor:
    """Return the output of a GEMM operator in a group of one rank, for x [M, K] and weight [N, K].

    Args:
        operator: "ag_gemm", "gemm_rs" or "gemm_ar". The ranks of the last two divide K.
        x: [M, K].
        weight: [N, K].
        bias: [N] or None.
        config: The config of the call, or None. With ``max_ranks`` its tiles are used, because those of several ranks
            are.

    Raises:
        ValueError: See ``invariance.check_leaves``.
    """
    if not invariant_ranks():
        return linear(x, weight, bias)
    if not x.shape[0]:  # as on several ranks, for every K
        return x.new_empty(0, weight.shape[0])
    tiles: Tiles = (config and config.tiles) or invariant_tiles(x.dtype, x.device, None, x.shape[0], weight.shape[0])
    leaves = 0 if operator == "ag_gemm" else invariant_ranks()
    if leaves:
        check_leaves(operator, 1, weight, tiles.block_k)
    return torch.ops.tdkernels.linear_by_tree(x, weight, bias, leaves, as_argument(GroupGemmConfig(tiles=tiles)))


def linear_of_scaled(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scales: Scales, config: Any = None
) -> torch.Tensor:
    """Return ``linear`` of scaled fp8 operands [M, K] and [N, K]; see ``scaling.scaled_linear``.

    ``config``: as for ``linear_of_call``.
    """
    if not is_batch_invariant():
        return scaled_linear(x, weight, bias, scales)
    splits = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
    tiles = config.tiles if config is not None and invariant_ranks() else None
    y = torch.ops.tdkernels.group_gemm_scaled(
        x, weight.unsqueeze(0), splits, scales.x, scales.weight.unsqueeze(0), scales.kind, "", scales.out_dtype,
        scales.use_fast_accum, "" if tiles is None else as_argument(GroupGemmConfig(tiles=tiles)),
    )
    return y if bias is None else y + bias
