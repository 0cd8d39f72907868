"""Kernels of tdkernels behind torch's asynchronous tensor-parallel operators, torch.ops.symm_mem.

    operator                              problem on each of W ranks                                 kernel
    fused_all_gather_matmul               A [M / W, K], Bs [K, N_i] -> A [M, K], A @ B_i [M, N_i]    ag_gemm
    fused_matmul_reduce_scatter           A [M, K], B [K, N] -> sum or mean of A @ B [M / W, N]      gemm_rs
    fused_all_gather_scaled_matmul        the same for scaled fp8 operands                           ag_gemm
    fused_scaled_matmul_reduce_scatter    the same for scaled fp8 operands                           gemm_rs

A may have more dimensions, of which any but the last is gathered or scattered.

``torch.compile`` (``torch._inductor.config._micro_pipeline_tp``) and torchtitan (``torchtitan.distributed.linear``)
call these operators. After ``install()`` such programs run on tdkernels without a change. CPU tensors are supported,
too; torch has no CPU kernel for these operators.

A call runs torch's kernel if the last dimension is gathered or scattered, the dtype is not bf16, fp16 or fp32, A and B
differ in dtype, Bs is empty, or K or N is 0. On a CPU it runs functional collectives and torch.matmul. ``counts()``
returns the number of these calls by reason, and ``explain()`` shows the configs of the others. All ranks must pass the
same shapes and dtypes; in torch B may differ.

In the tuning mode "on" (``tdkernels.autotune.set_mode``) the first call with new shapes on a GPU times torch's kernel,
too, and later calls run the faster one.

The scaled pair runs on tdkernels for tensor-wise and row-wise scales (``symm_mem_scaled``). A call of it runs torch's
kernel if A or B is not fp8, K is not a multiple of 16, K or N is 0, Bs is empty, a scale is block-wise or not fp32,
``result_scale`` is given, out_dtype is not bf16, fp16 or fp32, a bias has another dtype, or the Bs differ in out_dtype
or use_fast_accum. So does a reduce-scatter with a bias, because torch adds the biases of all ranks. On a CPU they
run ``torch._scaled_mm``. Replicated scales must be equal on all ranks. The last dimension is an invalid argument.

Example:
    from tdkernels.integrations import symm_mem

    symm_mem.install()
    loss = model(x)
    print(symm_mem.counts())
"""

import contextlib
import re
import warnings
from collections import Counter
from typing import Any

import torch
import torch.distributed._symmetric_memory as torch_symm_mem

from tdkernels.integrations.installation import during_block
from tdkernels.integrations.symm_mem_calls import (
    GATHER,
    OPERATORS,
    SCALED_GATHER,
    SCALED_SCATTER,
    SCATTER,
    Served,
    below_autograd,
    check_operands,
    clear,
    explained,
    own_calls,
    runs_torch,
    torch_calls,
)
from tdkernels.integrations.symm_mem_scaled import all_gather_scaled_matmul, scaled_matmul_reduce_scatter
from tdkernels.integrations.symm_mem_tuning import forget
from tdkernels.ops.common.gemm_operands import is_stored_kn
from tdkernels.ops.common.validation import DTYPES, shape_of
from tdkernels.ops.dense.ag_gemm.op import ag_gemm
from tdkernels.ops.dense.gemm_rs.op import gemm_rs
from tdkernels.runtime.torch_op import group_by_name, world_size_by_name

_KEYS = ("CUDA", "CPU")

_library: torch.library.Library | None = None


# ---- validation ----


def _check_scatter(A, B, reduce_op, scatter_dim, world_size):
    """Raise ValueError if the arguments of fused_matmul_reduce_scatter are invalid."""
    check_operands(SCATTER, A, [B], "scatter_dim", scatter_dim, A.shape[-1] if A.dim() else 0)
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f'{SCATTER}: reduce_op must be "sum" or "avg", not {reduce_op!r}')
    name, tensor, dim = ("B", B, 1) if scatter_dim == A.dim() - 1 else ("A", A, scatter_dim)
    if tensor.shape[dim] % world_size:
        raise ValueError(
            f"{SCATTER}: dimension {dim} of {name} {shape_of(tensor)} must be divisible by the group's {world_size} "
            f"ranks"
        )


def _unsupported_reason(A, Bs, dim_name, dim):
    """Return why tdkernels does not support a valid call, or None. It is the same on all ranks."""
    if not Bs:
        return "Bs is empty"
    if dim == A.dim() - 1:
        return f"{dim_name} is the last dimension"
    if any(B.dtype != A.dtype for B in Bs):
        return "A and B have different dtypes"
    if A.dtype not in DTYPES:
        return f"{A.dtype} is not supported"
    if any(B.numel() == 0 for B in Bs):
        return "K or N is 0"
    return None


def _served(operator, rows, weights, returns_A, group_name):
    n = tuple(weight.shape[0] for weight in weights)
    layout = "kn" if is_stored_kn(weights[0]) else "nk"
    return Served(operator, *rows.shape, n, layout, returns_A, rows.dtype, group_name)


# ---- kernels of the dispatcher ----


def _torch_all_gather_matmul(A, Bs, gather_dim, group_name, return_A):
    """Run torch's kernel; on a CPU, an all-gather and one product per B."""
    kernel = torch_symm_mem._fused_all_gather_matmul if A.is_cuda else torch_symm_mem._fused_all_gather_matmul_fallback
    return kernel(A, Bs, gather_dim, group_name, return_A=return_A)


def _torch_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name, world_size):
    """Run torch's kernel; on a CPU, a product and a reduce-scatter."""
    if A.is_cuda:
        return torch_symm_mem._fused_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name)
    # Gloo has no average.
    z = torch_symm_mem._fused_matmul_reduce_scatter_fallback(A, B, "sum", scatter_dim, group_name)
    return z / world_size if reduce_op == "avg" else z


@below_autograd
def _all_gather_matmul(
    A: torch.Tensor, Bs: list[torch.Tensor], gather_dim: int, group_name: str, *, return_A: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Return (gathered A or None, products), with the strides of torch's kernel."""
    group = group_by_name(group_name)
    K = A.shape[-1] if A.dim() else 0
    check_operands(GATHER, A, Bs, "gather_dim", gather_dim, K * group.size() if gather_dim == A.dim() - 1 else K)
    reason = _unsupported_reason(A, Bs, "gather_dim", gather_dim)
    if reason is not None:
        torch_calls[GATHER][reason] += 1
        return _torch_all_gather_matmul(A, Bs, gather_dim, group_name, return_A)
    moved = A.movedim(gather_dim, 0)
    rows, weights = moved.flatten(0, -2), [B.t() for B in Bs]

    def unflatten(result):
        lead = [group.size() * moved.shape[0], *moved.shape[1:-1]]
        return result.view(*lead, result.shape[1]).movedim(0, gather_dim)

    def own():
        if return_A:
            ys, gathered = ag_gemm(rows, weights, return_gathered=True, group=group)
            return unflatten(gathered), [unflatten(y) for y in ys]
        ys = [ag_gemm(rows, weights[0], group=group)] if len(weights) == 1 else ag_gemm(rows, weights, group=group)
        return None, [unflatten(y) for y in ys]

    by_torch = lambda: _torch_all_gather_matmul(A, Bs, gather_dim, group_name, return_A)  # noqa: E731
    served = _served(GATHER, rows, weights, return_A, group_name)
    return by_torch() if runs_torch(served, A.device, own, by_torch) else own()


@below_autograd
def _matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str,
) -> torch.Tensor:
    """Return this rank's part of the sum or mean of A @ B over the ranks. It is contiguous, as torch's result."""
    world_size = world_size_by_name(group_name)
    _check_scatter(A, B, reduce_op, scatter_dim, world_size)
    reason = _unsupported_reason(A, [B], "scatter_dim", scatter_dim)
    if reason is not None:
        torch_calls[SCATTER][reason] += 1
        return _torch_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name, world_size)
    moved = A.movedim(scatter_dim, 0)
    rows, weight = moved.flatten(0, -2), B.t()

    def own():
        z = gemm_rs(rows, weight, group=group_by_name(group_name))
        if reduce_op == "avg":
            z.div_(world_size)
        z = z.view(moved.shape[0] // world_size, *moved.shape[1:-1], B.shape[1])
        return z.movedim(0, scatter_dim).contiguous()

    by_torch = lambda: _torch_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name, world_size)  # noqa: E731
    served = _served(SCATTER, rows, [weight], False, group_name)
    return by_torch() if runs_torch(served, A.device, own, by_torch) else own()


_KERNELS = {
    GATHER: _all_gather_matmul, SCATTER: _matmul_reduce_scatter,
    SCALED_GATHER: all_gather_scaled_matmul, SCALED_SCATTER: scaled_matmul_reduce_scatter,
}


# ---- installation ----


def _registrations(operator: str, key: str) -> list[str]:
    """Return the sources of the kernels that are registered for a dispatch key, the active kernel first."""
    dump = torch._C._dispatch_dump(f"symm_mem::{operator}")
    return re.findall(rf"^{key}(?: \(inactive\))?: registered at (.*?) ::", dump, re.MULTILINE)


def _warn_about_other_overrides() -> None:
    """Warn if another library has registered a kernel that ``install`` replaces."""
    source = torch_symm_mem.__file__
    for operator in _KERNELS:
        for key in _KEYS:
            others = [place for place in _registrations(operator, key) if not place.startswith(f"{source}:")]
            if others:
                warnings.warn(
                    f"tdkernels replaces the {key} kernel of symm_mem::{operator} that was registered at "
                    f"{', '.join(others)}; calls that tdkernels does not support run torch's own kernel",
                    UserWarning, stacklevel=3,
                )


def install() -> None:
    """Register the kernels of tdkernels for torch.ops.symm_mem, on CUDA and CPU, in this process.

    The operators are ``fused_all_gather_matmul``, ``fused_matmul_reduce_scatter`` and their forms for scaled fp8
    operands. Results have the shapes and the strides of torch's kernels. A mean is the sum in the dtype of the output,
    divided by W: a fp16 sum may overflow where torch's mean does not. The operators have no gradient, as in torch:
    callers wrap them in an autograd.Function. A second call does nothing. Counts start at 0.

    Warns:
        UserWarning: If another library has registered a kernel for one of the operators. tdkernels replaces it until
            ``uninstall``.

    Contract:
        Local. All ranks must call it before the first call of an operator, because the kernels of tdkernels and torch
        do not communicate with each other. Calls of the operators are collective, as ``ag_gemm`` and ``gemm_rs``, and
        raise their errors. An invalid argument is a ValueError that names it, raised before anything is launched.

    Source:
        Asynchronous tensor parallelism in torch (torch.distributed._symmetric_memory).
    """
    global _library
    if _library is not None:
        return
    _warn_about_other_overrides()
    forget()
    clear()
    library = torch.library.Library("symm_mem", "IMPL")
    with warnings.catch_warnings():
        # torch warns about the first override in a process, even with allow_override.
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid", category=UserWarning)
        for operator, kernel in _KERNELS.items():
            for key in _KEYS:
                library.impl(operator, kernel, key, allow_override=True)
    _library = library


def uninstall() -> None:
    """Remove the kernels of tdkernels, so that the previously registered kernels are active again.

    That is torch's kernel for CUDA, or that of another library, and none for CPU. It does nothing if they are not
    installed. ``counts`` keeps its values.
    """
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


def installed() -> contextlib.AbstractContextManager[None]:
    """Install the kernels for a ``with`` block. If they are installed already, they stay so after the block.

    Example:
        with symm_mem.installed():
            y = compiled(x)
    """
    return during_block(install, uninstall, lambda: _library is not None)


def counts() -> dict[str, dict[str, Any]]:
    """Return how many calls ran on tdkernels and how many on torch since ``install``, on this rank.

    Calls are counted on the host, so replays of a CUDA graph are not. Calls with invalid arguments are not, either.

    Returns:
        A dict for each operator: "tdkernels" is a number, "torch" is a dict {reason: number}. For example
        ``{"fused_all_gather_matmul": {"tdkernels": 3, "torch": {"gather_dim is the last dimension": 1}}, ...}``.
    """
    own = Counter({operator: 0 for operator in OPERATORS})
    for served, number in own_calls.items():
        own[served.operator] += number
    return {operator: {"tdkernels": own[operator], "torch": dict(torch_calls[operator])} for operator in OPERATORS}


def explain() -> str:
    """Return how the calls since ``install`` were served, for reading: one line for each layout of the operands.

    A line has the number of calls and ``tdkernels.explain`` of the call: the method and config that it runs with, their
    source, and the expected time. Calls on torch's kernel have the reason. Local; ``counts`` returns the numbers.

    Example:
        >>> print(symm_mem.explain())
        fused_all_gather_matmul
            320 x ag_gemm 8192x7168x8192 bfloat16 nk on 8 x NVIDIA H100 80GB HBM3: fused (shipped), ...
              1 x torch's kernel: gather_dim is the last dimension
        fused_matmul_reduce_scatter: not called
        fused_all_gather_scaled_matmul: not called
        fused_scaled_matmul_reduce_scatter: not called
    """
    lines = []
    for operator in OPERATORS:
        own = [(number, served) for served, number in own_calls.items() if served.operator == operator]
        by_torch = [(number, f"torch's kernel: {reason}") for reason, number in torch_calls[operator].items()]
        lines.append(operator if own or by_torch else f"{operator}: not called")
        for number, text in [(number, explained(served)) for number, served in own] + by_torch:
            lines.append(f"{number:7} x {text}")
    return "\n".join(lines)
