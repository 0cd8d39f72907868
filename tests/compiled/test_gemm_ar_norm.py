"""Compile the kernel of gemm_ar_rms_norm and gemm_ar_layer_norm."""

import re

import pytest

from tdkernels.ops.common.tile_config import Tiles
from tdkernels.ops.dense.gemm_ar_norm.config import registers_hold
from tests.compiled.gemm_ar_norm import compile_gemm_ar_norm
from tests.compiled.targets import BF16, FP16, FP32, needs_no_gpu
from tests.support.aot import TARGETS, assemble, narrow, without_machine_code

pytestmark = needs_no_gpu

LONG = 5120  # a row of more elements than 4 warps have in registers


@pytest.mark.parametrize("arch", TARGETS)
def test_gemm_ar_norm_compiles(arch):
    compile_gemm_ar_norm(arch, BF16, 4096, row_programs=4, split_k=2)
    compile_gemm_ar_norm(arch, FP16, LONG, layer_norm=True, bias=True, norm_dtype=FP32, quantize="fp8")
    compile_gemm_ar_norm(arch, BF16, 1024, rows=64, layer_norm=True, quantize="fp8", w_is_kn=True)
    compile_gemm_ar_norm(arch, FP32, LONG, rows=32, residual=False, bias=True, norm_bias=True)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_odd_sizes_compile(arch):
    """Triton specializes an argument of 1 to a constant, which lacks some methods of a tensor value."""
    for quantize in (None, "fp8"):
        with without_machine_code(quantize is None):
            compile_gemm_ar_norm(arch, BF16, 1, rows=1, k=1, ranks=2, quantize=quantize, layer_norm=True)
        with without_machine_code(quantize is not None):
            compile_gemm_ar_norm(arch, BF16, LONG + 3, rows=37, k=33, ranks=3, quantize=quantize, split_k=2, bias=True)


@pytest.mark.parametrize("n, rows", [(4096, 1), (LONG, 64)])
def test_gemm_ar_norm_uses_wide_accesses(n, rows):
    """Rows that are a multiple of 16 elements move in words of 16 bytes; only statistics and scales are narrower."""
    ptx = compile_gemm_ar_norm("sm_90", BF16, n, rows=rows, layer_norm=True, bias=True, norm_dtype=FP32).asm["ptx"]
    assert len(narrow(ptx)) <= 2, narrow(ptx)  # mean and deviation
    assert re.search(r"ld\.global\.v4\.b32|ld\.global\.v2\.b64", ptx)
    assert re.search(r"st\.global\.v4\.b32|st\.global\.v2\.b64", ptx)
    assert "wgmma" in ptx and ("cp.async.bulk.tensor" in ptx) == (rows == 64)
    assert "ld.acquire.sys.global.b64" in ptx and "st.release.sys.global.b64" in ptx


@pytest.mark.parametrize("num_warps", [4, 8])
def test_rows_fit_into_registers(num_warps):
    """The longest rows that stay in registers, with all operands and fp8 codes."""
    common = dict(ranks=8, quantize="fp8", layer_norm=True, bias=True, split_k=2)
    for dtype, norm_dtype, depth in ((BF16, FP32, 128), (FP32, None, 32)):
        tiles = Tiles(16, 64, depth, num_warps=num_warps, num_stages=2)
        n = registers_hold(num_warps, dtype)
        assert n == num_warps * (1024 if dtype == BF16 else 512) and (n < LONG or num_warps == 8)
        compiled = compile_gemm_ar_norm("sm_90", dtype, n, tiles=tiles, norm_dtype=norm_dtype, **common)
        report, _ = assemble(compiled.asm["ptx"])
        assert "0 bytes spill stores, 0 bytes spill loads" in report, report
