"""Launch the one-shot kernel of ag_gemm, for small M, or compile it ahead of time."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.collectives.async_all_gather import rows_of_buffer, slot_rows_of
from tdkernels.ops.common import gemm_operands, small_m_gemm
from tdkernels.ops.common.scaling import Scales, out_dtype_of, row_bytes
from tdkernels.ops.dense.ag_gemm.kernel_one_shot import ag_gemm_one_shot_kernel
from tdkernels.rounding import cdiv
from tdkernels.runtime import recorder
from tdkernels.runtime.kernel_launch import Launch, output_spec

if TYPE_CHECKING:
    from tdkernels.ops.dense.ag_gemm.config import AgGemmConfig
    from tdkernels.symm.workspace import Workspace

_COPY_BLOCK = 2048  # elements
_LEAST_PUSH_BYTES = 4096  # minimum share of a shard that a program pushes
# Columns of the weight that are prefetched to L2 while the rows arrive. With a tile of 64 rows of the weight on each of
# 132 SMs this is 17 MB, about what the memory delivers in the 4 us until the rows arrive.
_PREFETCH_COLUMNS = 1024


def _slot_rows(x):
    """Return the rows per slot of the buffer: the shard's rows, if slots then begin at multiples of 16 bytes."""
    rows = x.shape[0]
    return rows if x.shape[1] * x.element_size() % 16 == 0 else slot_rows_of(rows)


def _num_pushers(x, config):
    return max(1, min(config.num_comm_sms, cdiv(x.nbytes, _LEAST_PUSH_BYTES)))


def _arguments(ctx, x, gathered, weight, bias, y, scratch, plan, config, scales):
    """Return the kernel's arguments and constants; ``gathered`` as in ``launch._arguments``."""
    tiles = config.tiles
    rows, k = x.shape
    n = weight.shape[0]
    weight, stride_w, _, w_desc, constants = small_m_gemm.product(x, weight, bias, tiles, scales)
    gathered_desc = None
    if constants["PRODUCT"].use_tma:
        gathered_desc = gemm_operands.rows_descriptor(*gathered, tiles.block_m, tiles.block_k)
    pushers = _num_pushers(x, config)
    share = cdiv(x.numel(), 16 * pushers) * 16
    args = (
        ctx, x, gathered_desc, weight, w_desc, bias, *gemm_operands.scale_pointers(scales), y, scratch,
        rows, n, k, stride_w, _slot_rows(x), small_m_gemm.k_of_part(k, tiles, config.split_k), share, plan, pushers,
        config.split_k,
    )
    prefetch = _PREFETCH_COLUMNS if gemm_operands.tma_fits(x, weight) else 0  # the TMA engine executes the prefetch
    return args, {"COPY_BLOCK": _COPY_BLOCK, "PREFETCH": prefetch, "SPLIT": config.split_k > 1, **constants}


def compile(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: "AgGemmConfig",
    scales: Scales | None = None,
) -> None:
    """Compile the kernel for these operands into Triton's cache, without launching it."""
    x = gemm_operands.rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    y = x.new_empty(1, weight.shape[0], dtype=out_dtype_of(x, scales))
    scratch = torch.empty(1, dtype=torch.float32, device=x.device)
    args, constants = _arguments(ctx, x, (x, 2, x.shape[0], x.numel()), weight, bias, y, scratch, 0, config, scales)
    ag_gemm_one_shot_kernel.warmup(*args, grid=(1,), **constants)


def prepare(
    workspace: "Workspace", x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: Any,
    fields: Mapping[str, Any], scales: Scales | None = None,
) -> Launch:
    """Return the Launch for normalized operands; ``fields`` as for ``Workspace.prepare``."""
    rows, k = x.shape
    n = weight.shape[0]
    tiles, ranks = config.tiles, workspace.world_size
    slot_rows = _slot_rows(x)
    count = cdiv(ranks * slot_rows, tiles.block_m) * cdiv(n, tiles.block_n)
    pushers = _num_pushers(x, config)
    slot_bytes = slot_rows * k * x.element_size()
    plan = workspace.prepare(
        "ag_gemm", fields, ranks * (slot_bytes + slot_rows * row_bytes(scales)), ranks * pushers, num_flags=count,
        slot_bytes=slot_bytes,
    )
    first = rows_of_buffer(workspace, x)
    gathered = first, 2, ranks * slot_rows, workspace.half_bytes // x.element_size()
    scratch = small_m_gemm.scratch_to_be_made(x, count, tiles, config.split_k)
    y = output_spec(x, ranks * rows, n, dtype=out_dtype_of(x, scales))
    args, constants = _arguments(workspace.ctx, x, gathered, weight, bias, y, scratch, plan, config, scales)
    programs = pushers + count * config.split_k
    constants["trace_ptr"] = recorder.buffer(x.device, programs)
    operands, made = (x, weight, bias, *gemm_operands.scale_operands(scales)), (y, scratch)
    fixed = [workspace.ctx, first]
    return Launch(workspace, ag_gemm_one_shot_kernel, (programs,), args, constants, operands, made, fixed)
