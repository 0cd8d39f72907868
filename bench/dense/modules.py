"""Modules of tdkernels.nn and the operators that they call, for a comparison of host time and memory.

The call of an operator reads the weight and the bias from the module, as the forward of any module does. This takes
about 2 us.
"""

import torch
import torch.distributed as dist

import tdkernels
from tdkernels.launch import rank_device
from tdkernels.nn import ColumnParallelLinear, RowParallelLinear

ROWS, HIDDEN, INNER = 32, 1024, 2048  # of all ranks; small, so that the host time bounds a call
REHEARSAL = 8, 16, 32
BARE, MODULE = "operator", "module"  # method names as stored in rows; with gradients they end in WITH_GRADIENTS
WITH_GRADIENTS = ", gradients"


def methods():
    """Return {module: {method: call}}. The calls of a module have the same operands."""
    device, ranks = rank_device(), dist.get_world_size()
    rows, hidden, inner = (ROWS, HIDDEN, INNER) if device.type == "cuda" else REHEARSAL
    options = {"device": device, "dtype": torch.bfloat16}
    x, h = torch.randn(rows, hidden, **options), torch.randn(rows, inner // ranks, **options)
    cases = {
        "ColumnParallelLinear": (ColumnParallelLinear(hidden, inner, **options), x, tdkernels.column_linear),
        "ColumnParallelLinear, sequence parallel": (
            ColumnParallelLinear(hidden, inner, sequence_parallel=True, **options), x[: rows // ranks].contiguous(),
            tdkernels.ag_gemm,
        ),
        "RowParallelLinear": (RowParallelLinear(inner, hidden, **options), h, tdkernels.gemm_ar),
        "RowParallelLinear, sequence parallel": (
            RowParallelLinear(inner, hidden, sequence_parallel=True, **options), h, tdkernels.gemm_rs,
        ),
    }
    return {name: _calls(*case) for name, case in cases.items()}


def _calls(module, x, operator):
    def bare():
        return operator(x, module.weight, module.bias)

    def call():
        return module(x)

    return {
        BARE: torch.no_grad()(bare), MODULE: torch.no_grad()(call),
        BARE + WITH_GRADIENTS: torch.enable_grad()(bare), MODULE + WITH_GRADIENTS: torch.enable_grad()(call),
    }
