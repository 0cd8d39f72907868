"""Two pytest processes that divide the modules of a suite."""

import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]
CONFTEST = """import pytest
from tests.support import sharing

def pytest_collection_modifyitems(items):
    sharing.in_order(items)

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    return True if sharing.runs_elsewhere(item) else None
"""


def passed(folder, **variables):
    """Run the suite in a folder, and return the tests that passed, in order."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "."]
    environment = {"PATH": "", "PYTHONPATH": str(REPO), **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 5), done.stdout + done.stderr
    return [line.split()[0] for line in done.stdout.splitlines() if " PASSED" in line]


def test_each_module_runs_once(tmp_path):
    suite, claims = tmp_path / "suite", tmp_path / "claims"
    suite.mkdir()
    claims.mkdir()
    (suite / "conftest.py").write_text(CONFTEST)
    (suite / "pytest.ini").write_text("[pytest]\n")
    for name in "abc":
        (suite / f"test_part_{name}.py").write_text("def test_one():\n    pass\n\ndef test_two():\n    pass\n")
    everything = [f"test_part_{name}.py::test_{test}" for name in "abc" for test in ("one", "two")]
    assert passed(suite) == everything
    (claims / "test_part_b.py").touch()  # as if another process ran it
    found = passed(suite, TDKERNELS_TEST_CLAIMS=str(claims), TDKERNELS_TEST_REVERSED="1")
    assert found == everything[4:] + everything[:2]
    assert passed(suite, TDKERNELS_TEST_CLAIMS=str(claims)) == []
