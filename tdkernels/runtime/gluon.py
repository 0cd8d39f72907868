"""What launchers of kernels in Gluon share. Gluon is experimental, so it is imported when a kernel is used."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

_log = logging.getLogger(__name__)


def optional_kernel(what: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Return a decorator of a function that imports a kernel and returns it.

    The result is cached. It is None, with a warning, if this version of Triton cannot import the kernel.

    Args:
        what: The operator and the kernel, for the warning.
    """

    def decorate(load: Callable[[], Any]) -> Callable[[], Any]:
        @functools.cache
        def kernel() -> Any:
            try:
                return load()
            except (ImportError, AttributeError) as error:
                _log.warning("%s is not available, slower kernels run (%s)", what, error)
                return None

        return kernel

    return decorate


def descriptor(tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> Any:
    """Return a tensor descriptor for blocks that are swizzled in 128 bytes; strides are in elements."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * tensor.itemsize, rank=len(block))
    return TensorDescriptor(tensor, list(sizes), list(strides), list(block), layout)
