"""Compile the kernels of the batch-invariant mode with its configs, where they differ from the default configs."""

import pytest
import torch

import tdkernels
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable
from tdkernels.ops.dense.ag_gemm.kernel import ag_gemm_kernel
from tdkernels.ops.dense.gemm_ar.kernel import gemm_ar_kernel
from tdkernels.ops.dense.gemm_rs.kernel_direct import gemm_rs_direct_kernel
from tdkernels.runtime import gpu
from tests.compiled.dense import compile_gemm
from tests.compiled.expert_gemm import tp_moe_launches
from tests.compiled.targets import BF16, compile_launches, needs_no_gpu, tiles_for
from tests.support.aot import SHARED_MEMORY

pytestmark = needs_no_gpu
KERNELS = {"ag_gemm": ag_gemm_kernel, "gemm_ar": gemm_ar_kernel, "gemm_rs": gemm_rs_direct_kernel}


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("operator", KERNELS)
def test_gemms_of_the_mode_compile(operator, arch, monkeypatch):
    monkeypatch.setattr(gpu, "shared_memory_bytes", lambda device: SHARED_MEMORY[arch])
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    monkeypatch.setattr(gpu, "capability", lambda device: (int(arch[3:-1]), 0))
    problem = Problem(operator, "a GPU", 4, 4, "bfloat16", "nk", (64, 8192, 8192))
    tiles = tunable(operator).invariant(problem, torch.device("cuda", 0)).tiles
    assert tiles != tiles_for(arch, BF16)
    compiled = compile_gemm(KERNELS[operator], arch, BF16, tiles=tiles)
    assert compiled.metadata.shared <= SHARED_MEMORY[arch]
    if arch == "sm_90":
        assert "wgmma.mma_async" in compiled.asm["ptx"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_rounded_sums_of_tp_moe_compile(arch):
    with tdkernels.batch_invariant():
        launch = tp_moe_launches.__wrapped__(arch, BF16)["sums"]
    assert launch[2]["ROUND_OWN"] is True
    compile_launches([launch], arch)
