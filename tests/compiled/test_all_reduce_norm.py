"""Compile the kernels of all_reduce_rms_norm and all_reduce_layer_norm."""

import re

import pytest
import triton

from tests.compiled.all_reduce_norm import CONVERTING, EXCHANGES, norm_launch
from tests.compiled.targets import BF16, FP16, FP32, needs_no_gpu
from tests.support.aot import SHARED_MEMORY, TARGETS, assemble, compile_for, narrow

pytestmark = needs_no_gpu

each_exchange = pytest.mark.parametrize("exchange", EXCHANGES)
# Rows in registers and in memory, and rows that are not a multiple of 16 bytes.
CASES = {
    "in registers": (BF16, 4096, {}),
    "odd": (FP16, 1001, dict(layer_norm=True, weight_dtype=FP32)),
    "in memory, fp8": (FP32, 20000, dict(residual=False, bias=True, quantize="fp8")),
}


def compile_norm(arch, dtype, hidden, exchange, **changes):
    kernel, args, kwargs = norm_launch(arch, dtype, hidden, exchange, **changes)
    compiled = compile_for(kernel, args, kwargs, arch)
    assert compiled.metadata.shared <= SHARED_MEMORY[arch]
    return compiled


@pytest.mark.parametrize("arch", TARGETS)
@each_exchange
def test_norm_kernels_compile(exchange, arch):
    for dtype, hidden, changes in CASES.values():
        compiled = compile_norm(arch, dtype, hidden, exchange, **changes)
        if arch.startswith("sm") and "quantize" in changes:
            assert (re.search(r"cvt\.\S*e4m3x2", compiled.asm["ptx"]) is not None) == (arch in CONVERTING)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("changes", [{}, {"layer_norm": True, "quantize": "fp8"}], ids=str)
@each_exchange
def test_norm_kernels_use_16_byte_accesses(exchange, changes, arch):
    """Only the statistics of a row, which are two numbers, and its scale are stored one by one."""
    for hidden in (8192, 16384):  # in registers, in memory
        ptx = compile_norm(arch, BF16, hidden, exchange, send_columns=4096, **changes).asm["ptx"]
        assert len(narrow(ptx)) <= 2 + ("quantize" in changes), narrow(ptx)
        for access in ("ld", "st"):
            assert re.search(rf"{access}\.global\.v4\.b32|{access}\.global\.v2\.b64", ptx), access
        assert "ld.acquire.sys.global.b64" in ptx and "st.release.sys.global.b64" in ptx


@each_exchange
def test_rows_stay_in_registers(exchange):
    """Check the largest row of 16 warps: r and the parts are read once, and no register is spilled.

    Triton 3.9 uses a newer ptxas for sm_90, which stores 44 bytes of "two_shot" and loads 80.
    """
    ptx = compile_norm("sm_90", BF16, 8192, exchange, ranks=8, layer_norm=True, send_columns=4096).asm["ptx"]
    report, _ = assemble(ptx)
    spills = [int(size) for size in re.findall(r"(\d+) bytes spill", report)]
    assert len(spills) == 2
    assert max(spills) <= (80 if triton.__version__.startswith("3.9") and exchange == "two_shot" else 0), report
