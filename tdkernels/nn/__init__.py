"""torch.nn modules built from the operators: tensor-parallel layers and mixture-of-experts layers."""

from tdkernels.nn.checkpoint import full_state_dict
from tdkernels.nn.huggingface import replace_moe
from tdkernels.nn.linear import ColumnParallelLinear, RowParallelLinear
from tdkernels.nn.moe import EPMoE, TPMoE
from tdkernels.nn.router import Router
from tdkernels.nn.swiglu import SwiGLU

__all__ = [
    "ColumnParallelLinear", "EPMoE", "Router", "RowParallelLinear", "SwiGLU", "TPMoE", "full_state_dict",
    "replace_moe",
]
