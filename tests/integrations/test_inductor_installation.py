"""Installation of the pass of tdkernels.integrations.inductor, and a program that inductor compiles with it."""

import warnings

import torch
import torch.nn.functional as F

from tdkernels.integrations import inductor
from tests.integrations.compiled_programs import all_reduce, gather, one_product, own, scatter, world
from tests.support.ranks import on_ranks


class _Previous(torch._inductor.custom_graph_pass.CustomGraphPass):
    def __init__(self, key):
        self.key, self.calls = key, 0

    def __call__(self, graph):
        self.calls += 1

    def uuid(self):
        return self.key


def test_install_and_uninstall():
    config, previous = torch._inductor.config, _Previous("a")
    assert config.post_grad_custom_pre_pass is None
    for before in (None, previous, [previous, _Previous("b")]):
        config.post_grad_custom_pre_pass = before
        try:
            passes = inductor.install()
            assert config.post_grad_custom_pre_pass is passes is inductor.install()
            with inductor.installed() as again:
                assert again is passes
            assert config.post_grad_custom_pre_pass is passes, "the block did not install it"
            inductor.uninstall()
            assert config.post_grad_custom_pre_pass == before
            with inductor.installed() as passes:
                assert config.post_grad_custom_pre_pass is passes and len(passes.previous) == len(passes.uuid()) - 2
            assert config.post_grad_custom_pre_pass == before
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                inductor.uninstall()
            assert len(caught) == (before is not None)
        finally:
            config.post_grad_custom_pre_pass = None


def test_key_of_inductors_cache():
    first, second = inductor.overlap_pass(), inductor.overlap_pass()
    assert first.uuid() == second.uuid() and first is not second
    with_a, with_b = (inductor.overlap_pass(_Previous(key)) for key in "ab")
    assert len({first.uuid(), with_a.uuid(), with_b.uuid()}) == 3
    assert inductor.overlap_pass(lambda graph: None).uuid() is None, "inductor cannot cache it"


def by_inductor():
    """The pass in inductor, with code generation. The graphs have no node that needs a C++ kernel, if none copies."""
    from torch._inductor.utils import run_and_get_code

    def function(x, w, v):
        y = scatter(F.linear(F.linear(gather(x, 1, world()), w), v), "sum", 1, world())
        return y, all_reduce(w.detach() @ v.detach(), "sum", world())

    x, w, v = own(2, 4, 8), own(12, 8, seed=1), own(8, 12, seed=2)
    # Without a key inductor does not load the graphs from its cache.
    previous = _Previous(None)
    passes = inductor.overlap_pass(previous)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, options={"post_grad_custom_pre_pass": passes})

    def step(call):
        inputs = [one.clone().requires_grad_() for one in (x, w, v)]
        y, z = call(*inputs)
        torch.autograd.backward([y], [y.detach().sign()])
        return [y.detach() + 0, z.detach() + 0, *(one.grad for one in inputs)]

    results, codes = run_and_get_code(step, compiled)
    assert all(torch.equal(a, b) for a, b in zip(step(function), results, strict=True))
    assert previous.calls == len(codes) == 2 and not any("cpp_fused" in code for code in codes)
    assert "torch.ops.tdkernels.gemm_rs" in codes[0] and "torch.ops.tdkernels.gemm_rs" in codes[1]
    with inductor.installed() as passes_of_config, torch._inductor.config.patch(force_disable_caches=True):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(one_product(1))(x, w), one_product(1)(x, w))
    assert str(passes_of_config.report) == "1 of 1 collectives fused in 1 graph: 1 ag_gemm"
    return str(passes.report)


def test_inductor():
    reports = on_ranks(2, by_inductor)
    assert reports == 2 * ["5 of 5 collectives fused in 2 graphs: 2 ag_gemm, 1 gemm_ar, 2 gemm_rs"]
