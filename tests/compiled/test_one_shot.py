"""Compile the one-shot kernels of the dense operators, for small M."""

import re

import pytest

from tdkernels.ops.common.tile_config import LARGE
from tdkernels.ops.dense.ag_gemm.kernel_one_shot import ag_gemm_one_shot_kernel
from tests.compiled.dense import ONE_SHOT_KERNELS, K, N, compile_one_shot
from tests.compiled.expert_gemm import compile_grouped
from tests.compiled.targets import BF16, FP16, FP32, needs_no_gpu
from tests.support.aot import SHARED_MEMORY, TARGETS, narrow
from tests.support.subset import THOROUGH, pairs

pytestmark = needs_no_gpu

each_one_shot_kernel = pytest.mark.parametrize("kernel", ONE_SHOT_KERNELS, ids=lambda k: k.__name__)


@pytest.mark.parametrize(
    "dtype, arch, kernel", pairs((BF16, FP16, FP32), list(TARGETS), ONE_SHOT_KERNELS, everything=THOROUGH),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_one_shot_compiles(dtype, arch, kernel):
    compile_one_shot(kernel, arch, dtype, split=2 if dtype == BF16 else 1, bias=dtype == FP16, w_is_kn=dtype == FP32)
    if arch in ("sm_90", "gfx942"):
        compile_one_shot(kernel, arch, dtype, split=2, scatters=True, shape=(1, 1, 1))
        compile_one_shot(kernel, arch, dtype, split=1, scatters=True, w_is_kn=dtype == BF16, shape=(64, N, K))


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_large_default_tiles_compile(arch):
    """The large tiles of one-shot kernels for large N, and of the weight gradient for long groups."""
    for kernel, w_is_kn in zip(ONE_SHOT_KERNELS, (False, True), strict=True):
        compile_one_shot(kernel, arch, BF16, split=1, scatters=True, w_is_kn=w_is_kn, shape=(256, N, K), tiles=LARGE)
    compiled = compile_grouped("gradient of w", arch, BF16, sizes=(4 * 4096, 512, 512))
    assert compiled.metadata.num_warps == 8 and compiled.metadata.shared <= SHARED_MEMORY[arch]


@each_one_shot_kernel
@pytest.mark.parametrize("rows, split, scatters", [(16, 1, True), (64, 2, False)])
def test_one_shot_uses_16_byte_accesses(rows, split, scatters, kernel):
    ptx = compile_one_shot(kernel, "sm_90", BF16, split=split, scatters=scatters, shape=(rows, N, K)).asm["ptx"]
    assert not narrow(ptx)
    staged = re.findall(r"cp\.async\.\w+\.shared\.global.*", ptx)
    assert all(" 0x10" in line for line in staged)
    assert "wgmma" in ptx and bool(staged) == (rows == 16) and ("cp.async.bulk.tensor" in ptx) == (rows == 64)
    assert ("cp.async.bulk.prefetch.L2" in ptx) == (kernel is ag_gemm_one_shot_kernel)
