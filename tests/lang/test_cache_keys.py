"""Triton finds a compiled kernel in its cache on disk by a key. It must cover everything that the kernel was made from.

The key has the source of a kernel and of the functions that it calls, and the values of their globals that are
``constexpr``. A function may not read other globals, except a ``constexpr_function``, which runs in Python. If such a
global changed with a new version of the library, a kernel of the version before would run.
"""

import ast
import importlib
import inspect
import pkgutil
import textwrap
import types
from collections.abc import Iterator

from triton import language as tl
from triton.runtime.jit import ConstexprFunction, constexpr_function

import tdkernels

_PLAIN = 3


@constexpr_function
def _with_a_plain_global(size):
    return size * _PLAIN


def _modules() -> Iterator[types.ModuleType]:
    for found in pkgutil.walk_packages(tdkernels.__path__, "tdkernels."):
        try:
            yield importlib.import_module(found.name)
        except ImportError:  # an integration with a package that is not installed; it has no kernels
            assert found.name.startswith("tdkernels.integrations.")


def _constexpr_functions() -> set[ConstexprFunction]:
    return {
        value for module in _modules() for value in vars(module).values() if isinstance(value, ConstexprFunction)
    }


def _plain_globals(function: ConstexprFunction) -> set[str]:
    """Return the names of the globals that a function reads and that the key of a kernel does not cover."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(function.fn))).body[0]
    read = {node.id for part in definition.body for node in ast.walk(part) if isinstance(node, ast.Name)}
    names = read & function.fn.__globals__.keys() - set(function.fn.__code__.co_varnames)
    covered = tl.constexpr, ConstexprFunction, types.ModuleType
    return {name for name in names if not isinstance(function.fn.__globals__[name], covered)}


def test_globals_of_constexpr_functions():
    functions = _constexpr_functions()
    assert len(functions) > 10
    found = {function.__qualname__: _plain_globals(function) for function in functions}
    assert not any(found.values()), found


def test_a_plain_global_is_found():
    assert _plain_globals(_with_a_plain_global) == {"_PLAIN"}
