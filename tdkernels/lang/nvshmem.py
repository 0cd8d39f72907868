"""NVSHMEM's device functions, for a kernel: the library itself is linked in as bitcode by who launches it.

Names, types and meanings are those of NVSHMEM 3.4 (https://docs.nvidia.com/nvshmem/api/). Addresses are int64.
A function that ends in ``_block`` is called by all threads of a program together, the others by whoever calls them.
"""

import triton.language as tl
from triton.language import core

_NOTHING = tl.int32  # what a void function returns, for a compiler that wants something
_I32, _I64 = tl.int32, tl.int64
_SET, _GE = 9, 5  # NVSHMEM_SIGNAL_SET, NVSHMEM_CMP_GE


def _call(symbol, args, types, returns, semantic):
    # All types equal would let the compiler look for a conversion; given as they are, it takes them.
    args = [semantic.cast(semantic.to_tensor(arg), kind) for arg, kind in zip(args, types, strict=True)]
    return core.extern_elementwise(
        "", "", args, {tuple(types): (symbol, returns)}, is_pure=False, _semantic=semantic
    )


@core.extern
def put_nbi_block(dst, src, num_bytes, pe, _semantic=None):
    """Start to copy from our memory at src to that of ``pe`` at what is dst here."""
    return _call("nvshmemx_putmem_nbi_block", [dst, src, num_bytes, pe], [_I64, _I64, _I64, _I32], _NOTHING, _semantic)


@core.extern
def put_signal_nbi_block(dst, src, num_bytes, signal, value, pe, _semantic=None):
    """``put_nbi_block``, then set the word at what is ``signal`` here."""
    return _call(
        "nvshmemx_putmem_signal_nbi_block", [dst, src, num_bytes, signal, value, _SET, pe],
        [_I64, _I64, _I64, _I64, _I64, _I32, _I32], _NOTHING, _semantic,
    )


@core.extern
def signal_set(signal, value, pe, _semantic=None):
    """Set the word of ``pe`` at what is ``signal`` here."""
    return _call("nvshmemx_signal_op", [signal, value, _SET, pe], [_I64, _I64, _I32, _I32], _NOTHING, _semantic)


@core.extern
def signal_wait_until(signal, value, _semantic=None):
    """Wait until our word at ``signal`` is at least ``value`` and what was put with it can be seen; the word."""
    return _call("nvshmem_signal_wait_until", [signal, _GE, value], [_I64, _I32, _I64], _I64, _semantic)


@core.extern
def fence(_semantic=None):
    """Order what this thread has put before what it puts after."""
    return _call("nvshmem_fence", [], [], _NOTHING, _semantic)


@core.extern
def quiet(_semantic=None):
    """Return when what this thread has put has arrived."""
    return _call("nvshmem_quiet", [], [], _NOTHING, _semantic)


@core.extern
def my_pe(_semantic=None):
    """The number of this process."""
    return _call("nvshmem_my_pe", [], [], _I32, _semantic)


@core.extern
def n_pes(_semantic=None):
    """How many processes there are."""
    return _call("nvshmem_n_pes", [], [], _I32, _semantic)
