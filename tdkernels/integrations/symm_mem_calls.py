"""Shared by the kernels behind torch.ops.symm_mem: validation, counts of calls, and their explanation."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tdkernels.autotune.explain import explain
from tdkernels.integrations.symm_mem_tuning import torch_is_faster
from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.validation import shape_of
from tdkernels.ops.dense.ag_gemm.config import AgGemmConfig
from tdkernels.ops.dense.gemm_rs.config import GemmRsConfig
from tdkernels.runtime.torch_op import group_by_name

GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
SCALED_GATHER, SCALED_SCATTER = "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"
OPERATORS = (GATHER, SCATTER, SCALED_GATHER, SCALED_SCATTER)
FASTER = "torch's kernel is faster"


class Served(NamedTuple):
    """Calls that run on tdkernels: those of one operator that have operands of the same layout.

    Attributes:
        operator: Name of torch's operator.
        rows: Rows of A on a rank.
        k: Columns of A on a rank.
        n: Columns of each B.
        layout: ``layout`` of the tuner's Problem.
        returns_A: Whether the gathered A is returned.
        dtype: dtype of A.
        group_name: Name of the group.
        scaling: For scaled operands: dtype of B, out_dtype, and whether each scale is tensor-wise.
    """

    operator: str
    rows: int
    k: int
    n: tuple[int, ...]
    layout: str
    returns_A: bool
    dtype: torch.dtype
    group_name: str
    scaling: tuple[Any, ...] = ()


# Calls that run on tdkernels, and calls that run torch's kernel by operator and reason.
own_calls: Counter[Served] = Counter()
torch_calls: dict[str, Counter[str]] = {operator: Counter() for operator in OPERATORS}


def clear() -> None:
    """Set all counts to 0."""
    own_calls.clear()
    for calls in torch_calls.values():
        calls.clear()


# ---- for the kernels ----


def check_operands(
    operator: str, A: torch.Tensor, Bs: Sequence[torch.Tensor], dim_name: str, dim: int, K: int,
) -> None:
    """Raise ValueError unless A [..., K] @ B is valid for all Bs and ``dim`` is a dimension of A.

    ``K`` is the number of columns of A in the product. It is larger than in A if the last dimension is gathered.
    """
    if A.dim() < 2:
        raise ValueError(f"{operator}: A must have at least 2 dimensions [rows, K], its shape is {shape_of(A)}")
    if not 0 <= dim < A.dim():
        raise ValueError(f"{operator}: {dim_name} must be at least 0 and less than {A.dim()}, not {dim}")
    for B in Bs:
        if B.dim() != 2:
            raise ValueError(f"{operator}: B must have 2 dimensions [K, N], its shape is {shape_of(B)}")
        if B.shape[0] != K:
            raise ValueError(f"{operator}: B {shape_of(B)} must have {K} rows for A {shape_of(A)}")


def runs_torch(
    served: Served, device: torch.device, own: Callable[[], Any], by_torch: Callable[[], Any]
) -> bool:
    """Count a call that tdkernels supports. Return whether torch's kernel runs, because it was faster in a comparison.

    ``own`` and ``by_torch`` make the call.
    """
    if torch_is_faster(served, device, group_by_name(served.group_name), own, by_torch):
        torch_calls[served.operator][FASTER] += 1
        return True
    own_calls[served] += 1
    return False


def below_autograd(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Disable autograd and autocast in a kernel. They still apply to the operators that a Python kernel calls."""

    @functools.wraps(kernel)
    def call(A: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() or torch.is_autocast_enabled(A.device.type)):
            return kernel(A, *args, **kwargs)  # entering the contexts takes 10 us
        with torch.no_grad(), torch.autocast(A.device.type, enabled=False):
            return kernel(A, *args, **kwargs)

    return call


# ---- explanation ----


def _fixed_config(served, group):
    """Return the config of calls whose config is not selected; None if it is."""
    if served.operator == SCALED_GATHER:  # it returns the gathered A, too
        return AgGemmConfig(method="torch" if group.size() == 1 or spans_nodes(group) else "parts")
    if served.operator == SCALED_SCATTER and spans_nodes(group):
        return GemmRsConfig(method="torch")
    return None


def explained(served: Served) -> str:
    """Return ``tdkernels.explain`` in one line for calls that run on tdkernels."""
    group = group_by_name(served.group_name)
    line = explain(
        "ag_gemm" if served.operator in (GATHER, SCALED_GATHER) else "gemm_rs", (served.rows, served.k),
        (sum(served.n), served.k), dtype=served.dtype, layout=served.layout, group=group,
        config=_fixed_config(served, group),
    ).line()
    return line if len(served.n) == 1 else f"{line}; one gather for N of {', '.join(map(str, served.n))}"
