"""Megatron-Core with linear layers of tdkernels: results, gradients and bookkeeping are those of Megatron's layers."""

import contextlib
import dataclasses
import gc
import importlib.util
import sys
import types
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import device, on_ranks

pytest.importorskip("megatron.core")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron warns about each missing extension
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_mlp_module_spec_for_backend,
    )
    from megatron.core.tensor_parallel import layers as stock
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tdkernels.integrations import megatron

from tdkernels.nn.parallel.report import report

S, B, H, F = 8, 2, 16, 24
OPERATORS = ("ag_gemm", "column_linear", "gemm_rs", "gemm_ar")
REDUCED = "ddp_config", types.SimpleNamespace(use_megatron_fsdp=False)


# ---- helpers ----


@contextlib.contextmanager
def model_parallel():
    """Initialize Megatron's groups for one test, with all ranks in the tensor-parallel group.

    Megatron allocates on torch.cuda.current_device(), which is replaced on CPU ranks.
    """
    before = set(dist.distributed_c10d._world.pg_map)
    on_cpu = device().type == "cpu"
    with (
        mock.patch.object(torch.cuda, "current_device", device) if on_cpu else contextlib.nullcontext(),
        mock.patch.object(CudaRNGStatesTracker, "fork", lambda self, name=None: contextlib.nullcontext()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        parallel_state.initialize_model_parallel(dist.get_world_size())
        try:
            yield parallel_state.get_tensor_model_parallel_group()
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_global_memory_buffer()
            for group in set(dist.distributed_c10d._world.pg_map) - before:
                dist.destroy_process_group(group)
            del group
            gc.collect()  # later tests must not report errors of the workspaces


def config_of(sp, dtype=torch.float32, **options):
    defaults = {
        "num_layers": 2, "hidden_size": H, "num_attention_heads": 4, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "tensor_model_parallel_size": dist.get_world_size(), "sequence_parallel": sp, "params_dtype": dtype,
        "use_cpu_initialization": device().type == "cpu", "bf16": dtype == torch.bfloat16,
    }
    return TransformerConfig(**{**defaults, **options})


def draw(*shape, seed, dtype=torch.float32, low=-1):
    """Return integers, the same on all ranks. Sums of their products are exact, so results can be compared exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, 2, shape, generator=generator).to(device(), dtype)


def own(t, dim=0):
    return t.chunk(dist.get_world_size(), dim)[dist.get_rank()]


class Pair(torch.nn.Module):
    """A column layer, relu, and a row layer."""

    def __init__(self, module, config, *, bias=True, skip_bias_add=False):
        super().__init__()
        options = {
            "config": config, "init_method": torch.nn.init.zeros_, "bias": bias, "skip_bias_add": skip_bias_add,
            "tp_group": parallel_state.get_tensor_model_parallel_group(),
        }
        self.fc1 = module.ColumnParallelLinear(H, F, tp_comm_buffer_name="fc1", **options)
        self.fc2 = module.RowParallelLinear(F, H, input_is_parallel=True, tp_comm_buffer_name="fc2", **options)
        self.config, (name, value) = config, REDUCED
        setattr(self, name, value)
        for parameter, full, dim in zip(self.parameters(), parameters(config.params_dtype, bias), dims(bias)):
            with torch.no_grad():
                parameter.copy_(full if dim is None else own(full, dim))

    def forward(self, x):
        y, bias = self.fc1(x)
        y = y if bias is None else y + bias
        y, bias = self.fc2(y.relu())
        return y if bias is None else y + bias


def parameters(dtype=torch.float32, bias=True):
    """Return the complete parameters of a Pair."""
    weights = draw(F, H, seed=1, dtype=dtype), draw(H, F, seed=2, dtype=dtype)
    biases = draw(F, seed=3, dtype=dtype), draw(H, seed=4, dtype=dtype)
    return [weights[0], biases[0], weights[1], biases[1]] if bias else list(weights)


def dims(bias=True):
    return [0, 0, 1, None] if bias else [0, 1]


def unsharded(x, dy, *, bias=True):
    """Return y, dx and the gradients of the complete parameters, computed without tensor parallelism."""
    x = x.detach().clone().float().requires_grad_()
    full = [p.float().requires_grad_() for p in parameters(bias=bias)]
    first, second = (full[:2], full[2:]) if bias else (full[:1], full[1:])
    y = torch.nn.functional.linear(torch.nn.functional.linear(x, *first).relu(), *second)
    y.backward(dy.float())
    return y.detach(), x.grad, [p.grad for p in full]


def run(model, x, dy, sp):
    """Return y and dx of a model for this rank's rows."""
    x = (own(x) if sp else x).detach().clone().requires_grad_()
    y = model(x)
    y.backward((own(dy) if sp else dy).to(y.dtype))
    return y.detach(), x.grad


def metadata():
    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def called():
    """Count the calls of the operators."""
    stack, counts = contextlib.ExitStack(), {}
    for name in OPERATORS:
        counts[name] = stack.enter_context(mock.patch.object(megatron, name, wraps=getattr(megatron, name)))
    return stack, lambda: {name for name, spy in counts.items() if spy.called}


# ---- the layers ----


def layers_agree(sp, skip_bias_add):
    x, dy = draw(S, B, H, seed=5), draw(S, B, H, seed=6)
    with model_parallel() as group:
        y, dx, grads = unsharded(x, dy)
        found = {}
        for module in (megatron, stock):
            pair = Pair(module, config_of(sp), skip_bias_add=skip_bias_add)
            stack, names = called()
            with stack:
                results = run(pair, x, dy, sp)
            expected = {"ag_gemm", "gemm_rs"} if sp else {"column_linear", "gemm_ar"}
            assert names() == (expected if module is megatron else set())
            assert pair.fc2.bias.sequence_parallel == sp
            if sp:  # the gradient of this rank's rows, which Megatron sums below
                assert torch.equal(pair.fc2.bias.grad, own(dy).sum((0, 1)))
            _allreduce_non_tensor_model_parallel_grads([pair], pair.config, group)
            found[module] = results
            assert torch.equal(results[0], own(y) if sp else y) and torch.equal(results[1], own(dx) if sp else dx)
            for (name, parameter), grad, dim in zip(pair.named_parameters(), grads, dims()):
                assert torch.equal(parameter.grad, grad if dim is None else own(grad, dim)), (module, name)
        assert all(map(torch.equal, found[megatron], found[stock]))


@pytest.mark.parametrize("skip_bias_add", [False, True])
@pytest.mark.parametrize("sp", [False, True])
def test_layers(sp, skip_bias_add):
    on_ranks(2, layers_agree, sp, skip_bias_add)


def test_layers_on_four_ranks():
    on_ranks(4, layers_agree, True, False)


def options_agree():
    """Arguments of Megatron's layers that need no fallback: compare with Megatron's layers."""
    x, weight, dy = draw(S, B, H, seed=5), draw(F, H, seed=1), draw(S, B, F, seed=6)

    def column(module, sp, *, forward=None, frozen=False, autocast=False, **options):
        options = {"gather_output": False, "bias": False, **options}
        layer = module.ColumnParallelLinear(H, F, config=config_of(sp), init_method=torch.nn.init.zeros_, **options)
        if layer.weight is not None:
            layer.weight.data.copy_(own(weight))
            layer.weight.requires_grad_(not frozen)
        given = (own(x) if sp else x).clone().requires_grad_()
        with torch.autocast(device().type, torch.bfloat16, enabled=autocast):
            y, _ = layer(given, **(forward or {}))
        assert y.dtype == (torch.bfloat16 if autocast else torch.float32)
        y.backward(dy[..., : y.shape[-1]].to(y.dtype))
        assert not frozen or layer.weight.grad is None
        return layer, [y, given.grad, None if layer.weight is None else layer.weight.grad]

    def row(module):
        layer = module.RowParallelLinear(
            F, H, config=config_of(False), init_method=torch.nn.init.zeros_, bias=False, input_is_parallel=False,
            skip_bias_add=False,
        )
        layer.weight.data.copy_(own(draw(H, F, seed=2), 1))
        given = dy.clone().requires_grad_()
        y, _ = layer(given)
        y.backward(x)
        return layer, [y, given.grad, layer.weight.grad]

    with model_parallel():
        for sp in (False, True):
            tied = own(weight).clone().requires_grad_()
            for options in (
                {"gather_output": True}, {"forward": {"runtime_gather_output": True}}, {"frozen": True},
                {"autocast": True},
                {"skip_weight_param_allocation": True, "forward": {"weight": tied}},
            ):
                layer, ours = column(megatron, sp, **options)
                options.pop("autocast", None)  # the values are exact in bf16; on a CPU, Megatron's backward fails
                _, theirs = column(stock, sp, **options)
                assert layer.tdkernels_runs == ("ag_gemm" if sp else "column_linear", "")
                for mine, other in zip(ours, theirs):
                    assert (mine is None and other is None) or torch.equal(mine.float(), other), options
        (layer, ours), (_, theirs) = row(megatron), row(stock)
        assert layer.tdkernels_runs == ("gemm_ar", "") and all(map(torch.equal, ours, theirs))


def test_options_of_the_layers():
    on_ranks(2, options_agree)


# ---- gradient accumulation ----


def accumulates(sp, dtype):
    """Two microbatches: the backward adds the gradients of the weights to fp32 tensors, and marks the weights."""
    with model_parallel():
        with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
            Pair(stock, config_of(sp, dtype, gradient_accumulation_fusion=True))
        config = config_of(sp, dtype, gradient_accumulation_fusion=True)
        pair = Pair(megatron, config, bias=False)
        assert pair.fc1.config is config and config.gradient_accumulation_fusion
        weights, expected = (pair.fc1.weight, pair.fc2.weight), None
        for weight in weights:
            weight.main_grad, weight.grad_added_to_main_grad = torch.full_like(weight, 3, dtype=torch.float32), False
        weights[1].zero_out_wgrad = True
        for seed in (5, 7):
            x, dy = draw(S, B, H, seed=seed, dtype=dtype), draw(S, B, H, seed=seed + 1, dtype=dtype)
            y, dx, grads = unsharded(x, dy, bias=False)
            expected = [a + b for a, b in zip(expected, grads)] if expected else grads
            results = run(pair, x, dy, sp)
            for result, want in zip(results, (y, dx)):
                assert result.dtype == dtype and torch.equal(result.float(), own(want) if sp else want)
        for weight, grad, dim in zip(weights, expected, (0, 1)):
            assert torch.equal(weight.main_grad, 3 + own(grad, dim)) and weight.grad_added_to_main_grad is True
            assert weight.grad.shape == weight.shape and weight.grad.dtype == dtype  # starts the hooks of Megatron
        assert not weights[1].grad.any()

        for weight in weights:  # without Megatron's attribute autograd gets no gradient; a frozen weight adds nothing
            del weight.grad_added_to_main_grad
            weight.grad = None
        weights[1].requires_grad_(False)
        before = [weight.main_grad.clone() for weight in weights]
        run(pair, x, dy, sp)
        assert weights[0].grad is None and weights[1].grad is None
        assert torch.equal(weights[0].main_grad, before[0] + own(grads[0]))
        assert torch.equal(weights[1].main_grad, before[1])
        weights[1].requires_grad_(True)
        del weights[0].main_grad, weights[1].main_grad
        run(pair, x, dy, sp)
        assert all(torch.equal(w.grad.float(), own(g, dim)) for w, g, dim in zip(weights, grads, (0, 1)))


@pytest.mark.parametrize("sp, dtype", [(True, torch.bfloat16), (False, torch.bfloat16), (True, torch.float32)])
def test_gradient_accumulation_fusion(sp, dtype):
    on_ranks(2, accumulates, sp, dtype)


def trains(sp):
    """Steps of SGD with Megatron's DistributedDataParallel and finalize_model_grads, two microbatches each."""
    with model_parallel():
        results = []
        for module, fusion in ((stock, False), (megatron, True), (megatron, False)):
            config = config_of(sp, torch.bfloat16, gradient_accumulation_fusion=fusion)
            pair = Pair(module, config)
            ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), pair)
            master = [p.detach().float() for p in pair.parameters()]
            for step in range(3):
                ddp.zero_grad_buffer()
                for seed in (10 * step, 10 * step + 2):
                    x, dy = (draw(S, B, H, seed=s, dtype=torch.bfloat16) for s in (seed, seed + 1))
                    run(ddp, x, dy, sp)
                assert all(p.grad_added_to_main_grad == (fusion and p.dim() == 2) for p in pair.parameters())
                finalize_model_grads([ddp])
                for parameter, copied in zip(pair.parameters(), master):
                    copied -= parameter.main_grad / 64
                    parameter.data.copy_(copied)
            results.append(master)
            if sp:
                gathered = [torch.empty_like(master[3]) for _ in range(dist.get_world_size())]
                dist.all_gather(gathered, master[3])
                assert all(torch.equal(gathered[0], other) for other in gathered)
        for fused, unfused, other in zip(results[1], results[2], results[0]):
            # Megatron without fusion rounds each gradient to bf16.
            torch.testing.assert_close(unfused, other, rtol=0.02, atol=0.02)
            torch.testing.assert_close(fused, other, rtol=0.02, atol=0.02)
            assert (other - other.round()).abs().max() > 0, "the steps must change the parameters"


@pytest.mark.parametrize("sp", [False, True])
def test_training(sp):
    on_ranks(2, trains, sp)


# ---- models ----


class Norm(torch.nn.LayerNorm):
    """Layer norm. That of Megatron without apex and TransformerEngine supports no sequence parallelism."""

    def __init__(self, config, hidden_size, eps):
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def transformer_layers_agree(sp):
    x, mask = torch.randn(S, B, H, generator=torch.Generator().manual_seed(1)), torch.ones(S, S).triu(1)[None, None] > 0
    with model_parallel() as group:
        results, config = [], config_of(sp)
        x, mask = (own(x) if sp else x).to(device()), mask.to(device())
        spec = get_gpt_layer_local_spec()
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
        for one in (spec, megatron.layer_spec(spec)):
            torch.manual_seed(0)
            layer = build_module(one, config=config, layer_number=1).to(device())
            for number, (name, parameter) in enumerate(layer.named_parameters()):
                if name.endswith("bias"):
                    parameter.data.copy_(draw(len(parameter), seed=number))
            given = x.clone().requires_grad_()
            y, _ = layer(given, attention_mask=mask)
            (y * x).sum().backward()
            setattr(layer, *REDUCED)
            _allreduce_non_tensor_model_parallel_grads([layer], config, group)
            state = layer.sharded_state_dict("layer.", metadata=metadata())
            shapes = {name: getattr(entry, "global_shape", None) for name, entry in state.items()}
            results.append(({"y": y, "x": given.grad, **{n: p.grad for n, p in layer.named_parameters()}}, shapes))
        (theirs, their_state), (ours, our_state) = results
        assert their_state == our_state and len(our_state) > 8
        for name, result in theirs.items():
            torch.testing.assert_close(ours[name], result, rtol=2e-5, atol=2e-5, msg=name)
        entries = report(layer, rows=x.shape[0] * B).entries
        assert all(entry.config for entry in entries)
        rows = {entry.module: entry.runs for entry in entries}
        column, row = ("ag_gemm", "gemm_rs") if sp else ("column_linear", "gemm_ar")
        assert rows == {
            "self_attention.linear_proj": row, "self_attention.linear_qkv": column, "mlp.linear_fc1": column,
            "mlp.linear_fc2": row,
        }


@pytest.mark.parametrize("sp", [False, True])
def test_transformer_layer(sp):
    on_ranks(2, transformer_layers_agree, sp)


def checkpoints_agree():
    with model_parallel():
        ours, theirs = Pair(megatron, config_of(True)), Pair(stock, config_of(True))
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert set(ours.state_dict()) > {"fc1._extra_state", "fc2._extra_state"}
        for parameter in ours.parameters():
            parameter.data.zero_()
        ours.load_state_dict(theirs.state_dict())
        for name in ("fc1", "fc2"):
            mine, other = (getattr(p, name).sharded_state_dict(f"{name}.", metadata=metadata()) for p in (ours, theirs))
            assert list(mine) == list(other)
            for key, entry in other.items():
                assert type(mine[key]) is type(entry)
                for field in ("key", "global_shape", "local_shape", "global_offset", "replica_id"):
                    assert getattr(mine[key], field, None) == getattr(entry, field, None), (key, field)
                assert key.endswith("_extra_state") or torch.equal(mine[key].data, entry.data)
            assert list(other) == [f"{name}.weight", f"{name}.bias", f"{name}._extra_state"]


def test_checkpoints():
    on_ranks(2, checkpoints_agree)


# ---- fallbacks ----


def falls_back(sp):
    """Each unsupported setting warns once, and gives the results of Megatron's layers."""

    def check(reason, *, settings=(), dtype=torch.float32, prepare=lambda pair: None, autocast=False):
        x, dy = draw(S, B, H, seed=5, dtype=dtype), draw(S, B, H, seed=6, dtype=dtype)
        results, config = [], config_of(sp, dtype)
        for module in (stock, megatron):
            pair = Pair(module, config)
            if module is megatron:
                pair.fc1.config = pair.fc2.config = changed = config_of(sp, dtype)
                for name, value in dict(settings).items():
                    setattr(changed, name, value)
                prepare(pair)
            stack, names = called()
            cast = torch.autocast(device().type, torch.bfloat16, enabled=autocast)
            with stack, cast, warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = run(pair, x, dy, sp)
                run(pair, x, dy, sp)
            results.append([*result, *(parameter.grad for parameter in pair.parameters())])
        messages = [str(w.message) for w in caught if "tdkernels" in str(w.message)]
        assert len(messages) == 2, messages
        for layer, kind, message in zip(("fc1", "fc2"), ("ColumnParallelLinear", "RowParallelLinear"), messages):
            assert message.startswith(f"tdkernels: {kind}({layer}, ") and message.endswith(f"forward: {reason}")
            assert getattr(pair, layer).tdkernels_runs == (None, reason)
            entry = report(pair)[layer]
            assert entry.runs is None and entry.reason == reason
            assert not getattr(getattr(pair, layer).weight, "main_grad", torch.zeros(())).any()
        assert not names() and all(map(torch.equal, *results))

    def set_main_grad(dtype, fsdp=False):
        def prepare(pair):
            for layer in (pair.fc1, pair.fc2):
                layer.gradient_accumulation_fusion = True
                layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=dtype)
                if fsdp:
                    layer.weight.__fsdp_param__ = True
        return prepare

    with model_parallel():
        check("delay_wgrad_compute is not supported", settings={"delay_wgrad_compute": True})
        check("cpu_offloading is not supported", settings={"cpu_offloading": True})
        check("the dtype of the weight is float64", dtype=torch.float64)
        name = "main_grad is bfloat16, which is neither float32 nor the dtype of the weight"
        check(name, prepare=set_main_grad(torch.bfloat16))
        check("gradient_accumulation_fusion with Megatron-FSDP", prepare=set_main_grad(torch.float32, fsdp=True))

        if not sp:  # with sequence parallelism, the backward of Megatron's layer fails under autocast
            name = "gradient_accumulation_fusion with autocast to another dtype than that of the weight"
            check(name, prepare=set_main_grad(torch.float32), autocast=True)

        class Remat(torch.nn.Parameter):
            pass

        def divide(pair):
            for layer in (pair.fc1, pair.fc2):
                layer.weight = Remat(layer.weight.detach().clone())

        check("the weight is a Remat", prepare=divide)


@pytest.mark.parametrize("sp", [False, True])
def test_fallbacks(sp):
    on_ranks(2, falls_back, sp)


def column_layers_fall_back():
    """Settings of a column layer; and the group of one rank, which does not warn."""
    x, tp, init = draw(S, B, H, seed=5), dist.get_world_size(), torch.nn.init.zeros_

    def forward(layer, backward=True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y, _ = layer(x)
            if backward:
                y.sum().backward()
        assert torch.equal(y, torch.zeros(S, B, layer.output_size_per_partition, device=device()))
        return [str(w.message) for w in caught if "tdkernels" in str(w.message)]

    with model_parallel():
        layer = megatron.ColumnParallelLinear(
            H, F, config=config_of(False), init_method=init, bias=False, disable_grad_reduce=True,
        )
        (message,) = forward(layer)
        reason = "disable_grad_reduce: the layer has no collective"
        assert message == f"tdkernels: ColumnParallelLinear({H} -> {F}) runs Megatron's forward: {reason}"

        # Gradients of deferred layers are computed by Megatron, and need its CUDA extension.
        config = config_of(False, gradient_accumulation_fusion=True)
        config.defer_embedding_wgrad_compute = True
        with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
            megatron.ColumnParallelLinear(H, F, config=config, init_method=init)
        config.gradient_accumulation_fusion = False
        buffer = []
        layer = megatron.ColumnParallelLinear(
            H, F, config=config, init_method=init, bias=False, embedding_activation_buffer=buffer,
            grad_output_buffer=[],
        )
        (message,) = forward(layer, backward=False)  # Megatron's backward needs the extension
        assert len(buffer) == 1 and message.endswith("defer_embedding_wgrad_compute is not supported")
        assert layer.tdkernels_runs == (None, "defer_embedding_wgrad_compute is not supported")

        layer = megatron.ColumnParallelLinear(H, F, config=config_of(False), init_method=init, is_expert=True)
        (message,) = forward(layer)
        assert message.endswith("a layer of experts: its collectives are in the token dispatcher")

        groups = [dist.new_group([rank]) for rank in range(tp)]
        layer = megatron.ColumnParallelLinear(
            H, F, config=config_of(True), init_method=init, tp_group=groups[dist.get_rank()]
        )
        assert forward(layer) == [] and layer.tdkernels_runs[1] == "the tensor-parallel group has one rank"


def test_fallbacks_of_column_layers():
    on_ranks(2, column_layers_fall_back)


# ---- specs and imports ----


def test_layer_spec_replaces_linear_layers():
    spec = get_gpt_layer_local_spec()
    before = repr(spec)
    converted = megatron.layer_spec(spec)
    assert repr(spec) == before
    attention, mlp = converted.submodules.self_attention.submodules, converted.submodules.mlp.submodules
    assert attention.linear_qkv is mlp.linear_fc1 is megatron.ColumnParallelLinear
    assert attention.linear_proj is mlp.linear_fc2 is megatron.RowParallelLinear
    assert attention.core_attention is spec.submodules.self_attention.submodules.core_attention
    assert converted.submodules.self_attention.params == spec.submodules.self_attention.params
    assert repr(megatron.layer_spec(converted)) == repr(converted)
    named = ModuleSpec(module=("megatron.core.tensor_parallel.layers", "RowParallelLinear"), params={"bias": True})
    converted = megatron.layer_spec(named)
    assert converted.module is megatron.RowParallelLinear and converted.params == {"bias": True}
    assert named.module[1] == "RowParallelLinear"


def test_layer_spec_of_experts_and_blocks():
    moe = get_gpt_layer_local_spec(num_experts=4, multi_latent_attention=True)
    assert "tensor_parallel.layers." not in repr(megatron.layer_spec(moe)) and "tensor_parallel.layers." in repr(moe)
    config = TransformerConfig(num_layers=2, hidden_size=H, num_attention_heads=4, use_cpu_initialization=True)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=None, pp_rank=0)
    converted = megatron.layer_spec(block)
    assert type(converted) is type(block) and len(converted.layer_specs) == 2
    assert all(one.submodules.mlp.submodules.linear_fc2 is megatron.RowParallelLinear for one in converted.layer_specs)
    mlp = get_mlp_module_spec_for_backend(megatron.SpecProvider())
    assert dataclasses.asdict(mlp.submodules)["linear_fc1"] is megatron.ColumnParallelLinear
    assert mlp.submodules.linear_fc2 is megatron.RowParallelLinear


def test_layer_spec_rejects_other_layers():
    fused = type("TELayerNormColumnParallelLinear", (torch.nn.Linear,), {})
    fused.__module__ = "megatron.core.extensions.transformer_engine"
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.linear_qkv = fused
    place = r"spec.submodules.self_attention.submodules.linear_qkv \(TELayerNormColumnParallelLinear\)"
    with pytest.raises(ValueError, match=rf"{place} cannot be replaced.*get_gpt_layer_local_spec"):
        megatron.layer_spec(spec)
    with pytest.raises(ValueError, match="no ColumnParallelLinear or RowParallelLinear"):
        megatron.layer_spec(ModuleSpec(module=torch.nn.Linear))
    for other in (stock.ColumnParallelLinear, None):
        with pytest.raises(TypeError, match="spec must be a ModuleSpec"):
            megatron.layer_spec(other)
    spec = get_gpt_layer_local_spec()
    spec.submodules.mlp.submodules.linear_fc1 = type("Adapted", (stock.ColumnParallelLinear,), {})
    with pytest.warns(UserWarning, match=r"keeps .*: spec.submodules.mlp.submodules.linear_fc1 \(Adapted\)"):
        converted = megatron.layer_spec(spec)
    assert converted.submodules.mlp.submodules.linear_fc1.__name__ == "Adapted"


def load_again():
    spec = importlib.util.spec_from_file_location("another_megatron", megatron.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_import_without_megatron():
    load_again()
    without = {name: None for name in sys.modules if name.partition(".")[0] == "megatron"}
    with mock.patch.dict(sys.modules, without), pytest.raises(ImportError, match="needs megatron-core >= 0.16 .pip"):
        load_again()
    old = type("RowParallelLinear", (torch.nn.Module,), {})
    with mock.patch.object(stock, "RowParallelLinear", old), pytest.raises(ImportError, match="_forward_impl"):
        load_again()
