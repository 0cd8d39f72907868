"""Replace the MoE blocks of transformers 5 models by EPMoE or TPMoE. This module does not import transformers."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

# Supported blocks: a softmax router and SwiGLU experts, without shared experts or other parts.
BLOCKS = ("MixtralSparseMoeBlock", "Qwen3MoeSparseMoeBlock")


class Settings(NamedTuple):
    """Sizes and options of a MoE block; ``normalize`` says whether the weights of a token are divided by their sum."""

    hidden: int
    num_experts: int
    top_k: int
    intermediate: int
    normalize: bool


def settings_of(block: Any) -> Settings:
    """Return the Settings of a MoE block.

    Raises:
        ValueError: If the block is not one of BLOCKS, or has a feature that the modules do not support.
    """
    kind = type(block).__name__
    if kind not in BLOCKS or not hasattr(block.experts, "gate_up_proj"):
        raise ValueError(
            f"from_hf: {kind} is none of {BLOCKS} of transformers 5; if it computes the same, create a Router and the "
            "module yourself, and call load_state_dict"
        )
    at = torch.linspace(-3.0, 3.0, 7, device="cpu")
    if not torch.allclose(block.experts.act_fn(at), F.silu(at)):
        raise ValueError(f"from_hf: the activation of {kind} must be silu, not {block.experts.act_fn}")
    if getattr(block, "jitter_noise", 0.0):
        raise ValueError(f"from_hf: {kind} has a jitter_noise of {block.jitter_noise}, which Router does not support")
    num_experts, hidden, intermediate = block.experts.down_proj.shape
    normalize = getattr(block.gate, "norm_topk_prob", True)  # Mixtral always does
    return Settings(hidden, num_experts, block.gate.top_k, intermediate, normalize)


def replace_moe(model: torch.nn.Module, kind: type[Any], **options: Any) -> torch.nn.Module:
    """Replace each MoE block of a transformers 5 model by an EPMoE or a TPMoE, in place.

    Afterwards each rank calls the model with its own tokens, and all ranks must call it equally often. The modules do
    not record router logits, so ``output_router_logits`` and its loss are not available.

    Args:
        model: Model with the MoE blocks of Qwen3-MoE or Mixtral, the same on every rank.
        kind: EPMoE or TPMoE.
        options: Keyword arguments of ``kind.from_hf``.

    Returns:
        The model.

    Raises:
        ValueError: If the model has no such block, or ``kind.from_hf`` does not support one.

    Example:
        >>> model = tdkernels.nn.replace_moe(model, tdkernels.nn.EPMoE)
    """
    blocks = [(name, module) for name, module in model.named_modules() if type(module).__name__ in BLOCKS]
    if not blocks:
        raise ValueError(f"replace_moe: {type(model).__name__} has none of {BLOCKS}")
    for name, block in blocks:
        model.set_submodule(name, kind.from_hf(block, **options))
    return model
