"""The examples succeed on CPU ranks; the example of `make demo` fails if its results are wrong."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "tp_mlp.py"
EXPERTS, DECODING = ROOT / "examples" / "ep_moe.py", ROOT / "examples" / "decode.py"


def run_example(*command):
    done = subprocess.run(
        [sys.executable, *command, "--nproc", "2", "--device", "cpu"], capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},  # installed or not
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_mlp_example():
    output = run_example(EXAMPLE, "--steps", "2")
    for word in ("output", "dx", "dw_gate_up", "dw_down", "method=fused", "All as it should be"):
        assert word in output


def test_expert_parallel_example():
    output = run_example(EXPERTS)
    for word in ("y ", "dx", "dgate", "dw_gate_up", "dw_down", "by hand", "loss, tdkernels", "All as it should be"):
        assert word in output


def test_decoding_example():
    assert "5 tokens, 40 keys on 2 ranks" in (output := run_example(DECODING)) and "All as it should be" in output


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("tp_mlp", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["tp_mlp"] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["tp_mlp"]


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
