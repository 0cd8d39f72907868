"""Imports follow the layers, have no cycles, and do not reach into the internals of operators.

A module may import modules of its own package and of lower layers. Imports inside functions count, too.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# From the bottom to the top. Packages in one row must not import each other.
LAYERS = [
    ("errors", "exports", "launch", "model_shapes", "caches", "rounding"),
    ("lang",),
    ("symm",),
    ("runtime", "autotune"),
    ("ops.common",),
    ("ops.quantize",),
    ("ops.collectives", "ops.experts.grouped_gemm"),
    ("ops.dense", "ops.attention"),
    ("ops.experts.dispatch",),
    ("ops.experts.ep_moe", "ops.experts.tp_moe"),
    ("", "ops"),  # tdkernels itself, which exports the public names
    ("nn", "trace", "sanitizer", "solo"),
    ("integrations",),
    ("cli",),
    ("__main__",),
]
# The race checker instruments the interpreter, the network and collectives; tdkernels itself exports names.
MAY_IMPORT_INTERNALS = ("sanitizer", "")
# The modules of an operator's package that other families may import; its own family may import all of them.
EXPORTED = {"op", "config", "reference"}


def modules():
    """Return {name: file} of all modules of the package."""
    found = {}
    for file in sorted((ROOT / "tdkernels").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


def imports(name):
    """Return the modules of the package that a module imports, as {name: line}."""
    found = {}
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found.update((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}, line {node.lineno}: a relative import"
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                found[module if module in MODULES else node.module] = node.lineno
    return {module: line for module, line in found.items() if module in MODULES}


def layer(name):
    """Return (number of the layer, package) of a module; the innermost package that contains it counts."""
    name = name.partition(".")[2]
    places = [
        (number, package) for number, packages in enumerate(LAYERS) for package in packages
        if name == package or package and name.startswith(f"{package}.")
    ]
    assert places, f"{name} is in no layer: add it to LAYERS"
    return max(places, key=lambda place: len(place[1]))


@pytest.mark.parametrize("name", MODULES)
def test_modules_import_only_lower_layers(name):
    own = layer(name)
    for other, line in imports(name).items():
        theirs = layer(other)
        allowed = theirs[0] < own[0] or theirs == own
        assert allowed, f"{name}, line {line} imports {other}: {own[1]} is not above {theirs[1]}"


def test_no_cycles():
    graph, order, state = {name: sorted(imports(name)) for name in MODULES}, [], {}

    def visit(name, path):
        if state.get(name) == "done":
            return
        assert name not in path, "a cycle: " + " -> ".join([*path[path.index(name) :], name])
        for other in graph[name]:
            visit(other, [*path, name])
        state[name] = "done"
        order.append(name)

    for name in MODULES:
        visit(name, [])
    assert len(order) == len(MODULES)


def family(name):
    """Return the family of operators that a module belongs to, or None."""
    parts = name.split(".")
    return parts[2] if parts[:2] == ["tdkernels", "ops"] and len(parts) > 3 else None


def is_internal(name):
    """Return whether a module is internal to an operator's package. Those of ``ops.common`` are for all operators."""
    parts = name.split(".")
    return family(name) not in (None, "common") and len(parts) > 4 and parts[-1] not in EXPORTED


@pytest.mark.parametrize("name", MODULES)
def test_internals_of_an_operator_are_used_only_in_its_family(name):
    if layer(name)[1] in MAY_IMPORT_INTERNALS:
        return
    for other, line in imports(name).items():
        allowed = not is_internal(other) or family(other) == family(name)
        assert allowed, f"{name}, line {line} imports {other}, which is internal to its operator"


def test_kernels_are_in_separate_files():
    """A launcher defines no kernel, and a file of kernels imports no host code."""
    for name, file in MODULES.items():
        if family(name) is None:
            continue
        last = name.rpartition(".")[2]
        tree = ast.parse(file.read_text())
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        jitted = [node.name for node in functions if any("jit" in ast.unparse(d) for d in node.decorator_list)]
        if last.startswith("launch_") or last == "launch":
            assert not jitted, f"{name} defines {', '.join(jitted)}"
        if last.startswith("kernel_") or last == "kernel":
            host = {other for other in imports(name) if layer(other)[1] in ("symm", "runtime", "autotune")}
            assert not host, f"{name} imports {', '.join(sorted(host))}"
