"""The wheel: what it contains, and that it works where it is installed."""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import tdkernels

ROOT = Path(__file__).parents[1]
SOURCES = "pyproject.toml", "README.md", "LICENSE", "tdkernels", "tests", "bench"


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=240, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy: building leaves files beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder / "dist", folder)
    (found,) = (folder / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A new environment with the wheel; torch and the other dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    # The path alone: files *.pth there, such as an editable tdkernels, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    return folder / "bin"


@pytest.mark.slow
def test_the_wheel_has_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"tdkernels", f"tdkernels-{tdkernels.__version__}.dist-info"}
    for name in ("py.typed", "autotune/configs/nvidia-h200/ag_gemm.json", "ops/dense/ag_gemm/kernel.py"):
        assert f"tdkernels/{name}" in names
    assert any(name.endswith(".ll") for name in names)


@pytest.mark.slow
def test_the_metadata_describes_the_project(wheel):
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    metadata = email.message_from_bytes(zipfile.ZipFile(wheel).read(name))
    assert metadata["Version"] == tdkernels.__version__ and metadata["License-Expression"] == "Apache-2.0"
    assert "triton" in metadata["Keywords"] and "Typing :: Typed" in metadata.get_all("Classifier")
    assert metadata["Description-Content-Type"] == "text/markdown" and "## Quick start" in metadata.get_payload()


@pytest.mark.slow
def test_the_quick_start_runs_where_the_wheel_is_installed(environment, tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"CUDA_VISIBLE_DEVICES": ""}
    where = run(environment / "python", "-c", "import tdkernels; print(tdkernels.__file__)", cwd=tmp_path, env=env)
    assert Path(where.strip()).is_relative_to(environment.parent)
    program = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    (tmp_path / "program.py").write_text(program)
    printed = run(environment / "python", "program.py", cwd=tmp_path, env=env).strip()
    assert printed == program.splitlines()[-1].partition("  # ")[2]
    assert run(environment / "tdkernels", "--version", cwd=tmp_path, env=env) == f"tdkernels {tdkernels.__version__}\n"
