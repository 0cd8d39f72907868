"""rocSHMEM's device functions as words of a kernel: how a program of an AMD GPU reaches a GPU of another host.

Each word is called by all threads of a program together, under ``if target() == "hip":``, in a kernel that is launched
with ``extern_libs=device_library()`` and whose module ``RocshmemRuntime.init_module`` has seen. Addresses are int64
scalars, or pointers, of symmetric memory in this process. ``rocshmem.ll`` is what stands between these words and the
device library. For a peer on the same host plain stores to ``RocshmemRuntime.peer_address`` are the way.

Compiled for gfx942 and gfx950 in the tests, with a stand-in for the device library; never run on AMD hardware.
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
    """Call one of the functions of ``lang.rocshmem.ll``, each of which returns an int32."""
    values = [tl.cast(semantic.to_tensor(arg), kind, _semantic=semantic) for arg, kind in zip(args, types)]
    symbols = {tuple(types): (f"tdkernels_rocshmem_{symbol}", tl.int32)}
    return tl.core.extern_elementwise("", "", values, symbols, is_pure=False, _semantic=semantic)


@tl.core.extern
def put_nbi_block(dst, src, num_bytes, pe, _semantic=None):
    """Start to copy ``num_bytes`` bytes at ``src`` to what ``pe`` has at ``dst``; returns before they are there.

    ``src`` must not change before a ``quiet``.
    """
    return _call("put_nbi_block", [dst, src, num_bytes, pe], [tl.int64, tl.int64, tl.int64, tl.int32], _semantic)


@tl.core.extern
def signal_set(signal_ptr, value, pe, _semantic=None):
    """Set the 64-bit word that ``pe`` has at ``signal_ptr``, by one thread.

    In order after the program's puts only behind a ``fence``.
    """
    return _call("signal_set", [signal_ptr, value, pe], [tl.int64, tl.int64, tl.int32], _semantic)


@tl.core.extern
def fence(_semantic=None):
    """Puts and signals that follow come after those that the program's threads have started, at each PE."""
    return _call("fence", [], [], _semantic)


@tl.core.extern
def quiet(_semantic=None):
    """Return when all that the program's threads have started is where it was sent."""
    return _call("quiet", [], [], _semantic)


@tl.core.extern
def my_pe(_semantic=None):
    """The number of this PE."""
    return _call("my_pe", [], [], _semantic)


@tl.core.extern
def n_pes(_semantic=None):
    """How many PEs there are."""
    return _call("n_pes", [], [], _semantic)


@jit
def put_signal_nbi_block(dst, src, num_bytes, signal_ptr, value, pe):
    """``put_nbi_block``, and behind it ``signal_set``.

    Not rocshmem_putmem_signal_nbi_wg: between GPUs of one host, in a job of several, that lets one thread make its part
    of the copy and no other (GDAContext::putmem_signal_wg and ipcCopy_wg, 3.4.0). It does wait for the copy before it
    sets the signal, so that this is no slower.
    """
    put_nbi_block(dst, src, num_bytes, pe)
    fence()
    signal_set(signal_ptr, value, pe)


def device_library(arch=None):
    """What a launch of a kernel with these words passes as ``extern_libs``: paths of libraries by name.

    Args:
        arch: like "gfx942"; None means that of the current device

    Returns:
        a dict; Triton links a library where the name of a missing function contains the library's, in this order

    Raises:
        RocshmemError: when there is no device library for this GPU, or one without C names
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
        raise _error(f"{path} lacks {', '.join(missing)}: it is of a rocSHMEM without C names for device functions")
    # Triton's cache knows a library by its path. The last entry is never linked, no function is called so.
    content = hashlib.sha256(code + _WORDS.read_bytes()).hexdigest()
    return {"tdkernels_rocshmem": str(_WORDS), "rocshmem": str(path), f"rocshmem {content}": str(path)}


def _find(arch, named):
    if named:
        if Path(named).exists():
            return Path(named)
        raise _error(f"{_VARIABLE} is {named!r}, where there is no file")
    from tdkernels.lang.rocshmem_library import library_folders

    torchs = os.environ.get("ROCSHMEM_LIB_DIR")  # torch's own variable for it
    folders = [*([Path(torchs)] if torchs else []), *library_folders()]
    name = _NAME.format(arch=arch)
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    raise _error(f"{name} was not found in {', '.join(map(str, folders))}")


def _needed():
    return set(re.findall(r"^declare .*@(rocshmem_\w+)\(", _WORDS.read_text(), re.M))


def _has(code, symbol):
    """Whether bitcode has a function of this C name: its text is there, and not as part of the C++ name."""
    return re.search(rb"(?<!%d)%s" % (len(symbol), symbol.encode()), code) is not None


def _error(problem):
    from tdkernels.lang.rocshmem_library import RocshmemError

    return RocshmemError(
        f"rocSHMEM's device library: {problem}. It needs the LLVM bitcode that rocSHMEM 3.4.0 (ROCm 7.14) and newer "
        f"build for each GPU, made together with the host library and with the same transports. Set {_VARIABLE} to its "
        f"path, or ROCSHMEM_HOME to the folder that has it in lib."
    )
