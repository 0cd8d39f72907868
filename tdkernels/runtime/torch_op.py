"""Registration of operators with torch.library, process groups by name, and graph breaks of torch.compile."""

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.distributed import distributed_c10d as c10d

_library = torch.library.Library("tdkernels", "FRAGMENT")


def register(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register the operator ``torch.ops.tdkernels.<name>``.

    Args:
        schema: as for ``torch.library.define``; begins with the name.
        implementation: for tensors on any device. It has no gradient; an autograd.Function around the operator provides
            it.
        fake: the same for tensors without data; returns outputs of the right shapes.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tdkernels::{name}", fake, lib=_library)


_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function outside the graphs of torch.compile, like ``torch.compiler.disable``.

    ``torch.compiler.disable`` imports torch._dynamo, which takes a second. This decorator avoids the import as long as
    nothing is compiled.
    """
    disabled: list[Callable[_P, _R]] = []

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # A tracing compiler evaluates only the first condition: sys.modules could grow while the compiler reads it.
        if not (torch.compiler.is_compiling() or "torch._dynamo" in sys.modules):
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call


def group_by_name(name: str) -> c10d.ProcessGroup:
    """Return the process group of an operator call, inside the torch.library op."""
    return c10d._resolve_process_group(name)  # type: ignore[arg-type]


def world_size_by_name(name: str) -> int:
    """Return the size of the process group with this name."""
    return group_by_name(name).size()
