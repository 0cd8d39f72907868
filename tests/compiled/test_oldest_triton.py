"""Compile the Gluon kernels with the oldest supported version of Triton, which ``make test`` installs.

Gluon is experimental, so what it accepts differs between minor versions.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiled.targets import needs_no_gpu

REPO = Path(__file__).parents[2]
OLDEST = Path(sys.prefix, "oldest-triton")  # as in the Makefile


@needs_no_gpu
@pytest.mark.skipif(
    not Path(OLDEST, ".installed").exists(),
    reason="`make test` and `make test-oldest` install the oldest Triton, but not with VENV= (no virtual environment)",
)
def test_gluon_kernels_compile_with_the_oldest_triton():
    (version,) = re.findall(r'"triton>=([\d.]+)"', (REPO / "pyproject.toml").read_text())
    path = os.pathsep.join(filter(None, [str(OLDEST), os.environ.get("PYTHONPATH")]))
    program = [sys.executable, "-m", "tests.compiled.gluon_kernels", version]
    env = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run(program, cwd=REPO, env=env, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 0, f"with triton {version}:\n{run.stderr}"
