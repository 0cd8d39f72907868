"""The examples succeed on CPU ranks; the example of `make demo` fails if its results are wrong."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.programs import run_program
from tests.support.simulated_nodes import thorough

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "tp_mlp.py"
EXPERTS, DECODING = ROOT / "examples" / "ep_moe.py", ROOT / "examples" / "decode.py"
LONG_CACHE = ROOT / "examples" / "decode_long_cache.py"


def loaded(file):
    """Import an example as a module; generator for a fixture."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[file.stem]


def run_example(file, *arguments):
    code, output, errors = run_program(file, *arguments, "--nproc", "2", "--device", "cpu")
    assert code == 0, output + errors
    return output


def test_mlp_example():
    command = [sys.executable, EXAMPLE, "--steps", "2", "--nproc", "2", "--device", "cpu"]  # as `make demo` starts it
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}  # installed or not
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    output = done.stdout
    assert done.returncode == 0, output + done.stderr
    for word in ("output", "dx", "dw_gate_up", "dw_down", "method=fused", "All as it should be"):
        assert word in output


def test_expert_parallel_example():
    output = run_example(EXPERTS)
    for word in ("y ", "dx", "dgate", "dw_gate_up", "dw_down", "by hand", "loss, tdkernels", "All as it should be"):
        assert word in output


def test_decoding_example():
    output = run_example(DECODING)
    assert "12 tokens of 2 sequences on 2 ranks: 12 equal to those of plain torch" in output
    assert "All as it should be" in output


@thorough
def test_decoding_with_a_long_cache():
    assert "5 tokens, 40 keys on 2 ranks" in (output := run_example(LONG_CACHE)) and "All as it should be" in output


@pytest.fixture(scope="module")
def decoding():
    yield from loaded(DECODING)


def test_comparison_of_tokens(decoding):
    expected = torch.tensor([[[1.0, 4.0, 0.0], [2.0, 0.0, 1.0]]])
    near = expected.clone()
    near[0, 0, 0] = 4.1  # another token, whose logit was far from the largest one
    assert decoding.compare(expected, expected) == (2, 2, 0)
    assert decoding.compare(expected, near) == (1, 2, 1)
    tie = torch.tensor([[[4.0 - 1e-6, 4.0, 0.0], [2.0, 0.0, 1.0]]])
    other = tie.clone()
    other[0, 0, 0] = 4.0 + 1e-6
    assert decoding.compare(tie, other) == (1, 2, 0)
    nan = expected.clone()
    nan[0, 1, 0] = NAN
    assert decoding.compare(expected, nan)[2] == 1


@pytest.fixture(scope="module")
def example():
    yield from loaded(EXAMPLE)


NAN = float("nan")


@pytest.mark.parametrize(
    "errors, losses, good",
    [
        ([(1.9, 1.0), (0.5, 1.0)], [0.5, 0.25], True),
        ([(0.1, 1.0), (2.1, 1.0)], [0.5, 0.25], False),
        ([(0.1, 1.0), (NAN, 1.0)], [0.5, 0.25], False),
        ([(0.1, 1.0), (0.1, 1.0)], [0.5, 0.26], False),
        ([(0.1, 1.0), (0.1, 1.0)], [0.5, NAN], False),
    ],
)
def test_mlp_example_checks_errors_and_losses(example, errors, losses, good):
    problem = example.Problem(128, 64, 64, example.torch.float32, 2, loss_tolerance=1e-4)
    report = {"runs": (), "losses": {"tdkernels": losses, "plain torch": [0.5, 0.25]}}
    assert example.show(problem, "cpu", [{**report, "errors": {"dx": pair}} for pair in errors]) == good
