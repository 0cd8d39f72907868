"""A call between the graphs of torch.compile."""

import types

import torch

from tdkernels.runtime import torch_op


def test_a_compiler_does_not_look_at_the_modules(monkeypatch):
    # Their table may grow while it is read: what is traced must not need it.
    monkeypatch.setattr(torch_op, "sys", types.SimpleNamespace())
    traced = []

    @torch_op.outside_graphs
    def adds_one(x):
        traced.append(torch.compiler.is_compiling())
        return x + 1

    compiled = torch.compile(lambda x: adds_one(x * 2) * 3, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 9.0))
    assert traced == [False, False]


def test_a_call_outside_a_compiled_function_is_the_call():
    calls = []
    torch_op.outside_graphs(lambda *args, **kwargs: calls.append((args, kwargs)))(1, two=2)
    assert calls == [((1,), {"two": 2})]
