"""What models of transformers with our layers in them are asked, as functions that every rank runs."""

import copy

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels.nn import EPMoE, full_state_dict, replace_moe
from tests.nn.moe_modules import KINDS, compare, part_of
from tests.support.dense_oracle import relative_error
from tests.support.ranks import device

SEQUENCES, LENGTH, WORDS = 2, 3, 32
SIZES = dict(
    vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=16, num_experts_per_tok=2, tie_word_embeddings=False,
)


def config_of(model, **changes):
    import transformers  # takes seconds, so only where it is needed

    if model == "mixtral":
        return transformers.MixtralConfig(**{**SIZES, "num_local_experts": 4, **changes})
    sizes = {**SIZES, "num_experts": 4, "moe_intermediate_size": 16, "norm_topk_prob": True}
    return transformers.Qwen3MoeConfig(**{**sizes, **changes})


def causal_lm(config):
    """A small model of random weights, the same on every rank, of which no two experts are alike."""
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


def assert_same(name, got, theirs):
    """Two ways to compute the same in fp32, through two layers. How exact each is, tests/nn/test_moe.py asks."""
    error = relative_error(got, theirs.double())
    assert error < 1e-5, f"{name}: {error:.3g}"


def computes_the_same(kind, name):
    """Logits of each rank's sequences, and the gradient of every parameter of all of them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = causal_lm(config_of(name))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (world_size, SEQUENCES, LENGTH), generator=generator)
    d_logits = torch.randn(*ids.shape, WORDS, generator=generator)
    theirs = forward_and_backward(copy.deepcopy(whole), ids.flatten(0, 1), d_logits.flatten(0, 1))
    ours = replace_moe(copy.deepcopy(whole), KINDS[kind]).to(device())
    got = forward_and_backward(ours, ids[rank].to(device()), d_logits[rank].to(device()))
    tdkernels.synchronize()
    mine = slice(rank * SEQUENCES, (rank + 1) * SEQUENCES)
    assert_same("logits", got.pop("logits"), theirs.pop("logits")[mine])
    for parameter, gradient in got.items():
        layer, _, last = parameter.rpartition(".")
        if last in ("w_gate_up", "w_down"):
            parts = part_of(kind, *(theirs[f"{layer}.experts.{weight}"] for weight in ("gate_up_proj", "down_proj")))
            expected = parts[last == "w_down"]
        else:
            dist.all_reduce(gradient)  # each rank has that of its own tokens
            expected = theirs[parameter]
        assert_same(f"gradient of {parameter}", gradient, expected)

    given = full_state_dict(ours)
    assert {*given} == {*whole.state_dict()}
    for parameter, weight in whole.state_dict().items():
        assert torch.equal(given[parameter].cpu(), weight), parameter


def takes_a_block(normalize):
    """One block alone, in bf16: the router's settings and the weights, and about the same numbers."""
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


def loads_files(name, folder):
    """By the names of checkpoints, into a model that was made without memory for whole experts."""
    from safetensors.torch import load_file

    config = config_of(name)
    whole = causal_lm(config)
    whole.save_pretrained(folder)  # rank 0 does
    dist.barrier()
    files = load_file(f"{folder}/model.safetensors", device=str(device()))
    last = {"mixtral": "w2", "qwen3_moe": "down_proj"}[name]
    assert any(key.endswith(f"experts.0.{last}.weight") for key in files), list(files)
    # Mixtral's block is called mlp in transformers 5, not in its files.
    files = {key.replace(".block_sparse_moe.", ".mlp."): weight for key, weight in files.items()}
    with torch.device("meta"):
        empty = type(whole)(config)
    ours = replace_moe(empty, EPMoE)
    ours.load_state_dict(files, assign=True)
    given = full_state_dict(ours, name)
    assert {*given} == {*files}
    for key, weight in files.items():
        assert torch.equal(given[key], weight), key


def refuses_other_blocks():
    mixtral, qwen = (causal_lm(config_of(name)).model.layers[0].mlp for name in ("mixtral", "qwen3_moe"))
    mixtral.jitter_noise = 0.1
    qwen.experts.act_fn = torch.nn.GELU()
    for block, words in ((mixtral, "has a jitter_noise of 0.1"), (qwen, "must be silu, not GELU")):
        with pytest.raises(ValueError, match=f"from_hf: .*{words}"):
            EPMoE.from_hf(block)
