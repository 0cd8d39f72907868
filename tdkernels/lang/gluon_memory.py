"""Gluon's functions for shared memory whose names differ between versions of Triton.

Triton 3.8 has both names of the copies. Triton 3.9 has the new names only.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# (descriptor, position, barrier, shared memory, pred=True): load a block with TMA.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# (descriptor, position, shared memory): store a block with TMA.
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
# (shared memory, pointers, mask=None): load elements with "cp.async".
async_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

_Memory = gl.shared_memory_descriptor
# (shared memory, dtype, shape, layout): the same memory with another dtype, shape and layout.
reinterpret = _Memory.reinterpret if hasattr(_Memory, "reinterpret") else _Memory._reinterpret
