"""For operators that torch.compile cannot trace: their calls run between graphs, as they are."""

import functools
import sys

import torch


def outside_graphs(function):
    """``torch.compiler.disable``, without the second that importing torch._dynamo takes while nobody compiles."""
    disabled = []

    @functools.wraps(function)
    def call(*args, **kwargs):
        # A compiler that traces this stops at its first condition: the table of modules may grow while it reads it.
        if not (torch.compiler.is_compiling() or "torch._dynamo" in sys.modules):
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call
