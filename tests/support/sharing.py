"""Divide the test modules between two pytest processes: each module runs in the one that reaches it first.

Both collect all tests. One goes through the modules in order, the other one in reverse order, and they meet. So both
end at about the same time, whatever the modules cost. ``make test`` sets the variables:

    TDKERNELS_TEST_CLAIMS     a directory of both processes, with a file for each module that has begun
    TDKERNELS_TEST_REVERSED   1 in the process that goes in reverse order
"""

import os

# Removed from the environment, so that a pytest that a test starts runs all of its modules.
_folder = os.environ.pop("TDKERNELS_TEST_CLAIMS", "")
_is_reversed = os.environ.pop("TDKERNELS_TEST_REVERSED", "") == "1"
_claims: dict[str, bool] = {}


def in_order(items):
    """Sort the items of a process: modules in reverse order if it is the second one."""
    if _folder and _is_reversed:
        modules = {}
        for item in items:
            modules.setdefault(item.path, []).append(item)
        items[:] = [item for module in reversed(modules) for item in modules[module]]


def runs_elsewhere(item):
    """Return whether the other process runs the module of an item. The first call for a module claims it."""
    if not _folder:
        return False
    name = str(item.path.relative_to(item.config.rootpath)).replace(os.sep, "+")
    if name not in _claims:
        try:
            os.close(os.open(os.path.join(_folder, name), os.O_CREAT | os.O_EXCL))
            _claims[name] = True
        except FileExistsError:
            _claims[name] = False
    return not _claims[name]
