"""Test bodies for models with the tensor parallelism of transformers. Every rank runs them."""

import contextlib
import os
import types
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

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


def comparable(gradient):
    """Return the complete gradient, or this rank's part of a strided shard, which torch 2.11 cannot gather."""
    strided = isinstance(gradient, DTensor) and any(isinstance(p, _StridedShard) for p in gradient.placements)
    return gradient.to_local() if strided and torch.__version__.startswith("2.11.") else full(gradient)


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


# ---- modules ----


class Subclass(torch.nn.Linear):
    pass


class Layers(torch.nn.Module):
    """Linear layers with the styles of PLAN. The operators do not support most of these layers."""

    def __init__(self):
        super().__init__()
        self.column, self.row = torch.nn.Linear(16, 24), torch.nn.Linear(16, 12)
        self.packed, self.packed_uneven = torch.nn.Linear(16, 24, bias=False), torch.nn.Linear(16, 10, bias=False)
        self.subclass, self.patched = Subclass(16, 24), torch.nn.Linear(16, 24)
        self.patched.forward = types.MethodType(torch.nn.Linear.forward, self.patched)
        self.uneven_column, self.uneven_row = torch.nn.Linear(16, 17), torch.nn.Linear(17, 16)
        self.fp64, self.quantized = torch.nn.Linear(16, 24).double(), torch.nn.Linear(16, 24)
        self.bf16 = torch.nn.Linear(16, 24, dtype=torch.bfloat16)


PLAN = {
    "column": "colwise", "row": "rowwise", "packed": "packed_colwise", "subclass": "colwise", "patched": "rowwise",
    "uneven_column": "colwise", "uneven_row": "rowwise", "fp64": "colwise", "quantized": "rowwise", "bf16": "rowwise",
}
RUNS = {"column": "column_linear", "row": "gemm_ar", "packed": "column_linear", "bf16": "gemm_ar"}
REASONS = {
    "subclass": "class Subclass is not torch.nn.Linear",
    "patched": "its forward was replaced by another library",
    "uneven_column": "2 ranks do not divide out_features 17",
    "uneven_row": "2 ranks do not divide in_features 17",
    "fp64": "its weight is torch.float64, which the operators do not support",
    "quantized": "it is quantized",
    "packed_uneven": "torch.nn.Linear: not parallel",
}


def divided_layers(mesh):
    """Return Layers with the styles that are installed."""
    torch.manual_seed(0)
    model = Layers().to(device())
    plan = {}
    for name, style in PLAN.items():
        parameters = [f"{name}.{one}" for one, _ in model.get_submodule(name).named_parameters()]
        plan.update(dict.fromkeys([*parameters, name], style))
    apply_tensor_parallelism(model, mesh, plan)
    model.quantized._hf_quantized_needs_local_tp = True
    return model


def outputs_of(model, name, compiled=None):
    """Return the outputs of a layer with and without gradients, and the gradients of its input and its parameters."""
    module, style = model.get_submodule(name), PLAN[name]
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 2, module.in_features, generator=generator).to(device(), module.weight.dtype)
    if style == "rowwise":  # transformers' layouts of uneven parts are those of torch.chunk
        x = x.chunk(2, dim=-1)[dist.get_rank()].contiguous()
    with torch.no_grad():
        z = module(x)
    x.requires_grad_()
    y = (module if compiled is None else compiled)(x)
    (y * torch.arange(1, y.shape[-1] + 1, device=y.device)).sum().backward()
    gradients = {one: comparable(p.grad) for one, p in module.named_parameters()}
    return {"y": y.detach(), "y without gradients": z, "x": x.grad, **gradients}


def compiles():
    """Compare the operators under torch.compile, without a graph break, with eager calls."""
    mesh = init_device_mesh(device().type, (2,), mesh_dim_names=("tp",))
    with installed():
        model = divided_layers(mesh)
    for name in ("column", "row", "packed"):
        expected = outputs_of(model, name)
        model.zero_grad()
        compiled = torch.compile(model.get_submodule(name), backend="aot_eager", fullgraph=True)
        for part, value in outputs_of(model, name, compiled).items():
            assert_same(f"{name}, {part}", value, expected[part])


def runs_and_falls_back():
    """Compare layers of all kinds with transformers' own styles, and check the reasons in the report."""
    mesh = init_device_mesh(device().type, (2,), mesh_dim_names=("tp",))
    theirs = divided_layers(mesh)
    with installed():
        ours = divided_layers(mesh)
    report = tdkernels.nn.report(ours)
    found = {entry.module: entry.runs or entry.reason for entry in report.entries}
    assert found == {**RUNS, **REASONS}, str(report)
    for name in PLAN:
        with calls_counted() as counts:
            got = outputs_of(ours, name)
        rows = PLAN[name] == "rowwise"  # without gradients only these have a collective
        assert_counts(counts, kernels=(name in RUNS) * (1 + rows))
        reference = outputs_of(theirs, name)
        assert {*got} == {*reference}
        for part, value in got.items():
            limit = 1e-2 if value.dtype == torch.bfloat16 else 1e-5
            assert type(value) is type(reference[part]) and value.stride() == reference[part].stride()
            assert relative_error(value, reference[part].double()) < limit, f"{name}, {part}"
    checks_dtype_again(ours)


def checks_dtype_again(ours):
    """Convert a layer after its first call: the report and the forward follow."""
    ours.row.double()
    with calls_counted() as counts:
        outputs_of(ours, "row")
    assert_counts(counts, kernels=0)
    assert tdkernels.nn.report(ours)["row"].reason == "its weight is torch.float64, which the operators do not support"
    ours.row.float()
    with calls_counted() as counts:
        outputs_of(ours, "row")
    assert_counts(counts, kernels=2)
    assert tdkernels.nn.report(ours)["row"].runs == "gemm_ar"


def rejects_meshes_and_layouts():
    """Check the reasons for meshes without a dimension "tp" and for styles with other layouts."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, ColwiseParallel, Replicate

    mesh = init_device_mesh(device().type, (1, 2), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh(device().type, (1, 2), mesh_dim_names=("dp", "ep"))
    before = ALL_PARALLEL_STYLES["colwise"]
    gathering = ColwiseParallel(output_layouts=Replicate())
    with_dtensors = ColwiseParallel(use_local_output=False)
    for style, its_mesh, reason in (
        (before, mesh, None), (before, other, 'the mesh has several dimensions, none of which is "tp"'),
        (gathering, mesh, "column_linear does not have the layouts Replicate() and Replicate()"),
        (with_dtensors, mesh, "its output is a DTensor"),
    ):
        ALL_PARALLEL_STYLES.register("colwise", style)
        try:
            with installed():
                layer = torch.nn.Linear(16, 24)
                ALL_PARALLEL_STYLES["colwise"].shard_param(layer, "weight", mesh["tp"])
                ALL_PARALLEL_STYLES["colwise"].install_forward(layer, its_mesh)
        finally:
            ALL_PARALLEL_STYLES.register("colwise", before)
        entry = tdkernels.nn.report(layer)[""]
        assert (entry.runs, entry.reason) == (("column_linear", "") if reason is None else (None, reason))
