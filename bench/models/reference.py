"""The complete Llama of a case on one rank, its inputs, and the outputs that sharded models are compared with."""

from dataclasses import dataclass
from typing import Any

import torch

from bench.models.llama import Cache, Llama, draw_weights, rope_angles
from bench.models.method import Method, call_of
from tdkernels.launch import rank_device

_WEIGHT_SEED, _INPUT_SEED = 1, 2


@dataclass(frozen=True)
class Reference:
    """Complete model and inputs, the same on all ranks.

    model:      the complete Llama
    rope:       (cos, sin) of the positions of x
    x, dy:      input and gradient of the output, [B, S, hidden]
    caches:     one complete Cache per layer in decode, otherwise None
    outputs:    the complete outputs that ``method.OUTPUTS`` names
    """

    case: Any
    model: Llama
    rope: tuple
    x: torch.Tensor
    dy: torch.Tensor
    caches: list | None
    outputs: tuple


def generator(seed):
    """Return a generator that draws the same numbers on all ranks."""
    return torch.Generator(rank_device()).manual_seed(seed)


def llama_reference(case):
    """Return the Reference of a case."""
    size, device = case.sizes, rank_device()
    with torch.device("meta"):
        model = Llama(size, case.layers)
    model = model.to(case.dtype).to_empty(device=device)
    draw_weights(model, generator(_WEIGHT_SEED))
    source = generator(_INPUT_SEED)

    def draw(*shape):
        return torch.randn(*shape, generator=source, dtype=case.dtype, device=device)

    angles = rope_angles(case.positions.stop, size.head_dim, device)[case.positions]
    rope = angles.cos().to(case.dtype), angles.sin().to(case.dtype)
    x, dy = draw(*case.shape, size.hidden), draw(*case.shape, size.hidden)
    caches = None
    if case.is_decode:
        keys = case.batch, size.kv_heads, case.context, size.head_dim
        caches = [Cache(draw(*keys), draw(*keys)) for _ in range(case.layers)]
    outputs = llama_method(case, model, x, dy, rope, caches).call(None)
    model.zero_grad(set_to_none=True)
    return Reference(case, model, rope, x, dy, caches, outputs)


def llama_method(case, model, x, dy, rope, caches, call_model=None, **options):
    """Return the Method of a Llama that gets x, and in training dy.

    Args:
        call_model: the model, or a compiled form of it.
        options: the other fields of the Method; ``dims`` are those of complete outputs, unless given.
    """
    call_model = model if call_model is None else call_model
    options = {"dims": (None, None, None), **options}

    def forward(x):
        return call_model(x, rope, caches)

    def gradients():
        layer = model.layers[0]
        return layer.attention_norm.weight.grad, layer.attention.wq.weight.grad

    return Method(model, call_of(case, model, forward, x, dy, gradients), **options)
