"""Device library of the network: the files that kernels are linked with, and the initialization of loaded modules.

``tdkernels.symm`` provides both after it has initialized NVSHMEM or rocSHMEM.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

_paths: dict[str, str] = {}
_init_module: Any = None  # a function of the handle of a module, see ``provide``
_initialized: set[int] = set()  # handles of the modules that are initialized


def provide(paths: Mapping[str, str], tell: Callable[[int], object]) -> None:
    """Set the device library for kernels that are compiled from now on.

    Args:
        paths: the files to link with, {name: path}.
        tell: called with the handle of each loaded module before its first launch.
    """
    global _paths, _init_module
    _paths, _init_module = dict(paths), tell
    _initialized.clear()


def paths() -> dict[str, str]:
    """Return the files to link with, {name: path}.

    Raises:
        RuntimeError: if the network has not been initialized.
    """
    if not _paths:
        raise RuntimeError("a kernel that uses the network was launched before tdkernels.symm initialized the network")
    return _paths


def loaded(compiled: "CompiledKernel") -> None:
    """Initialize the device library in the module of a compiled kernel, before the first launch."""
    compiled._init_handles()
    if compiled.module not in _initialized:
        _init_module(compiled.module)
        _initialized.add(compiled.module)
