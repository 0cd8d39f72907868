"""Operators of torch.library: groups by their names, and calls that torch.compile cannot trace, between its graphs."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.distributed import distributed_c10d as c10d

_library = torch.library.Library("tdkernels", "FRAGMENT")


def register(schema, implementation, fake):
    """Register ``torch.ops.tdkernels.<name>``, where ``schema`` begins with the name.

    Args:
        schema: as of ``torch.library.define``
        implementation: for tensors on any device; it has no gradient, which an autograd.Function around it has
        fake: the same for tensors without data: outputs of the right shapes
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tdkernels::{name}", fake, lib=_library)


_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``torch.compiler.disable``, without the second that importing torch._dynamo takes while nobody compiles."""
    disabled: list[Callable[_P, _R]] = []

    @functools.wraps(function)
    def call(*args, **kwargs):
        # A compiler that traces this stops at its first condition: the table of modules may grow while it reads it.
        if not (torch.compiler.is_compiling() or "torch._dynamo" in sys.modules):
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call


def group_by_name(name):
    """The process group that an operator was called with, inside the torch.library op."""
    return c10d._resolve_process_group(name)


def world_size_by_name(name):
    return group_by_name(name).size()
