"""Compile the dense operators for one node: GEMMs that copy tiles to or from peers."""

import re
from dataclasses import replace

import pytest

from tdkernels.ops.common.tile_config import Tiles
from tdkernels.ops.dense.ag_gemm.kernel import ag_gemm_kernel
from tdkernels.ops.dense.gemm_rs.kernel_direct import gemm_rs_direct_kernel
from tests.compiled.dense import COPYING_KERNELS, GEMM_KERNELS, ROWS, K, N, compile_gemm
from tests.compiled.targets import BF16, FP16, FP32, needs_no_gpu
from tests.support.aot import SHARED_MEMORY, TARGETS, narrow, without_machine_code
from tests.support.subset import THOROUGH, pairs

pytestmark = needs_no_gpu


@pytest.mark.parametrize(
    "kernel, dtype, arch", pairs(GEMM_KERNELS, (BF16, FP16, FP32), list(TARGETS), everything=THOROUGH),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_gemm_kernels_compile(kernel, dtype, arch):
    compile_gemm(kernel, arch, dtype, bias=dtype == FP16, w_is_kn=dtype == BF16)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize("kernel", GEMM_KERNELS, ids=lambda k: k.__name__)
def test_size_one_compiles(kernel, arch):
    """Triton specializes an argument of 1 to a constant, which lacks some methods of a tensor value."""
    with without_machine_code(kernel is not gemm_rs_direct_kernel):
        for shape in ((1, 1, 1), (ROWS, 1, K), (1, N, 3)):
            compile_gemm(kernel, arch, BF16, shape=shape)


@pytest.mark.parametrize("arch", TARGETS)
def test_ag_gemm_with_fixed_half_compiles(arch):
    compile_gemm(ag_gemm_kernel, arch, BF16, FIXED_HALF=True)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("weights", [2, 3])
def test_ag_gemm_of_several_weights_compiles(weights, arch):
    compiled = compile_gemm(ag_gemm_kernel, arch, BF16, weights=weights, bias=weights == 3)
    if arch == "sm_90":  # the loop still reads both operands through tensor maps
        ptx = compiled.asm["ptx"]
        assert "wgmma.mma_async" in ptx and ptx.find("ldmatrix", 0, ptx.rindex("wgmma.mma_async")) == -1


@pytest.mark.parametrize("kernel", GEMM_KERNELS, ids=lambda k: k.__name__)
@pytest.mark.parametrize("w_is_kn", [False, True])
def test_main_loop_on_hopper_uses_wgmma_and_tma(kernel, w_is_kn):
    ptx = compile_gemm(kernel, "sm_90", BF16, w_is_kn=w_is_kn).asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "mma.sync" not in ptx
    # ldmatrix in the main loop would mean operands in registers. The epilogue may use it.
    assert ptx.find("ldmatrix", 0, ptx.rindex("wgmma.mma_async")) == -1


@pytest.mark.parametrize("kernel", COPYING_KERNELS, ids=lambda k: k.__name__)
def test_gemm_kernels_use_16_byte_accesses(kernel):
    """If the alignment of an address is unknown, the compiler accesses single elements."""
    ptx = compile_gemm(kernel, "sm_90", BF16).asm["ptx"]
    assert not narrow(ptx)
    assert "ld.global.v2.b64" in ptx and "st.global.v2.b64" in ptx  # the copies to peers
    # Only signals and address tables are accessed in single words; `finish` stores six. Copies move whole blocks.
    assert len(re.findall(r"st\.global\.b64", ptx)) <= 6, "a copy stores single words"


def test_rows_without_tma_use_16_byte_copies():
    staged = re.findall(r"cp\.async\.\w+\.shared\.global.*", compile_gemm(ag_gemm_kernel, "sm_80", BF16).asm["ptx"])
    assert staged and all(" 0x10" in line for line in staged)


def test_too_many_stages_exceed_shared_memory():
    deep = replace(Tiles(), num_stages=5)
    assert deep.shared_memory_bytes(BF16) > SHARED_MEMORY["sm_90"]
