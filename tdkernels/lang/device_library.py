"""What kernels that speak to the network are linked with, and what has to be told of them once they are loaded.

``tdkernels.symm`` says both, when it has initialised the network's library.
"""

_paths: dict = {}
_tell = None
_told: set = set()


def provide(paths, tell):
    """Link later kernels with these files, {name: path}, and call ``tell`` with the handle of each one's module."""
    global _paths, _tell
    _paths, _tell = dict(paths), tell
    _told.clear()


def paths():
    """The files to link with.

    Raises:
        RuntimeError: before the network has been initialised
    """
    if not _paths:
        raise RuntimeError("a kernel that speaks to the network was launched before tdkernels.symm has initialised it")
    return _paths


def loaded(compiled):
    """Tell the library of a compiled kernel before its first launch."""
    compiled._init_handles()
    if compiled.module not in _told:
        _tell(compiled.module)
        _told.add(compiled.module)
