"""Test bodies for models with the tensor parallelism of transformers. Every rank runs them."""

import contextlib
import os
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import tdkernels
from tdkernels.integrations.transformers import installed
from tdkernels.nn.parallel import styles
from tdkernels.symm.group import number_of_launches
from tests.support.dense_oracle import relative_error
from tests.support.ranks import device
from tests.support.subset import THOROUGH

VOCABULARY, BATCH, LENGTH, LAYERS = 32, 2, 8, 2
STEPS = 10 if THOROUGH else 3
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)
# {name: (class, changes of the config)}
MODELS = {
    "llama": ("Llama", dict(attention_bias=True, mlp_bias=True)),  # row-parallel layers with a bias
    "qwen2": ("Qwen2", dict(tie_word_embeddings=False)),  # column-parallel layers with a bias
    "qwen3": ("Qwen3", dict(head_dim=16)),  # q_norm and k_norm
    "mistral": ("Mistral", dict(sliding_window=4)),
    "gemma2": ("Gemma2", dict(head_dim=16, sliding_window=4, query_pre_attn_scalar=16)),  # tied embeddings
}
COLUMNS = "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"
ROWS = "o_proj", "down_proj"


def causal_lm(name, **changes):
    """Return a small model with random weights, the same on every rank. Biases and norm weights are random, too."""
    kind, own_changes = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **own_changes, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def load(model, folder, **sizes):
    """Return the model that was saved in ``folder``, divided by ``from_pretrained``.

    transformers uses the accelerator of the machine, if there is one; tests may run on CPU ranks there. It also wants
    accelerate, but uses it only for models on several devices of a rank.
    """
    where = device()
    with (
        mock.patch("torch._C._get_accelerator", return_value=torch.device(where.type)),
        mock.patch.dict(os.environ, LOCAL_RANK=str(where.index or 0)),
        mock.patch("transformers.integrations.accelerate.is_accelerate_available", return_value=True),
    ):
        return type(model).from_pretrained(folder, distributed_config=DistributedConfig(**sizes))


def save(model, folder):
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()


def batch():
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1)).to(device())


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(name, got, expected):
    error = relative_error(got, expected.double())
    assert error < 2e-5, f"{name}: {error:.3g}"


@contextlib.contextmanager
def calls_counted():
    """Yield a dict that has the numbers of calls of the operators and of collective kernels after the block."""
    counts, before = {}, number_of_launches()
    with (
        mock.patch.object(styles, "gemm_ar", wraps=styles.gemm_ar) as row,
        mock.patch.object(styles, "column_linear", wraps=styles.column_linear) as column,
    ):
        yield counts
    counts.update(gemm_ar=row.call_count, column_linear=column.call_count, kernels=number_of_launches() - before)


def assert_counts(counts, *, kernels, **calls):
    """Check the result of ``calls_counted``. On a GPU, direct launches of cached calls are not among the kernels."""
    on_cpu = device().type == "cpu"
    assert all(counts[name] == number for name, number in calls.items()), counts
    assert counts["kernels"] == kernels if on_cpu or not kernels else 0 < counts["kernels"] <= kernels, counts


def forward_and_backward(model, ids):
    """Return logits, loss and the complete gradients of all parameters."""
    model.zero_grad()
    out = model(input_ids=ids, labels=ids, use_cache=False)
    assert type(out.logits) is torch.Tensor
    out.loss.backward()
    gradients = {name: full(p.grad) for name, p in model.named_parameters()}
    return {"logits": out.logits.detach(), "loss": out.loss.detach(), **gradients}


def check_report(model):
    """Check that the report has the operator of every linear layer of the blocks, and torch for the head."""
    report = tdkernels.nn.report(model)
    runs = {entry.module: entry.runs for entry in report.entries}
    expected = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            last = name.rpartition(".")[2]
            expected[name] = "column_linear" if last in COLUMNS else "gemm_ar" if last in ROWS else None
    assert runs == expected, str(report)
    assert sum(value is not None for value in runs.values()) == LAYERS * 7


# ---- training ----


def trains(name, folder, changes):
    """Compare logits, loss, gradients and steps of SGD with transformers' own styles and with one device."""
    ranks = dist.get_world_size()
    whole = causal_lm(name, **changes)
    save(whole, folder)
    whole = whole.to(device())
    theirs = load(whole, folder, tp_size=ranks)
    with installed():
        ours = load(whole, folder, tp_size=ranks)
    check_report(ours)
    ids = batch()
    expected, reference = forward_and_backward(whole, ids), forward_and_backward(theirs, ids)
    with calls_counted() as counts:
        got = forward_and_backward(ours, ids)
    # Forwards of row-parallel layers and backwards of column-parallel layers launch one collective kernel each.
    assert_counts(counts, gemm_ar=2 * LAYERS, column_linear=5 * LAYERS, kernels=7 * LAYERS)
    assert {*got} == {*expected} == {*reference}
    for part, value in got.items():
        assert_same(f"{part}, one device", value, expected[part])
        assert_same(f"{part}, transformers", value, reference[part])
    assert {n: type(p) for n, p in ours.named_parameters()} == {n: type(p) for n, p in theirs.named_parameters()}
    if name == "llama":  # the recomputation runs the operators again
        ours.train()
        ours.gradient_checkpointing_enable()
    compare_steps(ours, theirs, whole, ids)
    compare_files(ours, whole, f"{folder}/again")
    tdkernels.synchronize()


def compare_steps(ours, theirs, whole, ids):
    """Compare the losses and the parameters of a few steps of SGD."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, foreach=False) for model in (ours, theirs, whole)]
    for step in range(STEPS):
        losses = []
        for model, optimizer in zip((ours, theirs, whole), optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert_same(f"loss of step {step}, transformers", losses[0], losses[1])
        assert_same(f"loss of step {step}, one device", losses[0], losses[2])
    models = zip(*(model.named_parameters() for model in (ours, theirs, whole)), strict=True)
    for (name, got), (_, reference), (_, expected) in models:
        got = full(got.detach())
        assert_same(f"{name}, transformers", got, full(reference.detach()))
        assert_same(f"{name}, one device", got, expected.detach())


def compare_files(ours, whole, folder):
    """Save the divided model, and load the files into one on one device and into one that is divided again."""
    ours.save_pretrained(folder)
    dist.barrier()
    loaded = type(whole).from_pretrained(folder).state_dict()
    with installed():
        again = load(whole, folder, tp_size=dist.get_world_size()).state_dict()
    for name, value in ours.state_dict().items():
        value = full(value).cpu()
        assert torch.equal(value, loaded[name]) and torch.equal(value, full(again[name]).cpu()), name


def trains_with_fsdp(name, folder):
    """Compare a step of a model that FSDP2 and tensor parallelism divide with transformers' own styles."""
    whole = causal_lm(name)
    save(whole, folder)
    sizes = dict(tp_size=2, fsdp_size=2)
    theirs = load(whole, folder, **sizes)
    with installed():
        ours = load(whole, folder, **sizes)
    reference = forward_and_backward(theirs, batch())
    with calls_counted() as counts:
        got = forward_and_backward(ours, batch())
    assert_counts(counts, gemm_ar=2 * LAYERS, column_linear=5 * LAYERS, kernels=7 * LAYERS)
    for part, value in got.items():
        assert_same(part, value, reference[part])
    tdkernels.synchronize()


# ---- generation ----


def generates(name, folder, changes):
    """Compare the tokens that are generated with a dynamic and a static cache with transformers' own styles."""
    ranks = dist.get_world_size()
    whole = causal_lm(name, **changes)
    save(whole, folder)
    theirs = load(whole, folder, tp_size=ranks)
    with installed():
        ours = load(whole, folder, tp_size=ranks)
    ids, whole = batch(), whole.to(device())
    mask = torch.ones_like(ids)
    for cache in (None, "static"):
        # On a GPU transformers compiles the decode step for a static cache, and then the calls are not counted.
        options = dict(max_new_tokens=4, do_sample=False, cache_implementation=cache, disable_compile=True)
        expected = theirs.generate(ids, attention_mask=mask, **options)
        with calls_counted() as counts:
            got = ours.generate(ids, attention_mask=mask, **options)
        assert got.shape == (BATCH, LENGTH + 4) and torch.equal(got, expected), cache
        assert torch.equal(got, whole.generate(ids, attention_mask=mask, **options)), cache
        assert_counts(counts, gemm_ar=8 * LAYERS, column_linear=0, kernels=8 * LAYERS)
    tdkernels.synchronize()


def generates_compiled(folder):
    """Compare the tokens of a decode step that transformers compiles into CUDA graphs with those of one device."""
    whole = causal_lm("llama")
    save(whole, folder)
    with installed():
        ours = load(whole, folder, tp_size=dist.get_world_size())
    ids, whole = batch(), whole.to(device())
    options = dict(
        attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, cache_implementation="static"
    )
    compiled = type(ours).get_compiled_call
    with mock.patch.object(type(ours), "get_compiled_call", autospec=True, side_effect=compiled) as used:
        got = ours.generate(ids, **options)
    assert used.called
    assert torch.equal(got, whole.generate(ids, disable_compile=True, **options))
    assert torch.equal(got, ours.generate(ids, disable_compile=True, **options))
    tdkernels.synchronize()
