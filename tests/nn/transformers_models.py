"""Test bodies for transformers models with EPMoE and TPMoE layers. Every rank runs them."""

import copy

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels.nn import EPMoE, full_state_dict, replace_moe
from tests.nn.moe_modules import KINDS, compare, shard_of
from tests.support.dense_oracle import relative_error
from tests.support.ranks import device

SEQUENCES, LENGTH, VOCABULARY = 2, 3, 32
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=16, num_experts_per_tok=2, tie_word_embeddings=False,
)


def config_of(model, **changes):
    import transformers  # a slow import

    if model == "mixtral":
        return transformers.MixtralConfig(**{**SIZES, "num_local_experts": 4, **changes})
    sizes = {**SIZES, "num_experts": 4, "moe_intermediate_size": 16, "norm_topk_prob": True}
    return transformers.Qwen3MoeConfig(**{**sizes, **changes})


def causal_lm(config):
    """Return a small model with random weights, the same on every rank; all experts differ."""
    import transformers

    kind = {"mixtral": transformers.MixtralForCausalLM, "qwen3_moe": transformers.Qwen3MoeForCausalLM}
    torch.manual_seed(0)
    model = kind[config.model_type](config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def forward_and_backward(model, ids, d_logits):
    logits = model(input_ids=ids, use_cache=False).logits
    logits.backward(d_logits)
    return {"logits": logits.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def assert_same(name, got, expected):
    """Compare two fp32 computations through two layers; tests/nn/test_moe.py tests the accuracy of each layer."""
    error = relative_error(got, expected.double())
    assert error < 1e-5, f"{name}: {error:.3g}"


def matches_transformers(kind, name):
    """Compare logits and the gradients of all parameters with transformers, and the saved state dict."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = causal_lm(config_of(name))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (world_size, SEQUENCES, LENGTH), generator=generator)
    d_logits = torch.randn(*ids.shape, VOCABULARY, generator=generator)
    expected = forward_and_backward(copy.deepcopy(whole), ids.flatten(0, 1), d_logits.flatten(0, 1))
    sharded = replace_moe(copy.deepcopy(whole), KINDS[kind]).to(device())
    got = forward_and_backward(sharded, ids[rank].to(device()), d_logits[rank].to(device()))
    tdkernels.synchronize()
    mine = slice(rank * SEQUENCES, (rank + 1) * SEQUENCES)
    assert_same("logits", got.pop("logits"), expected.pop("logits")[mine])
    for parameter, gradient in got.items():
        layer, _, last = parameter.rpartition(".")
        if last in ("w_gate_up", "w_down"):
            parts = shard_of(kind, *(expected[f"{layer}.experts.{weight}"] for weight in ("gate_up_proj", "down_proj")))
            reference = parts[last == "w_down"]
        else:
            dist.all_reduce(gradient)  # each rank has the gradient from its own tokens
            reference = expected[parameter]
        assert_same(f"gradient of {parameter}", gradient, reference)

    saved = full_state_dict(sharded)
    assert {*saved} == {*whole.state_dict()}
    for parameter, weight in whole.state_dict().items():
        assert torch.equal(saved[parameter].cpu(), weight), parameter


def converts_a_block(normalize):
    """Convert one block, in bf16, with its router settings and weights, and compare the outputs."""
    config = config_of("qwen3_moe", norm_topk_prob=normalize)
    block = causal_lm(config).to(torch.bfloat16).model.layers[0].mlp.eval()
    module = EPMoE.from_hf(block, max_tokens=64).to(device())
    assert module.max_tokens == 64 and not module.training and module.w_down.dtype == torch.bfloat16
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        y = module(x.to(torch.bfloat16).to(device()))
        low = block(x.to(torch.bfloat16))
        exact = block.to(torch.float32)(x.to(torch.bfloat16).float())
    compare("y", y, exact.double(), low)


def loads_safetensors(name, folder):
    """Load safetensors files by checkpoint names into a model on the meta device, and save it again."""
    from safetensors.torch import load_file

    config = config_of(name)
    whole = causal_lm(config)
    whole.save_pretrained(folder)  # rank 0 writes the files
    dist.barrier()
    files = load_file(f"{folder}/model.safetensors", device=str(device()))
    last = {"mixtral": "w2", "qwen3_moe": "down_proj"}[name]
    assert any(key.endswith(f"experts.0.{last}.weight") for key in files), list(files)
    # transformers 5 names Mixtral's block mlp, but its files do not.
    files = {key.replace(".block_sparse_moe.", ".mlp."): weight for key, weight in files.items()}
    with torch.device("meta"):
        empty = type(whole)(config)
    sharded = replace_moe(empty, EPMoE)
    sharded.load_state_dict(files, assign=True)
    saved = full_state_dict(sharded, name)
    assert {*saved} == {*files}
    for key, weight in files.items():
        assert torch.equal(saved[key], weight), key


def rejects_unsupported_blocks():
    mixtral, qwen = (causal_lm(config_of(name)).model.layers[0].mlp for name in ("mixtral", "qwen3_moe"))
    mixtral.jitter_noise = 0.1
    qwen.experts.act_fn = torch.nn.GELU()
    for block, message in ((mixtral, "has a jitter_noise of 0.1"), (qwen, "must be silu, not GELU")):
        with pytest.raises(ValueError, match=f"from_hf: .*{message}"):
            EPMoE.from_hf(block)
