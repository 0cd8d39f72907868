"""Compile the dense kernels for scaled fp8 operands on targets that multiply fp8."""

import re

import pytest
import torch
import triton

from tdkernels.ops.common import small_m_gemm
from tdkernels.ops.common.scaling import LAYOUTS, layout_of
from tdkernels.ops.dense.ag_gemm.kernel import ag_gemm_kernel
from tdkernels.ops.dense.ag_gemm.kernel_one_shot import ag_gemm_one_shot_kernel
from tests.compiled.dense import GEMM_KERNELS, ONE_SHOT_KERNELS, K, N, compile_gemm, compile_one_shot
from tests.compiled.targets import needs_no_gpu
from tests.support.aot import machine_code, narrow, registers
from tests.support.subset import THOROUGH, pairs

pytestmark = needs_no_gpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_TARGETS = ["sm_89", "sm_90", "sm_100", "gfx942", "gfx950"]
KERNELS = [*GEMM_KERNELS, *ONE_SHOT_KERNELS]
# The instruction of each target that multiplies e4m3.
INSTRUCTIONS = {
    "sm_89": r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.e4m3\.e4m3\.f32",
    "sm_90": r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3",
    "sm_100": r"tcgen05\.mma\.\S*kind::f8f6f4",
    "gfx942": r"v_mfma_f32_\d+x\d+x\d+_fp8_fp8",
    "gfx950": r"v_mfma_f32_\d+x\d+x\d+_f8f6f4|v_mfma_f32_\d+x\d+x\d+_fp8_fp8",
}


def format_of(arch):
    """Return the e4m3 format that a target multiplies."""
    return torch.float8_e4m3fnuz if arch == "gfx942" else E4M3


def assembly(compiled, arch):
    return compiled.asm["amdgcn" if arch.startswith("gfx") else "ptx"]


def compile_scaled(kernel, arch, layout, dtype=None, **options):
    compile = compile_one_shot if kernel in ONE_SHOT_KERNELS else compile_gemm
    if kernel in ONE_SHOT_KERNELS:
        options = {"split": 2, **options}
    return compile(kernel, arch, dtype or format_of(arch), layout=layout, **options)


@pytest.mark.parametrize("arch, layout, kernel", pairs(FP8_TARGETS, LAYOUTS, KERNELS), ids=lambda value: (
    value if isinstance(value, str) else value.__name__
))
def test_scaled_kernels_multiply_fp8(arch, layout, kernel):
    text = assembly(compile_scaled(kernel, arch, layout, bias=layout == LAYOUTS[0]), arch)
    assert re.search(INSTRUCTIONS[arch], text), "no instruction multiplies fp8"
    multiplications = set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)\.\S*|v_mfma_\w+", text))
    assert all(re.search(INSTRUCTIONS[arch], one) for one in multiplications), multiplications
    if arch == "sm_90" and kernel in GEMM_KERNELS:
        check_on_hopper(kernel, text)
    elif arch == "sm_90":
        check_copies(text)


def check_on_hopper(kernel, ptx):
    """Check that the main loop reads both operands by TMA. Only scales and remainders may have narrow accesses."""
    assert "cp.async.bulk.tensor" in ptx
    # ldmatrix in the main loop would mean operands in registers. The epilogue may use it.
    assert ptx.find("ldmatrix", 0, ptx.rindex("wgmma.mma_async")) == -1
    other = [line for line in narrow(ptx) if not line.startswith("ld.global.b32")]
    assert len(other) <= (2 if kernel is ag_gemm_kernel else 0), f"narrow accesses: {other}"


def check_copies(ptx):
    """Check that a one-shot kernel loads tiles of 16 rows by asynchronous copies of 16 bytes."""
    staged = re.findall(r"cp\.async\.\w+\.shared\.global.*", ptx)
    assert staged and all(" 0x10" in line for line in staged) and "cp.async.bulk.tensor" not in ptx


@pytest.mark.parametrize("layout, number", [
    (layout, number) for layout in LAYOUTS for number in range(len(small_m_gemm._WAVES_IN_FP8[layout]))
    if THOROUGH or number < 3 and layout != "scaled fast"
])
def test_default_tiles_of_ag_gemm_for_few_rows(layout, number):
    """As many programs fit on an SM as the heuristic assumes, and only Triton 3.9 spills registers."""
    wave = small_m_gemm._WAVES_IN_FP8[layout][number]
    compiled = compile_scaled(ag_gemm_one_shot_kernel, "sm_90", layout, shape=(64, N, K), split=1, tiles=wave.tiles)
    stack, _ = machine_code(compiled)
    assert stack <= (24 if triton.__version__.startswith("3.9") else 0)
    assert wave.per_sm * (compiled.metadata.shared + 1024) <= 228 << 10
    assert wave.per_sm * wave.tiles.num_warps * 32 * registers(compiled) <= 1 << 16


def test_one_shot_of_more_rows_uses_tma():
    ptx = compile_scaled(ONE_SHOT_KERNELS[1], "sm_90", LAYOUTS[0], shape=(64, N, K), split=1).asm["ptx"]
    assert re.search(INSTRUCTIONS["sm_90"], ptx) and "cp.async.bulk.tensor" in ptx
    assert not re.search(r"cp\.async\.\w+\.shared\.global", ptx)


def accumulations(ptx):
    """Return the number of fp32 additions, without which tensor cores accumulate all of K."""
    return len(re.findall(r"\badd\.(?:rn\.)?f32", ptx))


def test_only_fast_accumulation_leaves_sums_to_the_tensor_cores():
    """Without fast accumulation the products of 128 elements of K are added in fp32."""
    accurate, fast = (
        compile_scaled(ag_gemm_kernel, "sm_90", layout_of("row", fast)).asm["ptx"] for fast in (False, True)
    )
    assert accumulations(accurate) >= 32 + accumulations(fast)


def test_sizes_of_one_and_e5m2_compile():
    """Triton specializes an argument of 1 to a constant. Rows whose length is no multiple of 16 are loaded in bytes."""
    compile_scaled(ag_gemm_kernel, "sm_90", "scaled by block", E5M2, shape=(1, 1, 16))
    compile_scaled(ONE_SHOT_KERNELS[1], "sm_90", "scaled", E5M2, shape=(16, 29, 144))
