"""Find the source files that affect the speed of an operator, and hash their code."""

import ast
import functools
import hashlib
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_FOLLOWED = ("tdkernels.lang", "tdkernels.ops")
# Modules that timed calls do not run.
_UNTIMED = {"validation", "tuning", "cost", "problem", "tunable_base", "gemm_tunable"}
# Fields of syntax trees that the code does not depend on, or that only some versions of Python have.
_IGNORED_FIELDS = {"ctx", "kind", "type_comment", "type_ignores", "type_params"}


def kernel_sources(package: str) -> list[Path]:
    """Return the sorted source files for an operator, given the name of its package."""
    folder = _ROOT.joinpath(*package.split(".")[1:])
    others = [file.parent for file in folder.rglob("tuning.py") if file.parent != folder]  # packages of other operators
    left = [
        file for file in folder.rglob("*.py")
        if file.stem not in _UNTIMED and not any(file.is_relative_to(other) for other in others)
    ]
    found = set(left)
    while left:
        new = _read(left.pop())[1] - found
        found |= new
        left += new
    return sorted(found)


def hash_of(files: list[Path]) -> str:
    """Return a hash of the code in files. Comments, docstrings and formatting do not change it.

    Otherwise each release that rewords a comment would make the tuned entries of its users stale.
    """
    return hashlib.sha256("".join(_read(file)[0] for file in files).encode()).hexdigest()[:12]


@functools.cache  # operators share files of lang and of ops/common
def _read(file):
    """Return (hash of the code of a file, the files in ``_FOLLOWED`` that it imports)."""
    tree = ast.parse(file.read_text())
    imports = _imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            del node.body[0]
    return hashlib.sha256(_canonical(tree).encode()).hexdigest(), imports


def _canonical(node):
    """Return the code of a syntax tree as text that is the same in all versions of Python.

    The text of ``ast.unparse`` is not: the versions quote f-strings and write tuples in subscripts differently.
    """
    if isinstance(node, list):
        return f"[{' '.join(map(_canonical, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr):  # Python 3.12 adds empty strings to the format of a value
        parts = [part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")]
        return f"(JoinedStr {_canonical(parts)})"
    fields = [(name, value) for name, value in ast.iter_fields(node) if name not in _IGNORED_FIELDS]
    inner = " ".join(f"{name}={_canonical(value)}" for name, value in fields if value is not None and value != [])
    return f"({type(node).__name__} {inner})"


def _imported(tree):
    """Return the files in ``_FOLLOWED`` that a module imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    paths = [_ROOT.joinpath(*name.split(".")[1:]) for name in names if name.startswith(_FOLLOWED)]
    files = [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in paths]
    return {file for file in files if file.exists() and file.stem not in _UNTIMED}
