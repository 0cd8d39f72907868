"""NVSHMEM's device functions for Triton kernels. The launcher links the library into the kernel as bitcode.

Names, types and meanings are from NVSHMEM 3.4 (https://docs.nvidia.com/nvshmem/api/). Addresses are int64. All threads
of a program call a function that ends in ``_block`` together. The other functions act for each thread that calls them.
"""

import triton.language as tl
from triton.language import core

_NOTHING = tl.int32  # return type of void functions: the compiler requires one
_I32, _I64 = tl.int32, tl.int64
_SET, _GE = 9, 5  # NVSHMEM_SIGNAL_SET, NVSHMEM_CMP_GE


def _call(symbol, args, types, returns, semantic):
    # If all types were equal, the compiler would search for a conversion. Cast arguments are accepted as they are.
    """Call an external function with its arguments cast to ``types``."""
    args = [semantic.cast(semantic.to_tensor(arg), kind) for arg, kind in zip(args, types, strict=True)]
    return core.extern_elementwise(
        "", "", args, {tuple(types): (symbol, returns)}, is_pure=False, _semantic=semantic
    )


@core.extern
def put_nbi_block(dst, src, num_bytes, pe, _semantic=None):
    """Start a copy from local address ``src`` to the address in the memory of ``pe`` that corresponds to ``dst``."""
    return _call("nvshmemx_putmem_nbi_block", [dst, src, num_bytes, pe], [_I64, _I64, _I64, _I32], _NOTHING, _semantic)


@core.extern
def put_signal_nbi_block(dst, src, num_bytes, signal, value, pe, _semantic=None):
    """``put_nbi_block``, then set the word of ``pe`` that corresponds to the local address ``signal``."""
    return _call(
        "nvshmemx_putmem_signal_nbi_block", [dst, src, num_bytes, signal, value, _SET, pe],
        [_I64, _I64, _I64, _I64, _I64, _I32, _I32], _NOTHING, _semantic,
    )


@core.extern
def signal_set(signal, value, pe, _semantic=None):
    """Set the word of ``pe`` that corresponds to the local address ``signal``."""
    return _call("nvshmemx_signal_op", [signal, value, _SET, pe], [_I64, _I64, _I32, _I32], _NOTHING, _semantic)


@core.extern
def signal_wait_until(signal, value, _semantic=None):
    """Wait until the local word at ``signal`` is at least ``value`` and the data put with it is visible.

    Returns:
        The word.
    """
    return _call("nvshmem_signal_wait_until", [signal, _GE, value], [_I64, _I32, _I64], _I64, _semantic)


@core.extern
def fence(_semantic=None):
    """Order earlier puts of this thread before its later puts."""
    return _call("nvshmem_fence", [], [], _NOTHING, _semantic)


@core.extern
def quiet(_semantic=None):
    """Wait until all puts of this thread have arrived."""
    return _call("nvshmem_quiet", [], [], _NOTHING, _semantic)


@core.extern
def my_pe(_semantic=None):
    """Return the number of this process (PE)."""
    return _call("nvshmem_my_pe", [], [], _I32, _semantic)


@core.extern
def n_pes(_semantic=None):
    """Return the number of processes (PEs)."""
    return _call("nvshmem_n_pes", [], [], _I32, _semantic)
