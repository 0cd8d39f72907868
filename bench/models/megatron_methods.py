"""Methods of Megatron-Core: a TransformerBlock of its local layers, and of the layers of tdkernels.

The layers are those of Llama: RMSNorm, grouped queries, SwiGLU and rotary embedding, with sequence parallelism.
Megatron's local norm does not support that, so torch's RMSNorm is used. The local attention is not fused: it computes
the S x S scores. The ranks of these methods run nothing but Megatron.
"""

import contextlib
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F

from bench.models.llama import rope_angles, shard
from bench.models.method import Method, call_of, checking_operators, own
from bench.models.reference import llama_reference
from tdkernels.launch import rank_device


class Norm(torch.nn.RMSNorm):
    """RMSNorm with the arguments of Megatron's norms."""

    def __init__(self, config, hidden_size, eps):
        super().__init__(hidden_size, eps, dtype=config.params_dtype, device=rank_device())
        self.weight.sequence_parallel = config.sequence_parallel


def prepare(case):
    """Return the Reference of a case, and initialize Megatron."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns about each missing extension
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(dist.get_world_size())
            if rank_device().type == "cuda":
                random.model_parallel_cuda_manual_seed(1)
            else:  # a rehearsal: Megatron allocates on the current CUDA device, and uses its random numbers
                torch.cuda.current_device = rank_device
                random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    return llama_reference(case)


def build(name, reference):
    """Return the Method ``name`` of the case of a Reference."""
    case = reference.case
    model = _block(case, name == "tdkernels")
    _copy_weights(shard(reference.model, dist.get_rank(), dist.get_world_size()), model, case.sizes)
    x, dy = (own(one, 1).transpose(0, 1).contiguous() for one in (reference.x, reference.dy))
    _, length = case.shape
    mask = torch.ones(length, length, dtype=torch.bool, device=rank_device()).triu(1)[None, None]
    angles = rope_angles(length, case.sizes.head_dim, rank_device())[:, None, None]

    def forward(x):
        return model(hidden_states=x, attention_mask=mask, rotary_pos_emb=angles)

    def gradients():
        layer = model.layers[0]
        return layer.input_layernorm.weight.grad, layer.self_attention.linear_qkv.weight.grad

    def complete(outputs):
        return _complete(outputs, case.sizes)

    ours = name == "tdkernels"
    call = call_of(case, model, forward, x, dy, gradients)
    return Method(model, call, dims=(1, None, 0), complete=checking_operators(model, complete) if ours else complete)


def _complete(outputs, size):
    """Return outputs of Megatron in the layout of a sharded Llama."""
    y, *gradients = outputs
    if not gradients:
        return (y.transpose(0, 1),)
    norm, qkv = gradients
    dist.all_reduce(norm)  # it is that of this rank's tokens
    query = qkv.unflatten(0, (-1, _rows_of_a_group(size)))[:, : -2 * size.head_dim]
    return y.transpose(0, 1), norm, query.flatten(0, 1)


def _rows_of_a_group(size):
    """Return the number of rows of linear_qkv per kv head: those of its query heads, of the key and of the value."""
    return (size.heads // size.kv_heads + 2) * size.head_dim


def _block(case, ours):
    """Return a TransformerBlock of this rank, whose weights are not initialized."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tdkernels.integrations import megatron

    size = case.sizes
    config = TransformerConfig(
        num_layers=case.layers, hidden_size=size.hidden, ffn_hidden_size=size.intermediate,
        num_attention_heads=size.heads, num_query_groups=size.kv_heads, kv_channels=size.head_dim,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
        attention_dropout=0.0, hidden_dropout=0.0, tensor_model_parallel_size=case.ranks, sequence_parallel=True,
        params_dtype=case.dtype, bf16=case.dtype == torch.bfloat16, perform_initialization=False,
        use_cpu_initialization=rank_device().type == "cpu",
        masked_softmax_fusion=False,  # it needs an extension of Megatron
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    spec = TransformerBlockSubmodules(layer_specs=[layer] * case.layers, layer_norm=Norm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        block = TransformerBlock(config, megatron.layer_spec(spec) if ours else spec)
    return block.to(rank_device())


@torch.no_grad()
def _copy_weights(part, block, size):
    """Copy the weights of a sharded Llama to a TransformerBlock."""
    block.final_layernorm.weight.copy_(part.norm.weight)
    for ours, layer in zip(part.layers, block.layers, strict=True):
        attention, feed_forward = ours.attention, ours.feed_forward
        by_group = [
            one.weight.unflatten(0, (-1, rows)) for one, rows in (
                (attention.wq, _rows_of_a_group(size) - 2 * size.head_dim), (attention.wk, size.head_dim),
                (attention.wv, size.head_dim),
            )
        ]
        layer.self_attention.linear_qkv.weight.copy_(torch.cat(by_group, 1).flatten(0, 1))
        layer.self_attention.linear_proj.weight.copy_(attention.wo.weight)
        layer.mlp.linear_fc1.weight.copy_(torch.cat((feed_forward.w1.weight, feed_forward.w3.weight)))
        layer.mlp.linear_fc2.weight.copy_(feed_forward.w2.weight)
        layer.input_layernorm.weight.copy_(ours.attention_norm.weight)
        layer.pre_mlp_layernorm.weight.copy_(ours.feed_forward_norm.weight)
