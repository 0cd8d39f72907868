"""Calls outside the graphs of torch.compile."""

import types

import torch

from tdkernels.runtime import torch_op


def test_tracing_does_not_access_sys_modules(monkeypatch):
    # sys.modules may grow while a compiler reads it, so tracing must not access it.
    monkeypatch.setattr(torch_op, "sys", types.SimpleNamespace())
    traced = []

    @torch_op.outside_graphs
    def add_one(x):
        traced.append(torch.compiler.is_compiling())
        return x + 1

    compiled = torch.compile(lambda x: add_one(x * 2) * 3, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 9.0))
    assert traced == [False, False]


def test_uncompiled_call_is_unchanged():
    calls = []
    torch_op.outside_graphs(lambda *args, **kwargs: calls.append((args, kwargs)))(1, two=2)
    assert calls == [((1,), {"two": 2})]
