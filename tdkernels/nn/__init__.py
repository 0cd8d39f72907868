"""torch.nn modules built from the operators: mixture-of-experts layers for existing models."""

from tdkernels.nn.checkpoint import full_state_dict
from tdkernels.nn.huggingface import replace_moe
from tdkernels.nn.moe import EPMoE, TPMoE
from tdkernels.nn.router import Router

__all__ = ["EPMoE", "Router", "TPMoE", "full_state_dict", "replace_moe"]
