"""Methods of LlamaForCausalLM of Hugging Face transformers: its own tensor parallelism, ``install``, ``parallelize``.

A decode step writes one token into a StaticCache that is full up to it. The output is the logits of all tokens.
"""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.models.llama import draw_weights
from bench.models.method import Method, call_of, checking_operators, full
from bench.models.reference import generator
from tdkernels.integrations.transformers import installed, parallelize
from tdkernels.launch import rank_device

_WEIGHT_SEED, _INPUT_SEED = 1, 2


@dataclass(frozen=True)
class Prepared:
    """Complete model and inputs, the same on all ranks.

    model:          the complete LlamaForCausalLM
    ids:            tokens [B, S]
    dy:             gradient of the logits
    cache:          the StaticCache of this rank's kv heads in decode, which all methods share; otherwise None
    outputs:        the complete outputs that ``method.OUTPUTS`` names
    """

    case: Any
    model: Any
    ids: torch.Tensor
    dy: torch.Tensor
    cache: Any
    outputs: tuple


def prepare(case):
    """Return the Prepared of a case."""
    model, source, size = _model(case), generator(_INPUT_SEED), case.sizes
    ids = torch.randint(size.vocabulary, case.shape, generator=source, device=rank_device())
    dy = torch.randn(*case.shape, size.vocabulary, generator=source, dtype=case.dtype, device=rank_device())
    complete = _cache(case, model, 1) if case.is_decode else None
    outputs = _method(case, model, ids, dy, complete).call(None)
    model.zero_grad(set_to_none=True)
    cache = _cache(case, model, dist.get_world_size()) if case.is_decode else None
    return Prepared(case, model, ids, dy, cache, outputs)


def build(name, prepared):
    """Return the Method ``name`` of a case."""
    case, model = prepared.case, copy.deepcopy(prepared.model)
    mesh = init_device_mesh(rank_device().type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    if name == "parallelize":
        parallelize(model, mesh, sequence_parallel=not case.is_decode)
    elif name == "install":
        with installed():
            _divide(model, mesh)
    else:
        _divide(model, mesh)
    method = _method(case, model, prepared.ids, prepared.dy, prepared.cache)
    return method if name == "transformers" else dataclasses.replace(method, complete=checking_operators(model, full))


def _divide(model, mesh):
    """Apply the tensor parallelism of transformers, as ``from_pretrained`` does before it loads the weights."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    apply_tensor_parallelism(model, mesh, plan)


def _model(case):
    """Return the complete model with random weights, in training mode, since it has no dropout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = case.sizes
    config = LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=size.intermediate,
        num_hidden_layers=case.layers, num_attention_heads=size.heads, num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim, max_position_embeddings=max(case.tokens, case.context), tie_word_embeddings=False,
        attn_implementation="sdpa", dtype=case.dtype,
    )
    with torch.device(rank_device()):
        model = LlamaForCausalLM._from_config(config, dtype=case.dtype)
    draw_weights(model, generator(_WEIGHT_SEED))
    with torch.no_grad():  # token embeddings of magnitude 1
        model.model.embed_tokens.weight.mul_(size.hidden**0.5)
    return model.train(case.phase == "train")


def _cache(case, model, ranks):
    """Return a StaticCache of the kv heads of this rank among ``ranks``, with random keys and values."""
    from transformers import StaticCache

    size, source = case.sizes, generator(_INPUT_SEED + 1)
    cache = StaticCache(config=model.config, max_cache_len=case.context)
    cache.early_initialization(case.batch, size.kv_heads // ranks, size.head_dim, case.dtype, rank_device())
    shape = case.batch, size.kv_heads, case.context, size.head_dim
    for layer in cache.layers:
        for own in (layer.keys, layer.values):
            complete = torch.randn(*shape, generator=source, dtype=case.dtype, device=rank_device())
            own.copy_(complete.chunk(ranks, 1)[dist.get_rank() if ranks > 1 else 0])
    return cache


def _method(case, model, ids, dy, cache):
    positions = torch.arange(case.positions.start, case.positions.stop, device=rank_device())[None]

    def decode(_):
        for layer in cache.layers:
            layer.cumulative_length.fill_(case.context - 1)
        return model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True).logits

    def forward(_):
        return model(input_ids=ids, use_cache=False).logits

    def gradients():
        layer = model.model.layers[0]
        return layer.input_layernorm.weight.grad, layer.self_attn.q_proj.weight.grad

    call = call_of(case, model, decode if case.is_decode else forward, None, dy, gradients)
    return Method(model, call, dims=(None, None, None), complete=full)
