"""Calls in the batch-invariant mode: rejected ones, ranks with different settings, gradients and torch.compile."""

import os

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
from tdkernels.symm import shared_settings
from tests.ops import invariance_cases as cases
from tests.support.ranks import a_group, device, on_ranks
from tests.support.simulated_nodes import a_group_on_nodes, needs_gpus
from tests.test_protocol import failure_of


@pytest.fixture(autouse=True)
def restored():
    yield
    shared_settings.set_batch_invariant(None)


def calls(group, dtype=torch.float32, **config):
    """Return {operator: call}, with configs by the operator's name."""
    x, weight, q, cache, lens, ids, weights = cases.operands(dtype)
    gate_up, down = (torch.randn(2, 16, k).to(device(), dtype) for k in (16, 8))
    kv = cache[:, :4]

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
    x, weight, *_ = cases.operands()
    for operator, config, field in VARIANT:
        if config.illegal(device(), torch.bfloat16) is not None:
            continue  # torch's grouped GEMM needs bf16 and sm_90 or sm_100 on GPUs
        with a_group() as group:
            call = calls(group, torch.bfloat16, **{operator: config})[operator]
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
    x, weight, *_ = cases.operands()
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
    """Compare compiled calls with eager ones, where the setting changes between calls of the same compiled function.

    For these sizes the default of gemm_rs is split-K on every device, and the config of the mode is not, so that the
    sums in fp32 have different orders.
    """
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    x, weight = (cases.draw(generator, rows, 1024) for rows in (16, 24))
    call = {"gemm_rs": tdkernels.gemm_rs, "column_linear": tdkernels.column_linear}[operator]
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
    assert all(on_ranks(2, compiled, "gemm_rs"))  # the settings have different results
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
    x, weight, q, cache, _, ids, weights = cases.operands()
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
    x, weight, *_ = cases.operands()
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
