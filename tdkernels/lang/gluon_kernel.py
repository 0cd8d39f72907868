"""Kernels in Gluon, Triton's lower-level language: compiled for one GPU architecture, never interpreted."""

from collections.abc import Callable
from typing import Any

from triton.experimental.gluon._runtime import GluonJITFunction

from tdkernels.lang.kernel import Kernel


class GluonKernel(GluonJITFunction):
    """A Gluon function that is launched like a ``Kernel``.

    It has no CPU version, so each use needs a portable kernel that computes the same.
    """

    # The same fast path: it needs only what every JITFunction has.
    launch_bound = Kernel.launch_bound
    _others = Kernel._others


def gluon_jit(**options: Any) -> Callable[[Callable[..., Any]], GluonKernel]:
    """Return a decorator that turns a function into a GluonKernel; ``options`` are those of ``triton.jit``."""
    return lambda fn: GluonKernel(fn, **options)
