"""The operator of docs/contributing/write-an-operator.md: the page quotes the files, and the operator's tests pass."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forked_ranks, ranks
from tests.support.programs import environment
from tests.support.subset import THOROUGH

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "operator"
PAGE = ROOT / "docs" / "contributing" / "write-an-operator.md"


def run_tests(folder, *options):
    """Run the tests of the example in a folder, as a reader does; their ranks are forked if those of this suite are."""
    forks = ["-p", "tests.support.forks_ranks"] if forked_ranks.is_installed() else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *forks, *options]
    command.append("test_norm_all_gather.py")
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=400)


def test_page_quotes_the_files():
    quoted = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert quoted == [(FOLDER / name).read_text() for name in ("norm_all_gather.py", "test_norm_all_gather.py")]


@pytest.mark.slow
def test_operator_passes_its_tests():
    done = run_tests(FOLDER, "-x", *([] if THOROUGH else ["-k", "not test_compiles"]))  # the compiler takes long
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(ranks.DEVICE == "cuda", reason="the race checker runs on CPU ranks")
def test_race_test_finds_a_missing_wait(tmp_path):
    source = (FOLDER / "norm_all_gather.py").read_text()
    line = next(line for line in source.splitlines() if "seen = td.wait_plan(" in line)
    (tmp_path / "norm_all_gather.py").write_text(source.replace(line, line.split("seen")[0] + "seen = 0"))
    (tmp_path / "test_norm_all_gather.py").write_text((FOLDER / "test_norm_all_gather.py").read_text())
    done = run_tests(tmp_path, "-k", "no_race")
    assert done.returncode == 1 and "race in workspace 'norm_all_gather'" in done.stdout
