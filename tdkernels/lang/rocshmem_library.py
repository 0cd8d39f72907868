"""rocSHMEM's host library through ctypes: where it is looked for, which functions are called, and what is missing.

The facts are those of ROCm/rocm-systems, projects/rocshmem (3.4.0). The functions are declared in ``rocshmem.hpp`` and
``rocshmem_common.hpp``, in the C++ namespace ``rocshmem``: a library exports mangled names. A library with a C
interface exports the plain ones, which are looked up first; ``SYMBOLS`` is the whole list of them.

AMD's packages hold a static archive only ("we do not have plans for a shared library", ROCm/rocSHMEM#223). What can be
opened is a distribution's shared library (Fedora's), or one that was linked from the archive, be it the extension
module of AMD's Python package rocshmem4py. Each of them has a state of its own: what one has initialised, the others
know nothing of.
"""

import ctypes
import ctypes.util
import importlib.util
import os
import sys
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_void_p
from itertools import chain
from pathlib import Path

OLDEST = (3, 3, 0)  # ROCm 7.13; the first that tells its version, and the oldest that torch takes
UNIQUE_ID_BYTES = 128  # ROCSHMEM_UNIQUE_ID_BYTES
_INIT_WITH_UNIQUEID = 1  # ROCSHMEM_INIT_WITH_UNIQUEID
_VARIABLE = "TDKERNELS_ROCSHMEM_LIBRARY"
_EXTENSIONS = ("_rocshmem4py", "_pyrocshmem")  # AMD's, and that of Triton-distributed
_LONGEST = 1 << 30  # bytes of one transfer on a stream: the library has their number in an int

_GET_ONE = f"""It needs rocSHMEM {".".join(map(str, OLDEST))} or newer (ROCm 7.13) as a shared library. AMD's packages \
hold only librocshmem.a; of one that was built with -DCMAKE_POSITION_INDEPENDENT_CODE=ON make a shared library by
  hipcc -shared -fgpu-rdc --hip-link -o librocshmem.so -Wl,--whole-archive librocshmem.a -Wl,--no-whole-archive
and set {_VARIABLE} to its path, or ROCSHMEM_HOME to the folder that has it in lib."""


class RocshmemError(RuntimeError):
    """rocSHMEM is missing or too old, or one of its functions has failed."""


class UniqueId(ctypes.Structure):
    """``rocshmem_uniqueid_t``, a std::array<uint8_t, 128>."""

    _fields_ = [("data", ctypes.c_uint8 * UNIQUE_ID_BYTES)]


class InitAttributes(ctypes.Structure):
    """``rocshmem_init_attr_t``; filled by the library, we only bring the memory."""

    _fields_ = [("rank", ctypes.c_int32), ("nranks", ctypes.c_int32), ("uid", UniqueId), ("mpi_comm", c_void_p)]


_PUT = (None, [c_void_p, c_void_p, c_size_t, c_int, c_void_p], "PvPKvmiP12ihipStream_t")

# Each function's result, arguments, and how the Itanium C++ ABI writes the arguments down.
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


def mangled(name):
    """The name that a C++ compiler gives the function ``name`` of namespace rocshmem."""
    return f"_ZN8rocshmem{len(name)}{name}E{SYMBOLS[name][2]}"


class RocshmemLibrary:
    """The functions that are used here, with Python's types, and with an error where C has a code for it.

    Made by ``load``. Arguments are not checked: ``RocshmemRuntime`` does that.
    """

    def __init__(self, path):
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
            raise RocshmemError(f"{name} failed with status {status}; ROCSHMEM_DEBUG_LEVEL=INFO makes it say why")

    def get_uniqueid(self):
        """A new unique id: ``UNIQUE_ID_BYTES`` bytes. Callable before ``init``."""
        uid = UniqueId()
        self._checked("rocshmem_get_uniqueid", byref(uid))
        return bytes(uid.data)

    def init(self, rank, nranks, unique_id):
        """Become PE ``rank`` of ``nranks``; collective over those that were given the same id."""
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise RocshmemError(f"a unique id of rocSHMEM has {UNIQUE_ID_BYTES} bytes, this one has {len(unique_id)}")
        uid, attributes = UniqueId.from_buffer_copy(unique_id), InitAttributes()
        self._checked("rocshmem_set_attr_uniqueid_args", rank, nranks, byref(uid), byref(attributes))
        self._checked("rocshmem_init_attr", _INIT_WITH_UNIQUEID, byref(attributes))

    def my_pe(self):
        """The number of this PE; -1 before ``init``."""
        return self._call["rocshmem_my_pe"]()

    def n_pes(self):
        """How many PEs there are; -1 before ``init``."""
        return self._call["rocshmem_n_pes"]()

    def malloc(self, nbytes):
        """The address of new symmetric memory, or 0; collective."""
        return self._call["rocshmem_malloc"](nbytes) or 0

    def free(self, address):
        """Collective: the library has a barrier in it."""
        self._call["rocshmem_free"](address)

    def ptr(self, address, pe):
        """Where this process reaches what ``pe`` has at ``address``, or 0."""
        return self._call["rocshmem_ptr"](address, pe) or 0

    def barrier_all(self):
        self._call["rocshmem_barrier_all"]()

    def putmem_on_stream(self, dst, src, nbytes, pe, stream):
        self._transfer("rocshmem_putmem_on_stream", dst, src, nbytes, pe, stream)

    def getmem_on_stream(self, dst, src, nbytes, pe, stream):
        self._transfer("rocshmem_getmem_on_stream", dst, src, nbytes, pe, stream)

    def _transfer(self, name, dst, src, nbytes, pe, stream):
        for first in range(0, nbytes, _LONGEST):
            self._call[name](dst + first, src + first, min(_LONGEST, nbytes - first), pe, stream)

    def hipmodule_init(self, module, stream):
        """Tell a loaded module of kernels, which has the device library linked in, of this process's context."""
        self._checked("rocshmem_hipmodule_init", module, stream)

    def finalize(self):
        """Nothing may be called afterwards, not even ``n_pes``: the library keeps a pointer to what it has freed."""
        self._call["rocshmem_finalize"]()


def load():
    """The library of this process: the one that ``TDKERNELS_ROCSHMEM_LIBRARY`` names, or the first that is found.

    Raises:
        RocshmemError: that says what is missing or too old, where it was looked for, and how to get one
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


def library_folders():
    """Where rocSHMEM may be installed, the most particular place first."""
    homes = [os.environ.get("ROCSHMEM_HOME"), os.environ.get("ROCM_PATH"), "/opt/rocm", "/usr/local", "/usr"]
    return [Path(home, lib) for home in dict.fromkeys(filter(None, homes)) for lib in ("lib", "lib64")]


def _shared_libraries(folders):
    yield from (path for folder in folders if (path := folder / "librocshmem.so").exists())
    name = ctypes.util.find_library("rocshmem")
    if name:
        yield name


def _extensions(look):
    """The extension modules that have rocSHMEM linked in.

    One that the program has imported comes before all other libraries: what it has initialised only it knows of.
    """
    for name in _EXTENSIONS:
        module = look(name)
        path = getattr(module, "__file__", None) or getattr(module, "origin", None)
        if path:
            yield path


def _not_imported(name):
    return None if name in sys.modules else importlib.util.find_spec(name)
