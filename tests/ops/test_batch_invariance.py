"""Batch-invariant mode: a row of a result has the same bits for any number, order and values of the other rows."""

import os
import re

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import (
    AgAttentionConfig,
    AgGemmConfig,
    CollectiveConfig,
    EpConfig,
    EpMoeConfig,
    FlashDecodeConfig,
    GemmArConfig,
    GemmRsConfig,
    GroupGemmConfig,
    MoeTpConfig,
)
from tdkernels.autotune.invariance import selection_mode
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable
from tdkernels.runtime import gpu as runtime_gpu
from tdkernels.symm import shared_settings
from tests.ops import invariance_cases as cases
from tests.support.ranks import DEVICE, a_group, device, on_ranks
from tests.support.simulated_nodes import a_group_on_nodes, needs_gpus
from tests.test_protocol import failure_of

DTYPES = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def restored():
    yield
    shared_settings.set_batch_invariant(None)


# ---- the setting ----


def test_blocks_nest_and_restore(monkeypatch):
    monkeypatch.setenv("TDKERNELS_AUTOTUNE", "off")
    enabled = shared_settings.is_batch_invariant
    assert not enabled() and selection_mode() == "off"
    with tdkernels.batch_invariant():
        assert enabled() and selection_mode() == "off, batch-invariant"
        with tdkernels.batch_invariant(False):
            assert not enabled()
            tdkernels.set_batch_invariant(True)
            assert enabled()
        assert enabled()
        with pytest.raises(ZeroDivisionError), tdkernels.batch_invariant(False):
            raise ZeroDivisionError
        assert enabled()
    assert not enabled()
    tdkernels.set_batch_invariant(True)
    with tdkernels.batch_invariant(False):
        pass
    assert enabled()


@pytest.mark.parametrize("value", [1, 0, "on", "1"])
def test_only_booleans_are_settings(value):
    for call in (tdkernels.set_batch_invariant, lambda value: tdkernels.batch_invariant(value).__enter__()):
        with pytest.raises(TypeError, match=re.escape(f"must be True, False or None, not {value!r}")):
            call(value)


def test_environment_variable(monkeypatch):
    for text, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("TDKERNELS_BATCH_INVARIANT", text)
        tdkernels.set_batch_invariant(None)
        assert shared_settings.is_batch_invariant() is expected
        tdkernels.set_batch_invariant(not expected)
        assert shared_settings.is_batch_invariant() is not expected
    monkeypatch.setenv("TDKERNELS_BATCH_INVARIANT", "yes")
    tdkernels.set_batch_invariant(None)
    with pytest.raises(ValueError, match="TDKERNELS_BATCH_INVARIANT must be 0 or 1, not 'yes'"):
        shared_settings.is_batch_invariant()
    tdkernels.set_batch_invariant(False)
    assert not shared_settings.is_batch_invariant()


# ---- bits of rows in many batches ----


def dense_ranks(dtype):
    """Return {check: changed rows} of the GEMMs."""
    found = cases.dense(dtype, cases.DENSE, mode=True)
    found["gemm_rs, dim=1"] = cases.middle_of_a_sequence(dtype)
    return found, cases.configs_by_rows(dtype), cases.dense(dtype, ["gemm_rs"], mode=False)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gemms(ranks, dtype):
    for changed, by_rows, default in on_ranks(ranks, dense_ranks, dtype):
        assert not any(changed.values()), changed
        if dtype == torch.float32:  # rounding to bf16 hides most differences of the order of the sum
            assert all(by_rows.values()), by_rows
        elif ranks > 1 and DEVICE != "cuda":  # the default on CPU, "forward", does not round this rank's own partial
            assert default["gemm_rs"] > 0


def other_ranks(dtype):
    """Return {check: changed} of the collectives and of group_gemm."""
    found = {f"group_gemm, {activation}": cases.grouped(dtype, activation) for activation in (None, "swiglu")}
    return {**found, **cases.collectives(dtype), **(cases.grouped_fp8() if dtype == torch.float32 else {})}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives_and_grouped_gemm(ranks, dtype):
    for changed in on_ranks(ranks, other_ranks, dtype):
        assert not any(changed.values()), changed


def copies():
    """Check that operators that only copy work in the mode and return what they return without it."""
    x, _, _, _, _, ids, weights = operands()
    splits = torch.tensor([1, 3], device=device())
    sent = tdkernels.ep_dispatch_send

    def run():
        recv, handle = sent(x, ids, weights, num_experts=2).receive()
        y = tdkernels.ep_combine_send(recv.x, handle).receive()
        return tdkernels.all_gather(x), tdkernels.all_to_all(x, splits)[0], recv.x, recv.topk_weights, y

    expected = run()
    with tdkernels.batch_invariant():
        got = run()
    for one, other in zip(got[:-1], expected[:-1], strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(got[-1], expected[-1])


def test_copies():
    on_ranks(2, copies)


LAYERS = "tp_moe", "ep_dispatch, ep_combine", "ep_moe", "ep_moe, bounded", "ep_moe, fused"


def expert_ranks(dtype):
    """Return {layer: changed} in the mode and without it."""
    return cases.experts(dtype, LAYERS, mode=True), cases.experts(dtype, LAYERS[:3], mode=False)


@pytest.mark.parametrize("ranks, dtype", [(1, torch.bfloat16), (2, torch.bfloat16), (2, torch.float32)])
def test_expert_layers(ranks, dtype):
    for changed, default in on_ranks(ranks, expert_ranks, dtype):
        assert not any(changed.values()), changed
        if ranks > 1 and dtype == torch.bfloat16:  # the sums of other ranks are rounded, those of the token's rank not
            assert all(default.values()), default


def router_and_layers():
    """Return {module: rows whose bits change} of the router and of a float8 layer without sequence parallelism."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 64, generator=generator).to(device())
    router = tdkernels.nn.Router(64, 8, 2).to(device())
    router.weight.data.copy_(torch.randn(8, 64, generator=generator))
    layer = tdkernels.nn.ColumnParallelLinear(64, 32, bias=False, float8="rowwise", device=device())
    layer.weight.data.copy_(torch.randn(layer.weight.shape, generator=generator))
    changed = {}
    with tdkernels.batch_invariant(), torch.no_grad():
        for name, module in (("router", lambda x: router(x)[1]), ("float8", layer)):
            whole = module(x)
            changed[name] = sum(not torch.equal(module(x[first:last]), whole[first:last]) for first, last in PARTS)
    return changed


PARTS = [(0, 1), (3, 4), (5, 22), (17, 40)]


def test_modules():
    for changed in on_ranks(2, router_and_layers):
        assert not any(changed.values()), changed


def float8_gradients(float8, dim):
    """Check that a float8 row-parallel layer has gradients in the mode, equal to those outside of it."""
    layer = tdkernels.nn.RowParallelLinear(
        64, 16, bias=False, sequence_parallel=True, seq_dim=dim, float8=float8, float8_dweight=True, device=device()
    )
    found = []
    for enabled in (False, True):
        x = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(dist.get_rank())).to(device())
        x.requires_grad_()
        with tdkernels.batch_invariant(enabled):
            y = layer(x)
            y.backward(torch.ones_like(y))
        found.append((y.detach(), x.grad, layer.weight.grad))
        layer.weight.grad = None
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("float8, dim", [("rowwise", 1), ("tensorwise", 0)])
def test_gradients_of_float8_layers(float8, dim):
    on_ranks(2, float8_gradients, float8, dim)


def router_gradients():
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(5)).to(device())
    router = tdkernels.nn.Router(16, 4, 2).to(device())
    gradients = []
    for enabled in (False, True):
        with tdkernels.batch_invariant(enabled):
            router(x)[1].sum(-1).mul(torch.arange(6, device=device())).sum().backward()
        gradients.append(router.weight.grad)
        router.weight.grad = None
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(*gradients)


def test_gradients_of_the_router():
    on_ranks(1, router_gradients)


def decode_ranks(dtype, names):
    """Return {problem: changed} of flash_decode, and how many results change if programs share keys equally."""
    found = {name: cases.decode(name, dtype) for name in names}
    found["paged"] = cases.decode("chunks", dtype, paged=True)
    return found, cases.decode("chunks", dtype, mode=False)


FEW = "chunks", "queries and a window"


@pytest.mark.parametrize("ranks, dtype, names", [
    (1, torch.float32, list(cases.DECODES)), (2, torch.bfloat16, list(cases.DECODES)), (3, torch.float32, FEW),
])
def test_flash_decode(ranks, dtype, names):
    for changed, default in on_ranks(ranks, decode_ranks, dtype, names):
        assert not any(changed.values()), changed
        assert default > 0


def attention_ranks(dtype):
    """Return {mask: changed} of ag_attention."""
    masks = (True, "contiguous"), (True, "zigzag"), (False, "contiguous")
    return {mask: cases.attention(dtype, *mask) for mask in masks}


@pytest.mark.parametrize("ranks, dtype", [(1, torch.bfloat16), (2, torch.float32), (3, torch.bfloat16)])
def test_ag_attention(ranks, dtype):
    for changed in on_ranks(ranks, attention_ranks, dtype):
        assert not any(changed.values()), changed


# ---- configs ----

OPERATORS = {  # name: (layout, shape for M rows, world size)
    "ag_gemm": ("nk", lambda m: (m, 4096, 4096), 4),
    "gemm_rs": ("kn", lambda m: (m, 4096, 4096), 4),
    "gemm_ar": ("nk", lambda m: (m, 4096, 4096), 4),
    "group_gemm": ("swiglu", lambda m: (m, 4096, 2048, 16), 1),
    "tp_moe": ("swiglu", lambda m: (m, 2048, 1024, 16, 2), 4),
    "moe_ag_gemm": ("swiglu", lambda m: (m, 4096, 2048, 16, 2), 4),
    "moe_gemm_rs": ("nk", lambda m: (m, 4096, 2048, 16, 2), 4),
    "ep_moe": ("exact", lambda m: (m, 2048, 1024, 16, 2), 4),
    "flash_decode": ("dense", lambda m: (m, 1, 32, 8, 128, 128, 4096), 4),
    "ag_attention": ("full", lambda m: (m, 4096, 32, 8, 128, 128), 4),
}
FP8_OPERATORS = {"ag_gemm", "gemm_rs", "gemm_ar"}
ROWS = 4, 8, 64, 256, 512, 1024, 4096, 32768


@pytest.fixture(params=[(9, 0), (8, 0), (10, 0)], ids=lambda capability: f"sm_{capability[0]}{capability[1]}")
def simulated_gpu(request, monkeypatch):
    """A CUDA device of each generation, without a GPU."""
    shared = {8: 166912, 9: 232448, 10: 232448}[request.param[0]]
    monkeypatch.setattr(runtime_gpu, "shared_memory_bytes", lambda device: shared)
    monkeypatch.setattr(runtime_gpu, "num_sms", lambda device: 132)
    monkeypatch.setattr(runtime_gpu, "max_warps", lambda device: 32)
    monkeypatch.setattr(runtime_gpu, "capability", lambda device: request.param)
    return torch.device("cuda", 0)


def problem(operator, rows, dtype, layout=None, local=None):
    """Return a tuning problem with ``rows`` rows."""
    usual, shape, world_size = OPERATORS[operator]
    local = local or world_size
    return Problem(operator, "a GPU", world_size, local, dtype, layout or usual, shape(rows))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_config_does_not_depend_on_the_rows(operator, dtype, simulated_gpu):
    made = tunable(operator)
    problems = [problem(operator, rows, dtype) for rows in ROWS]
    configs = {made.invariant(one, simulated_gpu) for one in problems}
    assert len(configs) == 1
    (config,) = configs
    assert made.illegal(config, problems[0], simulated_gpu) is None and config.variant_reason() is None
    if operator in ("ag_gemm", "gemm_rs", "gemm_ar"):
        defaults = {made.default(one, simulated_gpu) for one in problems}
        assert len(defaults) > 1 or dtype == "float32"  # the test could fail
        assert config.tiles is not None and config.split_k == 1


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_config_of_flash_decode_does_not_depend_on_what_ranks_may_differ_in(layout, heads, simulated_gpu):
    made, configs = tunable("flash_decode"), {}
    for kind in ("", " latent"):
        for keys in (1, 65536):
            one = Problem("flash_decode", "a GPU", 4, 4, "bfloat16", layout + kind, (4, 1, heads, 1, 576, 512, keys))
            assert made.illegal(made.invariant(one, simulated_gpu), one, simulated_gpu) is None
            configs.setdefault(made.key(one), set()).add(made.invariant(one, simulated_gpu))
    assert [len(found) for found in configs.values()] == [1]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("operator", ["all_reduce_rms_norm", "gemm_ar_rms_norm"])
def test_config_of_norms_does_not_depend_on_the_rows(operator, world_size, simulated_gpu):
    made = tunable(operator)
    sizes = (8192,) if operator.startswith("all") else (8192, 4096)
    problems = [Problem(operator, "a GPU", world_size, world_size, "bfloat16", "rows", (m, *sizes)) for m in ROWS]
    configs = {made.invariant(one, simulated_gpu) for one in problems}
    assert len(configs) == 1 and made.illegal(*configs, problems[0], simulated_gpu) is None


@pytest.mark.parametrize("layout", ["scaled", "scaled fast", "scaled by block"])
@pytest.mark.parametrize("operator", sorted(FP8_OPERATORS))
def test_config_of_fp8_does_not_depend_on_the_rows(operator, layout, simulated_gpu):
    made = tunable(operator)
    assert layout in made.layouts
    configs = {made.invariant(problem(operator, rows, "float8_e4m3fn", layout), simulated_gpu) for rows in ROWS}
    assert len(configs) == 1
    assert made.illegal(*configs, problem(operator, 64, "float8_e4m3fn", layout), simulated_gpu) is None


@pytest.mark.parametrize("operator", sorted(FP8_OPERATORS))
def test_open_tiles_are_those_of_the_mode(operator, simulated_gpu):
    made = tunable(operator)
    given = made.config_class(transport="direct") if operator == "gemm_rs" else made.config_class()
    with tdkernels.batch_invariant():
        filled = {made.completed(given, problem(operator, rows, "bfloat16"), simulated_gpu) for rows in ROWS}
    assert {one.tiles for one in filled} == {made.invariant(problem(operator, 8, "bfloat16"), simulated_gpu).tiles}


def test_groups_that_are_not_supported():
    for operator in ("ag_gemm", "gemm_rs", "gemm_ar"):
        with (
            tdkernels.batch_invariant(),
            pytest.raises(NotImplementedError, match=f"{operator}: a group on several nodes is not supported"),
        ):
            tunable(operator).invariant(problem(operator, 64, "bfloat16", local=2), torch.device("cpu"))
    wide = Problem("gemm_rs", "a GPU", 16, 16, "bfloat16", "nk", (64, 4096, 4096))
    with tdkernels.batch_invariant(), pytest.raises(NotImplementedError, match="more than 8 ranks"):
        tunable("gemm_rs").invariant(wide, torch.device("cpu"))


def test_explain_names_the_mode():
    with tdkernels.batch_invariant():
        explained = tdkernels.explain("gemm_rs", 64, 64, 64, world_size=2)
        assert explained.source == "batch_invariant" and explained.config.transport == "direct"
        with pytest.raises(ValueError, match="gemm_rs: config is not batch-invariant: transport"):
            tdkernels.explain("gemm_rs", 64, 64, 64, world_size=2, config=GemmRsConfig())
    assert tdkernels.explain("gemm_rs", 64, 64, 64, world_size=2).source != "batch_invariant"


# ---- errors ----


def operands():
    """Return operands of calls on two ranks."""
    draw = lambda *shape: torch.randn(*shape).to(device())  # noqa: E731
    lens = torch.tensor([3], dtype=torch.int32, device=device())
    ids = torch.tensor([[0, 1]] * 4, device=device())
    return draw(4, 16), draw(8, 16), draw(1, 2, 16), draw(1, 8, 2, 16), lens, ids, torch.ones(4, 2).to(device())


def calls(group, **config):
    """Return {operator: call}, with configs by the operator's name."""
    x, weight, q, cache, lens, ids, weights = operands()
    gate_up, down, kv = torch.randn(2, 16, 16), torch.randn(2, 16, 8), cache[:, :4]

    def combine():
        recv, handle = tdkernels.ep_dispatch(x, ids, weights, num_experts=2, group=group)
        return tdkernels.ep_combine(recv.x, handle, group=group, config=config.get("ep_combine"))

    return {
        "ag_gemm": lambda: tdkernels.ag_gemm(x, weight, group=group, config=config.get("ag_gemm")),
        "gemm_rs": lambda: tdkernels.gemm_rs(x, weight, group=group, config=config.get("gemm_rs")),
        "gemm_ar": lambda: tdkernels.gemm_ar(x, weight, group=group, config=config.get("gemm_ar")),
        "all_reduce": lambda: tdkernels.all_reduce(x, group=group, config=config.get("all_reduce")),
        "reduce_scatter": lambda: tdkernels.reduce_scatter(x, group=group, config=config.get("reduce_scatter")),
        "group_gemm": lambda: tdkernels.group_gemm(
            x, weight[None], torch.tensor([4], device=device()), config=config.get("group_gemm")
        ),
        "tp_moe": lambda: tdkernels.tp_moe(
            x, ids, weights, gate_up, down, group=group, config=config.get("tp_moe")
        ),
        "ep_moe": lambda: tdkernels.ep_moe(
            x, ids, weights, gate_up[:1], down[:1], num_experts=2, group=group, config=config.get("ep_moe")
        ),
        "ep_combine": combine,
        "flash_decode": lambda: tdkernels.flash_decode(
            q, cache, cache, lens, group=group, config=config.get("flash_decode")
        ),
        "ag_attention": lambda: tdkernels.ag_attention(kv, kv, kv, group=group, config=config.get("ag_attention")),
    }


VARIANT = [  # (operator, config, the field in the error)
    ("ag_gemm", AgGemmConfig(method="torch"), "method"), ("ag_gemm", AgGemmConfig(method="parts"), "method"),
    ("gemm_rs", GemmRsConfig(method="torch"), "method"), ("gemm_rs", GemmRsConfig(), "transport"),
    ("gemm_ar", GemmArConfig(method="torch"), "method"), ("all_reduce", CollectiveConfig(method="torch"), "method"),
    ("reduce_scatter", CollectiveConfig(method="torch"), "method"),
    ("group_gemm", GroupGemmConfig(method="torch"), "method"), ("tp_moe", MoeTpConfig(method="torch"), "method"),
    ("ep_moe", EpMoeConfig(method="torch"), "method"),
    ("ep_moe", EpMoeConfig(ep=EpConfig()), "ep: combine"),
    ("ep_moe", EpMoeConfig(gemm=GroupGemmConfig(method="torch")), "gemm: method"),
    ("ep_combine", EpConfig(), "combine"), ("flash_decode", FlashDecodeConfig(method="torch"), "method"),
    ("flash_decode", FlashDecodeConfig(block_n=16, num_warps=1, num_stages=1), "chunk_keys"),
    ("ag_attention", AgAttentionConfig(method="torch"), "method"),
]
UNSUPPORTED = {
    "ulysses_qkv": lambda x, w: tdkernels.ulysses_qkv(x[None], w),
    "ulysses_out": lambda x, w: tdkernels.ulysses_out(x[None, :, :8].contiguous(), w),
    'ag_gemm: wire="fp8"': lambda x, w: tdkernels.ag_gemm(x, w, wire="fp8"),
    'gemm_rs: wire="fp8"': lambda x, w: tdkernels.gemm_rs(x, w, wire="fp8"),
    'all_reduce: quantize="fp8"': lambda x, w: tdkernels.all_reduce(x, quantize="fp8"),
    "ag_gemm: return_gathered with a call": lambda x, w: tdkernels.ag_gemm(x, [w] * 4, return_gathered=True),
}


def rejects():
    """Check the errors of configs and of calls that depend on the batch, also if the call cache knows the call."""
    x, weight, *_ = operands()
    for operator, config, field in VARIANT:
        with a_group() as group:
            call = calls(group, **{operator: config})[operator]
            call()
            with tdkernels.batch_invariant():
                error = failure_of(call)
            assert type(error) is ValueError and f"{operator}: config is not batch-invariant: {field}" in str(error)
            call()  # still usable
    for message, call in UNSUPPORTED.items():
        call(x, weight)
        with tdkernels.batch_invariant():
            error = failure_of(call, x, weight)
        assert type(error) is NotImplementedError and message in str(error), (message, error)


def test_calls_that_depend_on_the_batch_are_rejected():
    on_ranks(2, rejects)


def rejects_alone():
    x, weight, *_ = operands()
    for function, config in ((tdkernels.ag_gemm, AgGemmConfig(method="torch")), (tdkernels.gemm_rs, GemmRsConfig())):
        with tdkernels.batch_invariant():
            error = failure_of(function, x, weight, config=config)
        assert type(error) is ValueError and "config is not batch-invariant" in str(error)
    with tdkernels.batch_invariant():
        assert type(failure_of(tdkernels.ulysses_qkv, x[None], weight)) is NotImplementedError


def test_calls_of_one_rank_are_rejected():
    on_ranks(1, rejects_alone)


DIFFERENCE = 'batch_invariant is "absent" on rank 0, true on rank 1'
FIXED = {
    "gemm_rs": GemmRsConfig(transport="direct"), "all_reduce": CollectiveConfig(num_programs=2),
    "flash_decode": FlashDecodeConfig(block_n=16, num_warps=1, num_stages=1, chunk_keys=16),
}


def ranks_differ():
    """Return the errors of calls of two ranks with different settings: first calls, and calls in the call cache."""
    differs, errors = dist.get_rank() == 1, {}
    for operator in ("ag_gemm", "gemm_rs", "all_reduce", "flash_decode", "ag_attention", "tp_moe"):
        for config in {None, FIXED.get(operator)}:
            with a_group() as group:
                call = calls(group, **{operator: config})[operator]
                with tdkernels.batch_invariant(differs):
                    errors[operator, config is not None] = failure_of(call)
    with a_group() as group:
        call = calls(group)["all_reduce"]
        for mode in (False, True):
            with tdkernels.batch_invariant(mode):
                call()
                call()
        with tdkernels.batch_invariant(differs):
            known = failure_of(call)
    return errors, known


def test_ranks_with_different_settings():
    for errors, known in on_ranks(2, ranks_differ):
        for call, error in errors.items():
            assert type(error) is ValueError and DIFFERENCE in str(error), (call, error)
        # Both calls are known, so the kernels find it out, and no rank returns a result.
        assert type(known) is tdkernels.PlanMismatchError, known


def several_nodes():
    with a_group_on_nodes(1) as group:
        for operator in ("ag_gemm", "gemm_rs", "gemm_ar", "all_reduce", "tp_moe", "ep_moe", "flash_decode"):
            for config in {None, {**FIXED, "ag_gemm": AgGemmConfig(), "gemm_ar": GemmArConfig()}.get(operator)}:
                if config is not None and operator == "all_reduce":
                    continue  # an error without the mode, too
                with tdkernels.batch_invariant():
                    error = failure_of(calls(group, **{operator: config})[operator])
                assert type(error) is NotImplementedError and "several nodes" in str(error), (operator, error)


@needs_gpus
def test_several_nodes_are_rejected():
    on_ranks(2, several_nodes)


# ---- torch.compile ----


def compiled(operator):
    """Compare compiled calls with eager ones, where the setting changes between calls of the same compiled function."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    x, weight = (cases.draw(generator, rows, 200) for rows in (40, 24))
    call = {"gemm_rs": tdkernels.gemm_rs, "column_linear": tdkernels.column_linear}[operator]
    x, weight = (x.bfloat16(), weight.bfloat16()) if operator == "gemm_rs" else (x, weight)
    function = torch.compile(lambda x, weight: call(x, weight), backend="aot_eager", fullgraph=True)
    eager = {}
    for mode in (False, True):
        with tdkernels.batch_invariant(mode):
            eager[mode] = call(x, weight)
    for mode in (True, False, True, False):
        with tdkernels.batch_invariant(mode):
            assert torch.equal(function(x, weight), eager[mode])
    return not torch.equal(eager[True], eager[False])


def test_compiled_calls_obey_the_setting_at_run_time():
    assert any(on_ranks(2, compiled, "gemm_rs"))  # the settings have different results
    on_ranks(1, compiled, "column_linear")


def gradients_of(call, operands):
    """Return the output of a call, and a function that returns the gradients of its operands."""
    inputs = [one.clone().requires_grad_() for one in operands]
    y = call(*inputs)

    def backward():
        torch.manual_seed(3)
        y.backward(torch.randn(y.shape).to(y))
        return [one.grad for one in inputs]

    return y.detach(), backward


def trains():
    """Compare gradients with those without the mode, where the forward, the backward or both are in the mode."""
    x, weight, q, cache, _, ids, weights = operands()
    ids = ids.clone()
    draw = lambda *shape: torch.randn(*shape).to(device())  # noqa: E731
    gate_up, down, kv = draw(2, 16, 16), draw(2, 16, 8), cache[:, :5].contiguous()
    torch._dynamo.reset()
    layer = lambda x, weights, gate_up, down: tdkernels.tp_moe(x, ids, weights, gate_up, down)  # noqa: E731
    cases_of = {
        "ag_gemm": (tdkernels.ag_gemm, (x, weight)), "gemm_rs": (tdkernels.gemm_rs, (x, weight)),
        "gemm_ar": (tdkernels.gemm_ar, (x, weight)), "column_linear": (tdkernels.column_linear, (x, weight)),
        "ag_attention": (tdkernels.ag_attention, (kv, kv.clone(), kv.clone())),
        "tp_moe": (layer, (x, weights, gate_up, down)),
        "tp_moe, compiled": (torch.compile(layer, backend="aot_eager", fullgraph=True), (x, weights, gate_up, down)),
        "ep_moe": (
            lambda x, weights, gate_up, down: tdkernels.ep_moe(x, ids, weights, gate_up, down, num_experts=2),
            (x, weights, gate_up[:1], down[:1]),
        ),
    }
    for name, (call, given) in cases_of.items():
        y, backward = gradients_of(call, given)
        expected = backward()
        for mode, mode_of_backward in ((True, True), (True, False), (False, True)):
            with tdkernels.batch_invariant(mode):
                z, backward = gradients_of(call, given)
            with tdkernels.batch_invariant(mode_of_backward):
                got = backward()
            for one, other in zip((z, *got), (y, *expected), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: name + text)


def test_gradients_of_calls_in_the_mode():
    on_ranks(2, trains)


def compiled_rejects():
    torch._dynamo.reset()
    x, weight, *_ = operands()
    config = GemmRsConfig()
    function = torch.compile(
        lambda x, weight: tdkernels.gemm_rs(x, weight, config=config), backend="aot_eager", fullgraph=True
    )
    function(x, weight)
    with tdkernels.batch_invariant(), pytest.raises(Exception, match="gemm_rs: config is not batch-invariant"):
        function(x, weight)


def test_compiled_calls_are_rejected_at_run_time():
    on_ranks(2, compiled_rejects)


def test_variable_is_documented():
    folder = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    with open(os.path.join(folder, "docs", "reference", "environment.md"), encoding="utf-8") as page:
        assert "`TDKERNELS_BATCH_INVARIANT`" in page.read()
