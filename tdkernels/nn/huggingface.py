"""MoE blocks of transformers 5: what they are made of, and how to put ours in their places. Imports nothing of it."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

# Blocks that are a router with softmax and experts with SwiGLU, and nothing else.
BLOCKS = ("MixtralSparseMoeBlock", "Qwen3MoeSparseMoeBlock")


class Settings(NamedTuple):
    hidden: int
    num_experts: int
    top_k: int
    intermediate: int
    normalize: bool


def settings_of(block):
    """The Settings of a block; ValueError if it is none of BLOCKS or does what our modules do not."""
    kind = type(block).__name__
    if kind not in BLOCKS or not hasattr(block.experts, "gate_up_proj"):
        raise ValueError(
            f"from_hf: {kind} is none of {BLOCKS} of transformers 5; if it computes the same, make a Router and the "
            "module yourself, and load_state_dict"
        )
    at = torch.linspace(-3.0, 3.0, 7, device="cpu")
    if not torch.allclose(block.experts.act_fn(at), F.silu(at)):
        raise ValueError(f"from_hf: the activation of {kind} must be silu, not {block.experts.act_fn}")
    if getattr(block, "jitter_noise", 0.0):
        raise ValueError(f"from_hf: {kind} has a jitter_noise of {block.jitter_noise}, which Router has not")
    num_experts, hidden, intermediate = block.experts.down_proj.shape
    normalize = getattr(block.gate, "norm_topk_prob", True)  # Mixtral always does
    return Settings(hidden, num_experts, block.gate.top_k, intermediate, normalize)


def replace_moe(model, kind, **options):
    """Put an EPMoE or a TPMoE in the place of each MoE block of a model from transformers 5; returns the model.

    Args:
        model: with blocks of Qwen3-MoE or Mixtral, the same on every rank
        kind: EPMoE or TPMoE
        options: of ``kind.from_hf``

    Raises:
        ValueError: if there is no such block in the model

    Each rank then calls the model with tokens of its own, all of them equally often. The blocks' router logits are not
    recorded any more, so output_router_logits and its loss are not to be had.
    """
    blocks = [(name, module) for name, module in model.named_modules() if type(module).__name__ in BLOCKS]
    if not blocks:
        raise ValueError(f"replace_moe: {type(model).__name__} has none of {BLOCKS}")
    for name, block in blocks:
        model.set_submodule(name, kind.from_hf(block, **options))
    return model
