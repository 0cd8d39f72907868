"""Compile the kernels of the examples and tutorials: CPU ranks accept code that Triton's compiler rejects."""

import functools
import importlib.util
from pathlib import Path

import pytest
import torch

from tests.compiled.targets import BF16, FP32, needs_no_gpu
from tests.support.aot import PLAN, compile_for, pointer

pytestmark = needs_no_gpu

EXAMPLES = Path(__file__).parents[2] / "examples"


def launches():
    """Return {file: (name of the kernel, arguments, constants)}."""
    ctx, x, counts = pointer(torch.int64), pointer(FP32), pointer(torch.int32)
    rows = pointer(BF16)
    return {
        "first_kernel": ("all_sum_kernel", [ctx, x, x], {"N": 4}),
        "tutorials/notify_and_wait": ("exchange_kernel", [ctx, PLAN, x, x], {"N": 8}),
        "tutorials/all_gather_push": ("all_gather_kernel", [ctx, PLAN, x, x], {"N": 64, "CHUNK": 16}),
        "tutorials/low_latency_all_to_all":
            ("all_to_all_kernel", [ctx, PLAN, x, counts, x, counts], {"CAPACITY": 4, "H": 8}),
        "tutorials/ag_gemm":
            ("ag_gemm_kernel", [ctx, PLAN, rows, rows, rows, 32, 32, 64], {"BM": 16, "BN": 16, "BK": 16}),
        "operator/norm_all_gather":
            ("norm_all_gather_kernel", [ctx, PLAN, rows, rows, rows, 7, 96, 1e-6], {"BLOCK": 128}),
    }


def test_every_example_with_a_kernel_is_compiled():
    with_kernels = [path for path in EXAMPLES.rglob("*.py") if "@td.jit" in path.read_text()]
    assert {path.relative_to(EXAMPLES).with_suffix("").as_posix() for path in with_kernels} == launches().keys()


@functools.cache  # a module with an operator registers it once
def module_of(name):
    spec = importlib.util.spec_from_file_location(f"example_{Path(name).name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("name", launches())
def test_kernel_compiles(name, arch):
    kernel, args, constants = launches()[name]
    assert compile_for(getattr(module_of(name), kernel), args, constants, arch).asm
