"""rocSHMEM's host library through ctypes: search for the library, declare its functions, and report what is missing.

The facts are from ROCm/rocm-systems, projects/rocshmem (3.4.0). The functions are declared in ``rocshmem.hpp`` and
``rocshmem_common.hpp``, in the C++ namespace ``rocshmem``, so a library exports mangled names. A library with a C
interface exports the plain names, which are looked up first. ``SYMBOLS`` lists all functions that are used.

AMD's packages contain a static archive only ("we do not have plans for a shared library", ROCm/rocSHMEM#223). A shared
library can be that of a distribution (Fedora's), or one that was linked from the archive, such as the extension module
of AMD's Python package rocshmem4py. Each of them has its own state: a library does not see the initialization of
another one.
"""

import ctypes
import ctypes.util
import importlib.util
import os
import sys
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_void_p
from itertools import chain
from pathlib import Path

OLDEST = (3, 3, 0)  # ROCm 7.13; the first that reports its version, and the oldest that torch supports
UNIQUE_ID_BYTES = 128  # ROCSHMEM_UNIQUE_ID_BYTES
_INIT_WITH_UNIQUEID = 1  # ROCSHMEM_INIT_WITH_UNIQUEID
_VARIABLE = "TDKERNELS_ROCSHMEM_LIBRARY"
_EXTENSIONS = ("_rocshmem4py", "_pyrocshmem")  # from AMD and from Triton-distributed
_LONGEST = 1 << 30  # bytes per transfer on a stream: the library stores the number in an int

_GET_ONE = f"""It needs rocSHMEM {".".join(map(str, OLDEST))} or newer (ROCm 7.13) as a shared library. AMD's packages \
contain only librocshmem.a. If it was built with -DCMAKE_POSITION_INDEPENDENT_CODE=ON, make a shared library with
  hipcc -shared -fgpu-rdc --hip-link -o librocshmem.so -Wl,--whole-archive librocshmem.a -Wl,--no-whole-archive
and set {_VARIABLE} to its path, or ROCSHMEM_HOME to the folder that contains it in lib."""


class RocshmemError(RuntimeError):
    """rocSHMEM is missing or too old, or one of its functions has failed."""


class UniqueId(ctypes.Structure):
    """``rocshmem_uniqueid_t``, a std::array<uint8_t, 128>."""

    _fields_ = [("data", ctypes.c_uint8 * UNIQUE_ID_BYTES)]


class InitAttributes(ctypes.Structure):
    """``rocshmem_init_attr_t``. The library fills it; the caller provides the memory."""

    _fields_ = [("rank", ctypes.c_int32), ("nranks", ctypes.c_int32), ("uid", UniqueId), ("mpi_comm", c_void_p)]


_PUT = (None, [c_void_p, c_void_p, c_size_t, c_int, c_void_p], "PvPKvmiP12ihipStream_t")

# {name: (result type, argument types, argument types as mangled by the Itanium C++ ABI)}
SYMBOLS = {
    "rocshmem_vendor_get_version_info": (None, [POINTER(c_int)] * 3, "PiS0_S0_"),
    "rocshmem_get_uniqueid": (c_int, [POINTER(UniqueId)], "PSt5arrayIhLm128EE"),
    "rocshmem_set_attr_uniqueid_args": (
        c_int, [c_int, c_int, POINTER(UniqueId), POINTER(InitAttributes)],
        "iiPSt5arrayIhLm128EEPNS_20rocshmem_init_attr_tE",
    ),
    "rocshmem_init_attr": (c_int, [c_uint, POINTER(InitAttributes)], "jPNS_20rocshmem_init_attr_tE"),
    "rocshmem_my_pe": (c_int, [], "v"),
    "rocshmem_n_pes": (c_int, [], "v"),
    "rocshmem_malloc": (c_void_p, [c_size_t], "m"),
    "rocshmem_free": (None, [c_void_p], "Pv"),
    "rocshmem_ptr": (c_void_p, [c_void_p, c_int], "PKvi"),
    "rocshmem_barrier_all": (None, [], "v"),
    "rocshmem_putmem_on_stream": _PUT,
    "rocshmem_getmem_on_stream": _PUT,
    "rocshmem_hipmodule_init": (c_int, [c_void_p, c_void_p], "P12ihipModule_tP12ihipStream_t"),
    "rocshmem_finalize": (None, [], "v"),
}


def mangled(name: str) -> str:
    """Return the C++ symbol of the function ``name`` in namespace rocshmem."""
    return f"_ZN8rocshmem{len(name)}{name}E{SYMBOLS[name][2]}"


class RocshmemLibrary:
    """The host functions with Python types; an error code raises ``RocshmemError``.

    Created by ``load``. Arguments are not checked here: ``RocshmemRuntime`` checks them.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        try:
            self._library = ctypes.CDLL(self.path)
        except OSError as err:
            raise RocshmemError(f"rocSHMEM cannot be loaded from {self.path}: {err}. {_GET_ONE}") from err
        found = {name: self._find(name, *declared) for name, declared in SYMBOLS.items()}
        missing = [name for name, function in found.items() if function is None]
        if len(missing) == len(SYMBOLS):
            raise RocshmemError(f"{self.path} exports none of rocSHMEM's host functions. {_GET_ONE}")
        if missing:
            raise RocshmemError(f"{self.path} lacks {', '.join(missing)}: it is too old. {_GET_ONE}")
        self._call = found
        self.version_info = self._version()
        self.version = ".".join(map(str, self.version_info))
        if self.version_info < OLDEST:
            raise RocshmemError(f"{self.path} is rocSHMEM {self.version}: it is too old. {_GET_ONE}")

    def _find(self, name, result, arguments, _):
        function = getattr(self._library, name, None) or getattr(self._library, mangled(name), None)
        if function is not None:
            function.restype, function.argtypes = result, arguments
        return function

    def _version(self):
        numbers = [c_int(-1) for _ in range(3)]
        self._call["rocshmem_vendor_get_version_info"](*map(byref, numbers))
        return tuple(number.value for number in numbers)

    def _checked(self, name, *args):
        status = self._call[name](*args)
        if status != 0:  # ROCSHMEM_SUCCESS
            raise RocshmemError(f"{name} failed with status {status}; set ROCSHMEM_DEBUG_LEVEL=INFO for the reason")

    def get_uniqueid(self) -> bytes:
        """Return a new unique id of ``UNIQUE_ID_BYTES`` bytes. May be called before ``init``."""
        uid = UniqueId()
        self._checked("rocshmem_get_uniqueid", byref(uid))
        return bytes(uid.data)

    def init(self, rank: int, nranks: int, unique_id: bytes) -> None:
        """Initialize the library as PE ``rank`` of ``nranks``. Collective over the processes with the same id."""
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise RocshmemError(f"a unique id of rocSHMEM has {UNIQUE_ID_BYTES} bytes, this one has {len(unique_id)}")
        uid, attributes = UniqueId.from_buffer_copy(unique_id), InitAttributes()
        self._checked("rocshmem_set_attr_uniqueid_args", rank, nranks, byref(uid), byref(attributes))
        self._checked("rocshmem_init_attr", _INIT_WITH_UNIQUEID, byref(attributes))

    def my_pe(self) -> int:
        """Return the number of this PE; -1 before ``init``."""
        return self._call["rocshmem_my_pe"]()

    def n_pes(self) -> int:
        """Return the number of PEs; -1 before ``init``."""
        return self._call["rocshmem_n_pes"]()

    def malloc(self, nbytes: int) -> int:
        """Allocate symmetric memory and return its address, or 0. Collective."""
        return self._call["rocshmem_malloc"](nbytes) or 0

    def free(self, address: int) -> None:
        """Free symmetric memory. Collective: the library executes a barrier."""
        self._call["rocshmem_free"](address)

    def ptr(self, address: int, pe: int) -> int:
        """Return the address at which this process can access ``address`` of ``pe``, or 0."""
        return self._call["rocshmem_ptr"](address, pe) or 0

    def barrier_all(self) -> None:
        """Execute a barrier of all PEs."""
        self._call["rocshmem_barrier_all"]()

    def putmem_on_stream(self, dst: int, src: int, nbytes: int, pe: int, stream: int) -> None:
        """Copy local memory at ``src`` to the memory of ``pe``, on a stream."""
        self._transfer("rocshmem_putmem_on_stream", dst, src, nbytes, pe, stream)

    def getmem_on_stream(self, dst: int, src: int, nbytes: int, pe: int, stream: int) -> None:
        """Copy memory of ``pe`` at ``src`` to local memory, on a stream."""
        self._transfer("rocshmem_getmem_on_stream", dst, src, nbytes, pe, stream)

    def _transfer(self, name, dst, src, nbytes, pe, stream):
        for first in range(0, nbytes, _LONGEST):
            self._call[name](dst + first, src + first, min(_LONGEST, nbytes - first), pe, stream)

    def hipmodule_init(self, module: int, stream: int | None) -> None:
        """Initialize the device library in a loaded module of kernels with this process's context."""
        self._checked("rocshmem_hipmodule_init", module, stream)

    def finalize(self) -> None:
        """Finalize the library. No function may be called afterwards, not even ``n_pes``.

        The library keeps a pointer to memory that it has freed.
        """
        self._call["rocshmem_finalize"]()


def load() -> RocshmemLibrary:
    """Load rocSHMEM: the library named by ``TDKERNELS_ROCSHMEM_LIBRARY``, or the first that is found.

    Raises:
        RocshmemError: if the library is missing or too old. The message says where it was searched and how to get one.
    """
    named = os.environ.get(_VARIABLE)
    if named:
        if not Path(named).exists():
            raise RocshmemError(f"{_VARIABLE} is {named!r}, where there is no file. {_GET_ONE}")
        return RocshmemLibrary(named)
    folders = library_folders()
    found = chain(_extensions(sys.modules.get), _shared_libraries(folders), _extensions(_not_imported))
    path = next(found, None)
    if path is not None:
        return RocshmemLibrary(path)
    archives = [str(path) for folder in folders if (path := folder / "librocshmem.a").exists()]
    seen = f"There is only a static archive, {archives[0]}. " if archives else ""
    raise RocshmemError(f"rocSHMEM's host library was not found in {', '.join(map(str, folders))}. {seen}{_GET_ONE}")


def library_folders() -> list[Path]:
    """Return the folders in which rocSHMEM may be installed, the most specific first."""
    homes = [os.environ.get("ROCSHMEM_HOME"), os.environ.get("ROCM_PATH"), "/opt/rocm", "/usr/local", "/usr"]
    return [Path(home, lib) for home in dict.fromkeys(filter(None, homes)) for lib in ("lib", "lib64")]


def _shared_libraries(folders):
    yield from (path for folder in folders if (path := folder / "librocshmem.so").exists())
    name = ctypes.util.find_library("rocshmem")
    if name:
        yield name


def _extensions(look):
    """Yield the paths of the extension modules that have rocSHMEM linked in, for the modules that ``look`` finds.

    A module that the program has already imported is preferred to all other libraries: only it sees its initialization.
    """
    for name in _EXTENSIONS:
        module = look(name)
        path = getattr(module, "__file__", None) or getattr(module, "origin", None)
        if path:
            yield path


def _not_imported(name):
    return None if name in sys.modules else importlib.util.find_spec(name)
