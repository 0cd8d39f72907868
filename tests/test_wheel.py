"""The wheel: its contents, and its use in a new environment."""

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
    """The wheel, built from a copy because the build leaves files next to the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder / "dist", folder)
    (found,) = (folder / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A new environment with the wheel; torch and the other dependencies come from the current environment."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Only the path: *.pth files there, such as that of an editable tdkernels, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = sys.executable, "-m", "pip", "--python", folder / "bin" / "python"
    # With PYTHONPATH pip would find the metadata of the sources, and regard the wheel as installed.
    run(*pip, "install", "--no-deps", "--no-index", wheel, env=_without_path())
    return folder / "bin"


def _without_path():
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.slow
def test_wheel_contains_only_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"tdkernels", f"tdkernels-{tdkernels.__version__}.dist-info"}
    for name in ("py.typed", "autotune/configs/nvidia-h200/ag_gemm.json", "ops/dense/ag_gemm/kernel.py"):
        assert f"tdkernels/{name}" in names
    assert any(name.endswith(".ll") for name in names)


@pytest.mark.slow
def test_metadata(wheel):
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    metadata = email.message_from_bytes(zipfile.ZipFile(wheel).read(name))
    assert metadata["Version"] == tdkernels.__version__ and metadata["License-Expression"] == "Apache-2.0"
    assert "triton" in metadata["Keywords"] and "Typing :: Typed" in metadata.get_all("Classifier")
    assert metadata["Description-Content-Type"] == "text/markdown" and "## Quick start" in metadata.get_payload()


@pytest.mark.slow
def test_quick_start_with_the_installed_wheel(environment, tmp_path):
    env = _without_path() | {"CUDA_VISIBLE_DEVICES": ""}
    where = run(environment / "python", "-c", "import tdkernels; print(tdkernels.__file__)", cwd=tmp_path, env=env)
    assert Path(where.strip()).is_relative_to(environment.parent)
    program = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    (tmp_path / "program.py").write_text(program)
    printed = run(environment / "python", "program.py", cwd=tmp_path, env=env).strip()
    assert printed == program.splitlines()[-1].partition("  # ")[2]
    assert run(environment / "tdkernels", "--version", cwd=tmp_path, env=env) == f"tdkernels {tdkernels.__version__}\n"
