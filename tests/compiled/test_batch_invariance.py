"""Compile the kernels of the batch-invariant mode with its configs, where they differ from the default configs."""

import pytest
import torch

import tdkernels
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable
from tdkernels.ops.common.tile_config import Tiles
from tdkernels.ops.dense.ag_gemm.kernel import ag_gemm_kernel
from tdkernels.ops.dense.gemm_ar.kernel import gemm_ar_kernel
from tdkernels.ops.dense.gemm_ar.kernel_direct import gemm_ar_direct_kernel
from tdkernels.ops.dense.gemm_rs.kernel_direct import gemm_rs_direct_kernel
from tdkernels.runtime import gpu
from tests.compiled.all_reduce_norm import norm_launch
from tests.compiled.collectives import compile_collective
from tests.compiled.dense import compile_gemm
from tests.compiled.expert_gemm import compile_grouped_tree, tp_moe_launches
from tests.compiled.gemm_ar_norm import compile_gemm_ar_norm
from tests.compiled.targets import BF16, FP16, compile_launches, needs_no_gpu, tiles_for
from tests.support.aot import SHARED_MEMORY, assemble
from tests.support.simulated_nodes import thorough

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


def compile_tree(operator, arch, leaves, dtype=BF16):
    """Compile a kernel with the reduction tree of ``max_ranks=8``, for a rank that computes this number of leaves."""
    ranks = 8 // leaves
    stages = {"sm_80": 3, "sm_90": 5, "sm_100": 4, "gfx942": 2, "gfx950": 2}[arch]
    large = Tiles(128, 128, 64, num_warps=8, num_stages=stages)  # of the mode
    if operator in KERNELS:
        kernel = gemm_ar_direct_kernel if operator == "gemm_ar" else KERNELS[operator]
        return compile_gemm(kernel, arch, dtype, tiles=large, leaves=leaves)
    if operator == "group_gemm":
        return compile_grouped_tree(arch, BF16, leaves, large)
    with tdkernels.batch_invariant(max_ranks=8):
        if operator == "gemm_ar_rms_norm":
            return compile_gemm_ar_norm(arch, BF16, 8192, rows=64, k=1024 * leaves, ranks=ranks)
        if operator == "all_reduce_rms_norm":
            return compile_launches([norm_launch(arch, BF16, 8192, "two_shot", ranks=ranks)], arch)[0]
        return compile_collective(operator, "one_shot", arch, BF16, ranks=ranks)


TREES = [("gemm_rs", 2), ("group_gemm", 8), ("gemm_ar_rms_norm", 2)]
MORE_TREES = [("gemm_rs", 8), ("gemm_ar", 4), ("gemm_ar", 8), ("gemm_ar_rms_norm", 8)]


@pytest.mark.parametrize("operator, leaves, arch", [
    *((*one, arch) for one in TREES for arch in ("sm_90", "sm_100")),
    *((*one, "sm_90") for one in (("all_reduce_rms_norm", 2), ("all_reduce", 1))),
    ("gemm_rs", 2, "gfx942"), pytest.param("gemm_rs", 8, "gfx950", marks=thorough),
    *(pytest.param(*one, arch, marks=thorough) for one in MORE_TREES for arch in ("sm_90", "sm_100")),
])
def test_trees_compile(operator, leaves, arch):
    compiled = compile_tree(operator, arch, leaves)
    if arch == "sm_90" and "gemm" in operator:
        assert compiled.asm["ptx"].count("wgmma.mma_async") >= leaves, "each leaf has a main loop"
    if arch == "sm_90" and leaves == 8:
        assert "0 bytes spill stores, 0 bytes spill loads" in assemble(compiled.asm["ptx"])[0]


def test_tree_in_fp16_compiles():
    ptx = compile_tree("gemm_rs", "sm_80", 2, FP16).asm["ptx"]
    assert "cvt.rn.f16x2.f32" in ptx and "bf16" not in ptx, "a register has two numbers of a node"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_rounded_sums_of_tp_moe_compile(arch):
    with tdkernels.batch_invariant():
        launch = tp_moe_launches.__wrapped__(arch, BF16)["sums"]
    assert launch[2]["ROUND_OWN"] is True
    compile_launches([launch], arch)
