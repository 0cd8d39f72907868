"""Launch the one-shot kernel of gemm_rs and gemm_ar, for small M, or compile it ahead of time."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.common import gemm_operands, small_m_gemm
from tdkernels.ops.common.scaling import Scales, out_dtype_of
from tdkernels.ops.dense.kernel_one_shot import gemm_one_shot_kernel
from tdkernels.rounding import round_up
from tdkernels.runtime import recorder
from tdkernels.runtime.kernel_launch import Launch, output_spec

if TYPE_CHECKING:
    from tdkernels.symm.workspace import Workspace


def _arguments(ctx, x, weight, bias, z, scratch, plan, world_size, config, scatters, scales):
    """Return the kernel's arguments and constants."""
    m, k = x.shape
    n = weight.shape[0]
    weight, stride_w, x_desc, w_desc, constants = small_m_gemm.product(x, weight, bias, config.tiles, scales)
    constants |= {"SPLIT": config.split_k > 1, "SCATTERS": scatters, "RANKS": world_size}
    args = (
        ctx, x, x_desc, weight, w_desc, bias, *gemm_operands.scale_pointers(scales), z, scratch,
        m, n, k, m // world_size if scatters else m, stride_w, small_m_gemm.k_of_part(k, config.tiles, config.split_k),
        plan, config.split_k,
    )
    return args, constants


def compile(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world_size: int, config: Any, scatters: bool,
    scales: Scales | None = None,
) -> None:
    """Compile the kernel for these operands into Triton's cache, without launching it; arguments as for ``prepare``."""
    x = gemm_operands.rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    scratch = torch.empty(1, dtype=torch.float32, device=x.device)
    z = x.new_empty(1, dtype=out_dtype_of(x, scales))
    args, constants = _arguments(ctx, x, weight, bias, z, scratch, 0, world_size, config, scatters, scales)
    gemm_one_shot_kernel.warmup(*args, grid=(1,), **constants)


def prepare(
    workspace: "Workspace", operator: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    config: Any, fields: Mapping[str, Any], scatters: bool, scales: Scales | None = None,
) -> Launch:
    """Return the Launch for normalized operands.

    ``scatters``: the sum is scattered (gemm_rs) instead of stored on all ranks (gemm_ar). ``operator`` and ``fields``
    as for ``Workspace.prepare``.
    """
    m, n, out_dtype = x.shape[0], weight.shape[0], out_dtype_of(x, scales)
    tiles, ranks = config.tiles, workspace.world_size
    count, owned_rows = tiles.count(m, n), m // ranks if scatters else m
    slot_bytes = owned_rows * round_up(n, tiles.block_n) * out_dtype.itemsize
    plan = workspace.prepare(operator, fields, ranks * slot_bytes, ranks * count, num_flags=count)
    scratch = small_m_gemm.scratch_to_be_made(x, count, tiles, config.split_k)
    z = output_spec(x, owned_rows, n, dtype=out_dtype)
    args, constants = _arguments(workspace.ctx, x, weight, bias, z, scratch, plan, ranks, config, scatters, scales)
    programs = count * config.split_k
    constants["trace_ptr"] = recorder.buffer(x.device, programs)
    operands, made = (x, weight, bias, *gemm_operands.scale_operands(scales)), (z, scratch)
    return Launch(workspace, gemm_one_shot_kernel, (programs,), args, constants, operands, made, [workspace.ctx])
