"""rocSHMEM's device functions for Triton kernels: communication between AMD GPUs of different hosts.

All threads of a program call each function together, under ``if target() == "hip":``. The kernel is launched with
``extern_libs=device_library()``, and its module is initialized with ``RocshmemRuntime.init_module``. Addresses are
int64 scalars, or pointers, of symmetric memory in this process. ``rocshmem.ll`` adapts the device library to the calls
made here. For a peer on the same host, use plain stores to ``RocshmemRuntime.peer_address``.

The tests compile these functions for gfx942 and gfx950 with a stand-in for the device library. They have never run on
AMD hardware.
"""

import functools
import hashlib
import os
import re
from pathlib import Path

import torch
import triton.language as tl

from tdkernels.lang.kernel import jit

_NAME = "librocshmem_device_{arch}.bc"  # cmake/DeviceBitcode.cmake of rocSHMEM
_VARIABLE = "TDKERNELS_ROCSHMEM_DEVICE_LIBRARY"
_WORDS = Path(__file__).with_suffix(".ll")


def _call(symbol, args, types, semantic):
    """Call a function of ``lang/rocshmem.ll``; all of them return an int32."""
    values = [tl.cast(semantic.to_tensor(arg), kind, _semantic=semantic) for arg, kind in zip(args, types)]
    symbols = {tuple(types): (f"tdkernels_rocshmem_{symbol}", tl.int32)}
    return tl.core.extern_elementwise("", "", values, symbols, is_pure=False, _semantic=semantic)


@tl.core.extern
def put_nbi_block(dst, src, num_bytes, pe, _semantic=None):
    """Start a copy of ``num_bytes`` bytes from ``src`` to the address of ``pe`` that corresponds to ``dst``.

    Returns before the copy is complete. ``src`` must not change before a ``quiet``.
    """
    return _call("put_nbi_block", [dst, src, num_bytes, pe], [tl.int64, tl.int64, tl.int64, tl.int32], _semantic)


@tl.core.extern
def signal_set(signal_ptr, value, pe, _semantic=None):
    """Set the 64-bit word of ``pe`` that corresponds to ``signal_ptr``, with one thread.

    It is ordered after the program's puts only if there is a ``fence`` between them.
    """
    return _call("signal_set", [signal_ptr, value, pe], [tl.int64, tl.int64, tl.int32], _semantic)


@tl.core.extern
def fence(_semantic=None):
    """Order the puts and signals that the program's threads have started before later ones, at each PE."""
    return _call("fence", [], [], _semantic)


@tl.core.extern
def quiet(_semantic=None):
    """Wait until all puts and signals that the program's threads have started have arrived."""
    return _call("quiet", [], [], _semantic)


@tl.core.extern
def my_pe(_semantic=None):
    """Return the number of this PE."""
    return _call("my_pe", [], [], _semantic)


@tl.core.extern
def n_pes(_semantic=None):
    """Return the number of PEs."""
    return _call("n_pes", [], [], _semantic)


@jit
def put_signal_nbi_block(dst, src, num_bytes, signal_ptr, value, pe):
    """``put_nbi_block``, followed by ``signal_set`` after a fence.

    rocshmem_putmem_signal_nbi_wg is not used. Between GPUs of one host, in a job with several hosts, only one thread
    makes its part of the copy there (GDAContext::putmem_signal_wg and ipcCopy_wg, 3.4.0). It also waits for the copy
    before it sets the signal, so the sequence here is no slower.
    """
    put_nbi_block(dst, src, num_bytes, pe)
    fence()
    signal_set(signal_ptr, value, pe)


def device_library(arch: str | None = None) -> dict[str, str]:
    """Return the libraries that a launch of a kernel with these functions passes as ``extern_libs``.

    Args:
        arch: such as "gfx942"; None: that of the current device.

    Returns:
        {name: path}. Triton links a library if the name of a missing function contains the library's name, in this
        order.

    Raises:
        RocshmemError: if there is no device library for this GPU, or if it has no C names.
    """
    if arch is None:
        arch = torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName.split(":")[0]
    return dict(_device_library(arch, os.environ.get(_VARIABLE)))


@functools.cache
def _device_library(arch, named):
    path = _find(arch, named)
    code = path.read_bytes()
    missing = sorted(symbol for symbol in _needed() if not _has(code, symbol))
    if missing:
        raise _error(f"{path} lacks {', '.join(missing)}: this build of rocSHMEM has no C names for device functions")
    # Triton's cache identifies a library by its path. The last entry puts a hash of the content in the key; it is never
    # linked, since no function has that name.
    content = hashlib.sha256(code + _WORDS.read_bytes()).hexdigest()
    return {"tdkernels_rocshmem": str(_WORDS), "rocshmem": str(path), f"rocshmem {content}": str(path)}


def _find(arch, named):
    """Return the path of the device library."""
    if named:
        if Path(named).exists():
            return Path(named)
        raise _error(f"{_VARIABLE} is {named!r}, where there is no file")
    from tdkernels.lang.rocshmem_library import library_folders

    torchs = os.environ.get("ROCSHMEM_LIB_DIR")  # the variable that torch uses
    folders = [*([Path(torchs)] if torchs else []), *library_folders()]
    name = _NAME.format(arch=arch)
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    raise _error(f"{name} was not found in {', '.join(map(str, folders))}")


def _needed():
    """Return the names of the functions that ``rocshmem.ll`` declares."""
    return set(re.findall(r"^declare .*@(rocshmem_\w+)\(", _WORDS.read_text(), re.M))


def _has(code, symbol):
    """Return whether bitcode has a function with this C name: the name occurs, and not as a part of the C++ name."""
    return re.search(rb"(?<!%d)%s" % (len(symbol), symbol.encode()), code) is not None


def _error(problem):
    from tdkernels.lang.rocshmem_library import RocshmemError

    return RocshmemError(
        f"rocSHMEM's device library: {problem}. It needs the LLVM bitcode that rocSHMEM 3.4.0 (ROCm 7.14) and newer "
        f"build for each GPU, made together with the host library and with the same transports. Set {_VARIABLE} to its "
        f"path, or ROCSHMEM_HOME to the folder that contains it in lib."
    )
