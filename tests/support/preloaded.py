"""Import the operators and their tests, and rewrite the kernels for Triton's interpreter.

In CI the process that forks the ranks imports this module, so that each rank does not have to do this work, which takes
4 s of CPU time. In a run of a few tests it would only delay the first rank.
"""

import contextlib
import gc
import importlib
import pkgutil

import pytest

import tdkernels.nn
import tdkernels.ops
from tdkernels.autotune import tunable
from tdkernels.lang.kernel import Kernel
from tests.support import ranks


def _prepare():
    # An error must not end the process. A rank meets it again when it imports the module or launches the kernel.
    for package in (tdkernels.ops, tdkernels.nn):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            with contextlib.suppress(Exception):
                importlib.import_module(module.name)
    with contextlib.suppress(Exception, pytest.skip.Exception):
        import tests.support.variants  # noqa: F401
    for kernel in [value for value in gc.get_objects() if type(value) is Kernel]:
        with contextlib.suppress(Exception):
            kernel._interpreted.rewrite()
    for name in tunable.operators():
        with contextlib.suppress(Exception):
            tunable.versions(tunable.tunable(name))  # it reads the source files of the operator
    ranks.freeze_imports()


_prepare()
