"""Kernels of tdkernels behind torch's asynchronous tensor-parallel operators of scaled fp8 operands.

    operator                              problem on each of W ranks                                        kernel
    fused_all_gather_scaled_matmul        A [M / W, K], Bs [K, N_i] -> A [M, K], A @ B_i * scales [M, N_i]  ag_gemm
    fused_scaled_matmul_reduce_scatter    A [M, K], B [K, N] -> sum or mean of A @ B * scales [M / W, N]    gemm_rs

Scales are fp32:

    scaling               A_scale of the all-gather                       A_scale of the reduce-scatter    B_scale
    tensor-wise           one element, equal on all ranks                 one element                      one element
    row-wise              [..., 1] with the leading dimensions of A       [..., 1], as A                   [1, N]
    row-wise, replicated  [..., 1] with those of the gathered A, equal    -
                          on all ranks

All other calls run torch's kernel.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._symmetric_memory as torch_symm_mem

from tdkernels.integrations.symm_mem_calls import (
    SCALED_GATHER,
    SCALED_SCATTER,
    Served,
    below_autograd,
    check_operands,
    runs_torch,
    torch_calls,
)
from tdkernels.ops.common.scaling import OUT_DTYPES, is_fp8, layout_of
from tdkernels.ops.common.torch_collectives import all_gather_rows
from tdkernels.ops.common.validation import shape_of
from tdkernels.ops.dense.ag_gemm.op import ag_gemm
from tdkernels.ops.dense.gemm_rs.op import gemm_rs
from tdkernels.runtime.torch_op import group_by_name, world_size_by_name

if TYPE_CHECKING:
    import torch.distributed as dist


# ---- validation ----


def _check_not_last(operator, name, dim, dims):
    """Raise ValueError if the last dimension is gathered or scattered, which torch does not support with scales."""
    if dim == dims - 1:
        raise ValueError(f"{operator}: {name} must not be the last dimension, {dim}")


def _check_lists(Bs, lists):
    """Raise ValueError unless each list of fused_all_gather_scaled_matmul has an element for each B."""
    for name, values in lists.items():
        if len(values) != len(Bs):
            raise ValueError(f"{SCALED_GATHER}: {name} must have {len(Bs)} elements, one for each B, not {len(values)}")


def _check_scatter(A, B, reduce_op, orig_dim, output_shape, world_size):
    """Raise ValueError if the arguments of fused_scaled_matmul_reduce_scatter are invalid."""
    op = SCALED_SCATTER
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f'{op}: reduce_op must be "sum" or "avg", not {reduce_op!r}')
    rows, n = A.shape[:-1].numel(), B.shape[1]
    if output_shape is None or len(output_shape) < 2 or [math.prod(output_shape[:-1]), output_shape[-1]] != [rows, n]:
        raise ValueError(
            f"{op}: output_shape, before the scatter, must have {rows} rows and {n} columns for A {shape_of(A)} and B "
            f"{shape_of(B)}, not {output_shape}"
        )
    if not 0 <= orig_dim < len(output_shape):
        raise ValueError(f"{op}: orig_scatter_dim must be at least 0 and less than {len(output_shape)}, not {orig_dim}")
    _check_not_last(op, "orig_scatter_dim", orig_dim, len(output_shape))
    if output_shape[orig_dim] % world_size:
        raise ValueError(
            f"{op}: dimension {orig_dim} of output_shape {list(output_shape)} must be divisible by the group's "
            f"{world_size} ranks"
        )


def _gathered_scale(A, A_scale, dim, group):
    """Return the scale of this rank's rows of A, [rows, 1] or with one element; None if it is not row-wise.

    Raises:
        ValueError: If its shape is invalid.
    """
    lead = A.shape[:-1]
    whole = [size * group.size() if d == dim else size for d, size in enumerate(lead)]
    scale_lead = A_scale.shape[:-1]
    if A_scale.dim() and A_scale.shape[-1] == 1 and scale_lead == lead:
        return A_scale.movedim(dim, 0).reshape(-1, 1)
    if A_scale.numel() == 1:
        return A_scale
    if A_scale.dim() != A.dim() or list(scale_lead) != whole:
        raise ValueError(
            f"{SCALED_GATHER}: A_scale {shape_of(A_scale)} must have one element, the shape {[*lead, 1]} or "
            f"{[*whole, 1]} for A {shape_of(A)} and gather_dim {dim}"
        )
    return A_scale.narrow(dim, group.rank() * lead[dim], lead[dim]).movedim(dim, 0).reshape(-1, A_scale.shape[-1])


def _check_scale_of_rows(A, A_scale):
    """Raise ValueError unless A_scale of fused_scaled_matmul_reduce_scatter has one element or the rows of A."""
    if A_scale.numel() != 1 and A_scale.shape[:-1] != A.shape[:-1]:
        raise ValueError(
            f"{SCALED_SCATTER}: A_scale {shape_of(A_scale)} must have one element or the shape {[*A.shape[:-1], 1]} "
            f"for A {shape_of(A)}"
        )


def _is_row_wise(B, B_scale):
    """Return whether the scale of B [K, N] is tensor-wise or row-wise."""
    return B_scale.numel() == 1 or B_scale.shape == (1, B.shape[1])


def _unsupported_reason(
    A: torch.Tensor, Bs: Sequence[torch.Tensor], A_scale: torch.Tensor, B_scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None], result_scales: Sequence[torch.Tensor | None],
    out_dtypes: Sequence[torch.dtype | None], fast: Sequence[bool],
) -> str | None:
    """Return why tdkernels does not support a valid call, or None. It is the same on all ranks."""
    if not Bs:
        return "Bs is empty"
    dtypes = [tensor.dtype for tensor in (A, *Bs) if not is_fp8(tensor)]
    if dtypes:
        return f"{dtypes[0]} is not supported"
    if any(B.numel() == 0 for B in Bs):
        return "K or N is 0"
    if A.shape[-1] % 16:
        return "K is not a multiple of 16"
    if any(scale is not None for scale in result_scales):
        return "result_scale is given"
    if len(set(out_dtypes)) > 1 or len(set(fast)) > 1:
        return "out_dtypes or use_fast_accum differ"
    if out_dtypes[0] not in OUT_DTYPES:
        return f"out_dtype {out_dtypes[0]} is not supported"
    if any(bias is not None and bias.dtype != out_dtypes[0] for bias in biases):
        return "a bias does not have out_dtype"
    row_wise = A_scale.numel() == 1 or A_scale.shape[-1] == 1
    if not row_wise or not all(map(_is_row_wise, Bs, B_scales)):
        return "the scales are not tensor-wise or row-wise"
    if any(scale.dtype != torch.float32 for scale in (A_scale, *B_scales)):
        return "the scales are not fp32"
    return None


def _served(operator, rows, Bs, A_scale, B_scales, out_dtype, fast, group_name):
    scaling = (*(B.dtype for B in Bs), out_dtype, *(scale.numel() == 1 for scale in (A_scale, *B_scales)))
    n = tuple(B.shape[1] for B in Bs)
    layout = layout_of("row", fast)
    return Served(operator, *rows.shape, n, layout, operator == SCALED_GATHER, rows.dtype, group_name, scaling)


# ---- kernels of the dispatcher ----


@below_autograd
def all_gather_scaled_matmul(
    A: torch.Tensor, Bs: list[torch.Tensor], A_scale: torch.Tensor, B_scales: list[torch.Tensor], gather_dim: int,
    group_name: str, biases: list[torch.Tensor | None], result_scales: list[torch.Tensor | None],
    out_dtypes: list[Any], use_fast_accum: list[bool],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return (gathered A, products), with the strides of torch's kernel."""
    out_dtypes = torch_symm_mem._maybe_convert_scalar_types_to_dtypes(out_dtypes)
    group = group_by_name(group_name)
    check_operands(SCALED_GATHER, A, Bs, "gather_dim", gather_dim, A.shape[-1] if A.dim() else 0)
    _check_not_last(SCALED_GATHER, "gather_dim", gather_dim, A.dim())
    options = biases, result_scales, out_dtypes, use_fast_accum
    names = "B_scales", "biases", "result_scales", "out_dtypes", "use_fast_accum"
    _check_lists(Bs, dict(zip(names, (B_scales, *options), strict=True)))
    own_scale = _gathered_scale(A, A_scale, gather_dim, group)
    moved = A.movedim(gather_dim, 0)
    rows = moved.flatten(0, -2)

    def unflatten(result):
        lead = [group.size() * moved.shape[0], *moved.shape[1:-1]]
        return result.view(*lead, result.shape[1]).movedim(0, gather_dim)

    def by_torch():
        if A.is_cuda:
            kernel = torch_symm_mem._fused_all_gather_scaled_matmul
            return kernel(A, Bs, A_scale, B_scales, gather_dim, group_name, *options)
        gathered, ys = _gather_then_scaled_mm(rows, own_scale, Bs, B_scales, *options, group)
        return unflatten(gathered), [unflatten(y) for y in ys]

    def own():
        scales = [B_scale if B_scale.numel() == 1 else B_scale.t() for B_scale in B_scales]
        ys, gathered = ag_gemm(
            rows, [B.t() for B in Bs], biases, return_gathered=True, scale_x=own_scale, scale_w=scales,
            out_dtype=out_dtypes[0], use_fast_accum=use_fast_accum[0], group=group,
        )
        return unflatten(gathered), [unflatten(y) for y in ys]

    reason = _unsupported_reason(A, Bs, A_scale, B_scales, *options)
    if reason is not None:
        torch_calls[SCALED_GATHER][reason] += 1
        return by_torch()
    served = _served(SCALED_GATHER, rows, Bs, A_scale, B_scales, out_dtypes[0], use_fast_accum[0], group_name)
    return by_torch() if runs_torch(served, A.device, own, by_torch) else own()


def _gather_then_scaled_mm(
    rows: torch.Tensor, scale: torch.Tensor, Bs: list[torch.Tensor], B_scales: list[torch.Tensor],
    biases: list[torch.Tensor | None], result_scales: list[torch.Tensor | None], out_dtypes: list[torch.dtype | None],
    use_fast_accum: list[bool], group: "dist.ProcessGroup",
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run an all-gather and ``torch._scaled_mm``, on a CPU. Gloo gathers no fp8, so it gathers bytes."""
    whole = all_gather_rows(rows.contiguous().view(torch.uint8), group).view(rows.dtype)
    if scale.numel() > 1 or scale.shape == (rows.shape[0], 1):
        scale = all_gather_rows(scale.contiguous(), group)
    each = zip(Bs, B_scales, biases, result_scales, out_dtypes, use_fast_accum, strict=True)
    return whole, [
        torch._scaled_mm(whole, B, scale, B_scale, bias, result_scale, out_dtype=dtype, use_fast_accum=fast)
        for B, B_scale, bias, result_scale, dtype, fast in each
    ]


@below_autograd
def scaled_matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, A_scale: torch.Tensor, B_scale: torch.Tensor, reduce_op: str,
    orig_scatter_dim: int, scatter_dim_after_maybe_reshape: int, group_name: str, output_shape: list[int] | None,
    bias: torch.Tensor | None = None, result_scale: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Return this rank's part of the sum or mean of the scaled A @ B over the ranks. It is contiguous."""
    world_size = world_size_by_name(group_name)
    K = A.shape[-1] if A.dim() else 0
    check_operands(SCALED_SCATTER, A, [B], "scatter_dim_after_maybe_reshape", scatter_dim_after_maybe_reshape, K)
    _check_scatter(A, B, reduce_op, orig_scatter_dim, output_shape, world_size)
    _check_scale_of_rows(A, A_scale)
    shape: list[int] = list(output_shape or ())
    dim = orig_scatter_dim
    moved = A.reshape(*shape[:-1], K).movedim(dim, 0)
    rows = moved.flatten(0, -2)

    def by_torch():
        options = dim, scatter_dim_after_maybe_reshape, group_name, list(shape), bias, result_scale, out_dtype
        if A.is_cuda:
            kernel = torch_symm_mem._fused_scaled_matmul_reduce_scatter
            return kernel(A, B, A_scale, B_scale, reduce_op, *options, use_fast_accum)
        # Gloo has no average.
        kernel = torch_symm_mem._fused_scaled_matmul_reduce_scatter_fallback
        z = kernel(A, B, A_scale, B_scale, "sum", *options, use_fast_accum)
        return z / world_size if reduce_op == "avg" else z

    def own():
        scale = A_scale if A_scale.numel() == 1 else A_scale.reshape(*shape[:-1], 1).movedim(dim, 0).reshape(-1, 1)
        z = gemm_rs(
            rows, B.t(), scale_x=scale, scale_w=B_scale if B_scale.numel() == 1 else B_scale.t(), out_dtype=out_dtype,
            use_fast_accum=use_fast_accum, group=group_by_name(group_name),
        )
        if reduce_op == "avg":
            z.div_(world_size)
        z = z.view(moved.shape[0] // world_size, *moved.shape[1:-1], B.shape[1])
        return z.movedim(0, dim).contiguous()

    reason = "bias is given" if bias is not None else _unsupported_reason(  # torch adds the biases of all ranks
        A, [B], A_scale, [B_scale], [None], [result_scale], [out_dtype], [use_fast_accum]
    )
    if reason is not None:
        torch_calls[SCALED_SCATTER][reason] += 1
        return by_torch()
    served = _served(SCALED_SCATTER, rows, [B], A_scale, [B_scale], out_dtype, use_fast_accum, group_name)
    return by_torch() if runs_torch(served, A.device, own, by_torch) else own()
