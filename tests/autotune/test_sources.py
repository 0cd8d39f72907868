"""Kernel source hash of a tuned entry: it covers all code that the tuner times."""

import pytest

from tdkernels.autotune.sources import hash_of, kernel_sources


def names(package):
    return {str(file).partition("/tdkernels/")[2] for file in kernel_sources(f"tdkernels.ops.{package}")}


def test_launchers_and_their_imports_are_covered():
    found = names("experts.tp_moe")
    for file in ("experts/tp_moe/kernel_ag_gemm.py", "experts/tp_moe/steps.py", "experts/grouped_gemm/tile.py",
                 "collectives/kernel_async_all_gather.py"):
        assert f"ops/{file}" in found
    assert "lang/signals.py" in names("experts.grouped_gemm")
    assert "ops/experts/dispatch/low_latency.py" in names("experts.dispatch")
    assert "ops/experts/ep_moe/fused.py" in names("experts.ep_moe")


def test_operators_in_a_package_of_another_are_excluded():
    assert not [file for file in names("collectives") if "collectives/norm" in file]
    found = names("collectives.norm")
    for file in ("collectives/norm/kernel.py", "collectives/kernel.py", "common/norm_rows.py"):
        assert f"ops/{file}" in found
    assert "ops/collectives/norm/kernel.py" in names("dense.gemm_ar_norm"), "method \"separate\" launches it"


def test_code_that_is_not_timed_is_excluded():
    assert not [file for file in names("dense.ag_gemm") if file.endswith(("/validation.py", "/tuning.py"))]


SOURCE = """
\"\"\"Module.\"\"\"
def tile(a, b):
    \"\"\"Multiply.\"\"\"
    return a * b  # fast
"""


@pytest.mark.parametrize(
    "old, new, changes",
    [("Multiply.", "Return the product.", False), ("# fast", "# slow", False), ("a * b", "(a * b)", False),
     ("a * b", "a + b", True), ("(a, b)", "(a, b=2)", True)],
)
def test_hash_covers_code_and_not_prose(tmp_path, old, new, changes):
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(SOURCE)
    after.write_text(SOURCE.replace(old, new))
    assert (hash_of([before]) != hash_of([after])) == changes


def test_hash_is_the_same_in_all_versions_of_python(tmp_path):
    """The digest was the same in 3.10, 3.11, 3.12 and 3.13, where ``ast.unparse`` returns different texts."""
    file = tmp_path / "code.py"
    file.write_text("def f(a, *b):\n    return a[1, b], f\"{a['x']!r:>{b[0]}} and {b}\", [lambda x=1: -x]\n")
    assert hash_of([file]) == "3eae98b603d7"
