"""tdkernels.integrations.transformers.parallelize against the complete model: results, gradients, checkpoints."""

import copy
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tdkernels
from tdkernels.integrations.transformers import divided_layers, model_plan, parallelize
from tdkernels.nn import full_state_dict
from tdkernels.nn.parallel import styles
from tests.nn.moe_modules import shard_of
from tests.support.ranks import device, on_ranks

pytest.importorskip("transformers", minversion="5.23")

B, S, V = 2, 8, 24
SIZES = dict(
    vocab_size=V, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=False, pad_token_id=0,
)
MOE = dict(num_experts_per_tok=2, intermediate_size=16)
MODELS = {  # name: (prefix of the classes, changes of the sizes)
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 3}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 3, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 3, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", {**MOE, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 16,
                               "mlp_only_layers": [1]}),
    "mixtral": ("Mixtral", {**MOE, "num_local_experts": 4}),
}


def causal_lm(name, seed=0, **changes):
    """Return a small model with random parameters, the same on every rank."""
    import transformers  # a slow import

    prefix, sizes = MODELS[name]
    config = getattr(transformers, prefix + ("TextConfig" if name == "gemma3" else "Config"))
    model = getattr(transformers, prefix + "ForCausalLM")(config(**{**SIZES, **sizes, **changes}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
            if parameter.dim() == 1:
                parameter += 0.5
    return model.train()


def mesh_of_world():
    return init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=("tp",))


def batch(seed=1):
    """Return the arguments of a forward, the same on every rank. One sequence is padded on the left."""
    ids = torch.randint(1, V, (B, S), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    labels = ids.masked_fill(mask == 0, -100)
    arguments = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {key: value.to(device()) for key, value in arguments.items()}


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def run(model, **arguments):
    """Return the logits, the loss and all gradients, which are added to those of earlier calls."""
    output = model(**{**batch(), **arguments})
    output.loss.backward()
    tdkernels.synchronize()
    results = {"logits": full(output.logits), "loss": full(output.loss)}
    return results | {f"gradient of {name}": full(one.grad) for name, one in model.named_parameters()}


def expect_experts(expected):
    """Replace the results of complete experts by those of this rank's EPMoE."""
    for key in [key for key in expected if key.endswith(".experts.down_proj")]:
        layer = key.removesuffix(".experts.down_proj")
        parts = shard_of("EPMoE", expected.pop(f"{layer}.experts.gate_up_proj"), expected.pop(key))
        expected[f"{layer}.w_gate_up"], expected[f"{layer}.w_down"] = parts


def close(got, expected, case=""):
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    for name, value in expected.items():
        error = ((got[name] - value).norm() / value.norm().clamp(min=1e-6)).item()
        assert error < 2e-5, f"{name} {case}: relative error {error:.3g}"


def divided(whole, **options):
    """Return (a copy of the model that is divided between the ranks, the report)."""
    model = copy.deepcopy(whole)
    result = parallelize(model, mesh_of_world(), **options)
    whole.to(device())
    return model, result


# ---- one forward and backward ----


@contextmanager
def counted(monkeypatch, *names):
    """Count the calls of operators by the linear layers: yield {name: number of calls}."""
    counts = dict.fromkeys(names, 0)

    def counting(name, operator):
        def call(*args, **kwargs):
            counts[name] += 1
            return operator(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in names:
            for module in (styles, divided_layers):
                if hasattr(module, name):
                    patch.setattr(module, name, counting(name, getattr(module, name)))
        yield counts


def computes_as_one(name, sequence_parallel, calls, **changes):
    """Compare logits, loss and all gradients with the complete model, and count the calls of the operators."""
    whole = causal_lm(name, **changes)
    model, result = divided(whole, sequence_parallel=sequence_parallel)
    expected = run(whole)
    if sequence_parallel:
        expect_experts(expected)
    with counted(pytest.MonkeyPatch(), *calls) as counts:
        got = run(model)
    close(got, expected)
    assert counts == calls
    layers = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert layers <= {entry.module for entry in result.entries}, result
    return str(result)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_as_on_one_rank(name):
    gathers = {"mixtral": 2, "qwen3_moe": 3}.get(name, 4)  # one of q, k and v, and one of gate and up, in each layer
    head = 0 if name.startswith("gemma") else 1
    calls = {"ag_gemm": gathers, "gemm_rs": gathers, "column_linear": head, "gemm_ar": 0}
    table = on_ranks(2, computes_as_one, name, True, calls)[0]
    assert "ag_gemm, gather shared with 2 more" in table and "scatter of the sequence" in table
    assert ("its weight is tied to model.embed_tokens" in table) == name.startswith("gemma")


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_ranks_share_kv_heads(sequence_parallel):
    calls = {"ag_gemm": 2, "gemm_rs": 2} if sequence_parallel else {"column_linear": 3, "gemm_ar": 2}
    on_ranks(4, computes_as_one, "llama", sequence_parallel, calls, num_hidden_layers=1)


def test_ranks_share_kv_heads_with_norms_and_biases():
    calls = {"ag_gemm": 2, "gemm_rs": 2}
    on_ranks(4, computes_as_one, "qwen3", True, calls, num_hidden_layers=1, attention_bias=True)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_without_sequence_parallel(name):
    rows = 4 if name == "llama" else 3
    columns = 5 if name == "llama" else 4  # one of q, k and v, and one of gate and up, in each layer; the output layer
    calls = {"ag_gemm": 0, "gemm_rs": 0, "column_linear": columns, "gemm_ar": rows}
    table = on_ranks(2, computes_as_one, name, False, calls)[0]
    assert ("no sequence_parallel" in table) == (name == "qwen3_moe")
    assert "column_linear, all-reduce of the gradient of x shared with 2 more" in table


# ---- training, checkpoints ----


def step(model, optimizer, seeds):
    """Make one step of an optimizer with accumulated gradients. Return their norm."""
    optimizer.zero_grad()
    for seed in seeds:
        model(**batch(seed)).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    tdkernels.synchronize()
    return full(norm)


def trains_as_one(folder):
    """Compare steps with two microbatches; save, load, and copy the model; recompute activations."""
    whole = causal_lm("qwen3", attention_bias=True)
    model, _ = divided(whole)
    results = []
    for one in (model, whole):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.3, momentum=0.5)
        norms = {f"norm {number}": step(one, optimizer, (2 * number, 2 * number + 1)) for number in range(3)}
        results.append(norms | {name: full(value) for name, value in one.named_parameters()})
    close(*results)
    kinds = {type(one.grad) for one in model.parameters()}
    assert kinds == {DTensor}, kinds

    state = full_state_dict(model)
    assert state.keys() == whole.state_dict().keys()
    close({name: value.cpu() for name, value in state.items()}, full_state(whole))
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict={**state})  # it removes the entries
    dist.barrier()
    other, _ = divided(causal_lm("qwen3", seed=5, attention_bias=True))
    other.load_state_dict(state)
    loaded = type(whole).from_pretrained(folder).to(device()).train()
    expected = run(loaded)
    close(run(copy.deepcopy(other)), expected, "of a copy")
    other.gradient_checkpointing_enable()
    close(run(other), expected, "with checkpointing")


def full_state(model):
    return {name: full(value) for name, value in model.state_dict().items()}


def test_training_and_checkpoints(tmp_path):
    on_ranks(2, trains_as_one, str(tmp_path))


def takes_parameters_of_rank_0():
    """Divide models with other parameters on each rank; load complete parameters into the MoE model."""
    model, other = (causal_lm("mixtral", seed=seed, num_hidden_layers=1) for seed in (dist.get_rank(), 7))
    for one in (model, other):
        parallelize(one, mesh_of_world())
    expected, state = full_state(causal_lm("mixtral", num_hidden_layers=1)), full_state_dict(model)
    other.load_state_dict(state)
    for got in (state, full_state_dict(other)):
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name].cpu(), value) for name, value in expected.items())


def test_parameters_of_rank_0():
    on_ranks(2, takes_parameters_of_rank_0)


def computes_under_fsdp():
    """Compare a model on a mesh of two dimensions, whose parameters FSDP2 divides, too, with the complete model."""
    whole = causal_lm("llama", num_hidden_layers=1)
    model = copy.deepcopy(whole)
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize(model, mesh["tp"])
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh["dp"])
    expected = run(whole.to(device()))
    close(run(model), expected)


def test_fsdp():
    on_ranks(4, computes_under_fsdp)


def generates_as_one():
    """Compare greedy generation with a KV cache, and sequences without one."""
    whole = causal_lm("llama").eval()
    model, _ = divided(whole, sequence_parallel=False)
    given = {key: value for key, value in batch().items() if key != "labels"}
    options = {"max_new_tokens": 4, "do_sample": False}
    expected, got = (one.generate(**given, **options) for one in (whole, model))
    assert got.shape == (B, S + 4) and torch.equal(got, expected)


def test_generates_without_sequence_parallel():
    on_ranks(2, generates_as_one)


# ---- errors ----


def rejects_calls():
    """Errors of the forward, of meshes and of a second call; a rejected model is not modified. Options reach layers."""
    whole = causal_lm("mixtral", num_hidden_layers=1)
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    square = init_device_mesh(device().type, (1, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r'one dimension, such as mesh\["tp"\], not 2'):
        parallelize(whole, square)
    for changes, message in (
        ({"num_attention_heads": 3}, "config.num_attention_heads 3 .* 2 ranks"),
        ({"num_local_experts": 3}, "number of experts 3 .* 2 ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            parallelize(causal_lm("mixtral", **changes, num_key_value_heads=1, head_dim=8), square["tp"])
    assert all(torch.equal(value, before[name]) for name, value in whole.state_dict().items())
    model = copy.deepcopy(whole)
    options = {
        "column_config": tdkernels.AgGemmConfig(), "row_config": tdkernels.GemmRsConfig(),
        "moe_options": {"max_tokens": 64},
    }
    parallelize(model, square["tp"], src_data_rank=None, **options)
    block = model.model.layers[0]
    assert block.mlp.max_tokens == 64
    assert block.self_attn.k_proj.tdkernels_style.config is options["column_config"]
    assert block.self_attn.o_proj.tdkernels_style.config is options["row_config"]
    with pytest.raises(ValueError, match="is a DTensor: the model is parallel already"):
        parallelize(model, square["tp"])
    ids = batch()["input_ids"]
    with pytest.raises(ValueError, match=r"S = 7 .* W = 2 ranks: pad .* sequence_parallel=False"):
        model(input_ids=ids[:, :7])
    with torch.no_grad(), pytest.raises(ValueError, match="S = 1 .*generate"):
        model.generate(input_ids=ids, max_new_tokens=2, do_sample=False)
    for option in divided_layers.UNSUPPORTED:
        with pytest.raises(ValueError, match=f"{option}=True is not supported by a parallel MixtralModel"):
            model(input_ids=ids, **{option: True})


def test_rejected_calls():
    on_ranks(2, rejects_calls)


def broken(name):
    """Return a Llama with one thing that ``parallelize`` does not support."""
    model = causal_lm("llama")
    layer = model.model.layers[1]
    if name == "quantized":
        layer.mlp.up_proj = type("QuantizedLinear", (torch.nn.Linear,), {})(32, 40, bias=False)
    elif name == "adapter":
        layer.self_attn.adapter = torch.nn.Linear(32, 32)
    elif name == "style":
        model.tp_plan = {**model.tp_plan, "model.layers.*.mlp.up_proj": "packed_colwise"}
    elif name == "rowless":
        model.tp_plan = {key: style for key, style in model.tp_plan.items() if not key.endswith("down_proj")}
    elif name == "meta":
        layer.to("meta")
    elif name == "tied":
        layer.input_layernorm.weight = model.model.norm.weight
    elif name == "hooked":
        layer.mlp.down_proj.forward = lambda x: x
    elif name == "without a plan":
        model.tp_plan = {}
    return model


@pytest.mark.parametrize(
    "name, message",
    [  # the name of a change of broken(), and the error
        ("quantized", r"layers.1.mlp.up_proj .*QuantizedLinear.* \"colwise\" is not supported: class"),
        ("adapter", "layers.1.self_attn.adapter .Linear., which is not in the plan, is not supported"),
        ("style", "layers.0.mlp.up_proj .Linear. with the style \"packed_colwise\" is not supported"),
        ("rowless", "layers.0.mlp.down_proj .Linear., which is not in the plan"),
        ("meta", "layers.1.self_attn.q_proj.weight is on the meta device"),
        ("tied", "tied parameters .*layers.1.input_layernorm.weight.* are not supported"),
        ("hooked", "layers.1.mlp.down_proj .* its forward was replaced"),
        ("without a plan", "LlamaForCausalLM has no tensor-parallel plan"),
    ],
)
def test_unsupported_models(name, message):
    with pytest.raises(ValueError, match=f"parallelize: .*{message}"):
        model_plan.read_plan(broken(name), 2)


@pytest.mark.parametrize(
    "changes, world_size, message",
    [
        ({}, 3, "config.num_attention_heads 4 must be divisible by the mesh's 3 ranks"),
        ({"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}, 2,
         "config.num_key_value_heads 3 must be divisible by the mesh's 2 ranks, or divide them"),
        ({"intermediate_size": 42}, 4, "out_features 42 .config.intermediate_size. must be divisible by the mesh's 4"),
    ],
)
def test_sizes_that_the_ranks_do_not_divide(changes, world_size, message):
    with pytest.raises(ValueError, match=f"parallelize: .*{message}"):
        model_plan.read_plan(causal_lm("llama", **changes), world_size)


def test_a_base_model_has_no_output_layer():
    plan = model_plan.read_plan(causal_lm("llama").model, 2)
    assert (plan.head, plan.embedding, plan.first_layer, plan.final_norm) == ("", "embed_tokens", "layers.0", "norm")


def test_a_vocabulary_that_the_ranks_do_not_divide():
    plan = model_plan.read_plan(causal_lm("llama", vocab_size=25), 2)
    assert plan.head_reason == "out_features 25 is not divisible by 2 ranks"


def test_models_without_a_plan():
    with pytest.raises(ValueError, match="Linear has no tensor-parallel plan"):
        model_plan.read_plan(torch.nn.Linear(2, 2), 2)
