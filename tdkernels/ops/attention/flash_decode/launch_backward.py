"""Launch the backward kernel of flash_decode."""

import torch

from tdkernels.ops.attention.flash_decode.kernel_backward import flash_decode_backward_kernel
from tdkernels.ops.attention.flash_decode.launch import strides_of, tile_of
from tdkernels.ops.attention.tile import LOG2_E
from tdkernels.ops.common import gemm_operands
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu
from tdkernels.runtime.kernel_launch import Launch, launch_cached, local_workspace_of

_MAX_BLOCK_BYTES = 32 << 10  # of a block of keys and values, which stay with the program


def _tile(shape, element_size, device):
    """(query rows, keys, warps) of a program at a time."""
    if device.type == "cpu":
        return shape.block_m, 16, 1
    bytes_of_key = (sum(shape.parts_of_d) + shape.padded_dv) * element_size
    block_n = 1 << (_MAX_BLOCK_BYTES // bytes_of_key).bit_length() - 1
    return min(shape.block_m, 32), max(16, min(64, block_n)), 8 if shape.d > 128 else 4


def launch(q, k_cache, v_cache, kv_lens, after, block_table, do, lse2, delta, shape, options):
    """(this rank's part of dq [B, Tq, Hq, D] in fp32; dk, dv [B, capacity, Hkv, …], zeros beyond the lengths).

    Args:
        after: [B] int32, how many keys later ranks have
        lse2: of all ranks, to base 2; the rest as for ``flash_decode_launch.launch``
    """
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    splits = _splits(shape, capacity, q)
    dq = torch.zeros(splits, *q.shape, dtype=torch.float32, device=q.device)
    dk = k_cache.new_zeros(shape.batch, capacity, shape.heads, shape.d)
    dv = v_cache.new_zeros(shape.batch, capacity, shape.heads, shape.dv)
    if shape.batch * shape.heads:  # else there are no sequences
        workspace = local_workspace_of(q.device)
        key = "flash_decode backward", shape, options, gemm_operands.dot_precision(q.dtype)
        operands = q, k_cache, v_cache, kv_lens, after, block_table, do, lse2, delta, dq, dk, dv
        launch_cached(workspace, key, operands, lambda *of: _prepare(workspace, of, shape, options, capacity, splits))
    return dq.sum(0), dk, dv


def _splits(shape, capacity, q):
    """Into how many parts the keys of a sequence go, each for programs of its own."""
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
