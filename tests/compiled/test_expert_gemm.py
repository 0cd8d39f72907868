"""Compile the grouped GEMMs of experts: group_gemm, tp_moe, and the fused ep_moe."""

import re

import pytest

from tests.compiled.expert_gemm import (
    EP_MOE,
    TP_MOE_ROUTE,
    TP_MOE_ROWS,
    TP_MOE_SUMS,
    compile_ep_moe,
    compile_grouped,
    compile_tp_moe,
    grouped_launches,
)
from tests.compiled.targets import BF16, FP16, FP32, compile_launches, needs_no_gpu
from tests.support.aot import TARGETS

pytestmark = needs_no_gpu


# Other dtypes are compiled for one target of each vendor, to save time.
@pytest.mark.parametrize("arch, name, dtype, activation", [
    (arch, name, dtype, activation) for arch in TARGETS for name, dtype, activation in (
        ("forward", BF16, None), ("forward", BF16, "swiglu"), ("forward", BF16, "swiglu_interleaved"),
        ("swiglu", BF16, "swiglu"), ("swiglu", FP16, "swiglu_interleaved"), ("gradient of x", BF16, None),
        ("gradient of w", BF16, None), ("forward", FP32, "swiglu"), ("gradient of x", FP32, None),
        ("gradient of w", FP32, None), ("forward", FP16, "swiglu_interleaved"),
    ) if name == "swiglu" or dtype == BF16 or arch in ("sm_80", "gfx942")
], ids=str)
def test_grouped_gemm_compiles(arch, name, dtype, activation):
    compile_grouped(name, arch, dtype, activation)


@pytest.mark.parametrize("arch, sizes, activation", [
    ("sm_90", (1, 1, 1), None), ("sm_90", (3, 10, 5), "swiglu"), ("gfx942", (1, 2, 1), "swiglu_interleaved"),
])
def test_grouped_gemm_with_odd_sizes_compiles(arch, sizes, activation):
    compile_launches(grouped_launches(arch, BF16, activation, sizes).values(), arch)


@pytest.mark.parametrize("name, activation", [
    ("forward", None), ("forward", "swiglu"), ("forward", "swiglu_interleaved"), ("gradient of x", None),
    ("gradient of w", None),
])
def test_grouped_gemm_on_hopper_uses_wgmma_and_tma(name, activation):
    ptx = compile_grouped(name, "sm_90", BF16, activation).asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "mma.sync" not in ptx


@pytest.mark.parametrize("arch", TARGETS)
def test_tp_moe_routing_compiles(arch):
    for name in TP_MOE_ROUTE:
        compile_tp_moe(name, arch)


# Other dtypes are compiled for one target of each vendor, to save time.
@pytest.mark.parametrize("arch, name, dtype", [
    (arch, name, dtype) for arch in TARGETS for name in TP_MOE_ROWS + TP_MOE_SUMS for dtype in (BF16, FP16, FP32)
    if dtype == BF16 or arch in ("sm_80", "gfx942") and (name in ("rows, swiglu", "gradient of sums", "sums"))
], ids=str)
def test_tp_moe_gemms_compile(arch, name, dtype):
    compile_tp_moe(name, arch, dtype)


@pytest.mark.parametrize("arch, sizes, ranks", [("sm_90", (1, 1, 1, 1, 1), 1), ("gfx942", (3, 5, 7, 13, 9), 3)])
def test_tp_moe_with_odd_sizes_compiles(arch, sizes, ranks):
    for name in (*TP_MOE_ROUTE, "rows, swiglu", "gradient of sums", "sums", "gradient of rows"):
        compile_tp_moe(name, arch, sizes=sizes, ranks=ranks)


@pytest.mark.parametrize("name", TP_MOE_ROWS + TP_MOE_SUMS)
def test_tp_moe_on_hopper_uses_wgmma_and_tma(name):
    ptx = compile_tp_moe(name, "sm_90").asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "mma.sync" not in ptx
    assert not re.search(r"(?:ld|st)\.global\.[bu]16\b", ptx), "accesses single elements"
    assert "st.release.sys.global.b64" in ptx and "ld.acquire.sys.global.b64" in ptx
    assert "atom.global.gpu.release.add.u64" in ptx  # counts finished chunks for programs of this rank
    if name in TP_MOE_ROWS:
        # TMA reads rows that other programs have copied, so its proxy must be fenced after the wait.
        fence = ptx.index("fence.proxy.async.global", ptx.index("ld.acquire.sys"))
        assert ptx.find("cp.async.bulk.tensor", fence) > fence


# Other launches and dtypes are compiled for one target of each vendor, to save time.
@pytest.mark.parametrize("arch, name, dtype", [
    (arch, name, dtype) for arch in TARGETS for name in EP_MOE for dtype in (BF16, FP32)
    if dtype == BF16 and (name in ("order", "rows, swiglu", "sums") or arch in ("sm_90", "gfx942"))
    or dtype == FP32 and name in ("gradient of sums", "gradient of rows") and arch == "sm_80"
], ids=str)
def test_fused_ep_moe_compiles(arch, name, dtype):
    compile_ep_moe(name, arch, dtype)


@pytest.mark.parametrize("arch, sizes, ranks", [("sm_90", (1, 1, 1, 1, 1), 1), ("gfx942", (3, 5, 7, 13, 9), 3)])
def test_fused_ep_moe_with_odd_sizes_compiles(arch, sizes, ranks):
    for name in ("order", "rows, swiglu", "gradient of sums", "sums", "gradient of rows"):
        compile_ep_moe(name, arch, sizes=sizes, ranks=ranks)


@pytest.mark.parametrize("name", EP_MOE[1:])
def test_fused_ep_moe_on_hopper_uses_wgmma(name):
    ptx = compile_ep_moe(name, "sm_90").asm["ptx"]
    assert "wgmma.mma_async" in ptx and "mma.sync" not in ptx
    assert not re.search(r"(?:ld|st)\.global\.[bu]16\b", ptx), "accesses single elements"
    assert "st.release.sys.global.b64" in ptx and "ld.acquire.sys.global.b64" in ptx
    if name in ("rows, swiglu", "rows, interleaved", "gradient of sums"):
        # TMA reads rows that other ranks have stored, so its proxy must be fenced after the wait.
        fence = ptx.index("fence.proxy.async.global", ptx.index("ld.acquire.sys"))
        assert ptx.find("cp.async.bulk.tensor", fence) > fence
