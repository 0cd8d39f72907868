"""torch.nn modules built from the operators, and styles for models that use torch's ``parallelize_module``."""

import importlib
from typing import TYPE_CHECKING, Any

from tdkernels.nn.checkpoint import full_state_dict
from tdkernels.nn.huggingface import replace_moe
from tdkernels.nn.linear import ColumnParallelLinear, RowParallelLinear
from tdkernels.nn.moe import EPMoE, TPMoE
from tdkernels.nn.router import Router
from tdkernels.nn.swiglu import SwiGLU

if TYPE_CHECKING:
    from tdkernels.nn import parallel
    from tdkernels.nn.parallel import parallelize, report

__all__ = [
    "ColumnParallelLinear", "EPMoE", "Router", "RowParallelLinear", "SwiGLU", "TPMoE", "full_state_dict", "parallel",
    "parallelize", "replace_moe", "report",
]


def __getattr__(name: str) -> Any:
    # Imported on first use, because it imports DTensor, which takes a second.
    if name not in ("parallel", "parallelize", "report"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module("tdkernels.nn.parallel")
    return module if name == "parallel" else getattr(module, name)
