"""Launch the backward kernel of flash_decode."""

from typing import TYPE_CHECKING

import torch

from tdkernels.ops.attention.flash_decode.kernel_backward import flash_decode_backward_kernel
from tdkernels.ops.attention.flash_decode.launch import strides_of, tile_of
from tdkernels.ops.attention.tile import LOG2_E
from tdkernels.ops.common import gemm_operands
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu
from tdkernels.runtime.kernel_launch import Launch, launch_cached, local_workspace_of

if TYPE_CHECKING:
    from tdkernels.ops.attention.flash_decode.config import DecodeShape

_MAX_BLOCK_BYTES = 32 << 10  # of a block of keys and values, which the program keeps for all query rows


def _tile(shape, element_size, device):
    """Return (query rows per block, keys per block, warps)."""
    if device.type == "cpu":
        return shape.block_m, 16, 1
    bytes_of_key = (sum(shape.parts_of_d) + shape.padded_dv) * element_size
    block_n = 1 << (_MAX_BLOCK_BYTES // bytes_of_key).bit_length() - 1
    return min(shape.block_m, 32), max(16, min(64, block_n)), 8 if shape.d > 128 else 4


def launch(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_lens: torch.Tensor, after: torch.Tensor,
    block_table: torch.Tensor | None, do: torch.Tensor, lse2: torch.Tensor, delta: torch.Tensor,
    shape: "DecodeShape", options: tuple[float, float | None, int | None],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the backward kernel. Operands not listed here are as for ``launch.launch``.

    Args:
        after: Number of keys on later ranks, [B] int32.
        do: Gradient of o, [B, Tq, Hq, Dv].
        lse2: Log-sum-exp over the keys of all ranks, to base 2, [B, Tq, Hq].
        delta: rowsum(do * o), minus the gradient of lse, [B, Tq, Hq].

    Returns:
        (This rank's part of dq [B, Tq, Hq, D] in fp32, dk [B, capacity, Hkv, D], dv [B, capacity, Hkv, Dv]). dk and dv
        are zero beyond the lengths.
    """
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    splits = _splits(shape, capacity, q)
    dq = torch.zeros(splits, *q.shape, dtype=torch.float32, device=q.device)
    dk = k_cache.new_zeros(shape.batch, capacity, shape.heads, shape.d)
    dv = v_cache.new_zeros(shape.batch, capacity, shape.heads, shape.dv)
    if shape.batch * shape.heads:  # an empty batch launches nothing
        workspace = local_workspace_of(q.device)
        key = "flash_decode backward", shape, options, gemm_operands.dot_precision(q.dtype)
        operands = q, k_cache, v_cache, kv_lens, after, block_table, do, lse2, delta, dq, dk, dv
        launch_cached(workspace, key, operands, lambda *of: _prepare(workspace, of, shape, options, capacity, splits))
    return dq.sum(0), dk, dv


def _splits(shape, capacity, q):
    """Return the number of splits of the keys of a sequence, each computed by separate programs."""
    most = max(1, cdiv(capacity, _tile(shape, q.element_size(), q.device)[1]))
    return min(most, max(1, 4 * gpu.num_sms(q.device) // max(shape.batch * shape.heads, 1)))


def _prepare(workspace, operands, shape, options, capacity, splits):
    q, k_cache, v_cache, kv_lens, _, block_table, *_ = operands
    scale, soft_cap, window = options
    paged = block_table is not None
    block_m, block_n, num_warps = _tile(shape, q.element_size(), q.device)
    args = (
        *operands[:5], block_table if paged else kv_lens, *operands[6:],
        shape.heads, capacity, k_cache.shape[0] if paged else 0,
        scale * LOG2_E.value, scale, (soft_cap or 0.0) * LOG2_E.value, window or 0,
        strides_of(k_cache, v_cache, block_table),
    )
    constants = {
        "TILE": tile_of(shape, block_m, block_n, options, q.dtype), "PAGE": k_cache.shape[1] if paged else 0,
        "num_warps": num_warps, "num_stages": 1,
    }
    grid = shape.batch * shape.heads, splits
    return Launch(workspace, flash_decode_backward_kernel, grid, args, constants, operands, [], [])
