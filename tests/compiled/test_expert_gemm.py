"""Products by expert: group_gemm, tp_moe, and an ep_moe that overlaps."""

import re

import pytest

from tests.compiled.expert_gemm import (
    EXPERT_LAYER,
    SLICED_ROUTE,
    SLICED_ROWS,
    SLICED_SUMS,
    compile_expert_layer,
    compile_grouped,
    compile_sliced,
    grouped_launches,
)
from tests.compiled.targets import BF16, FP16, FP32, compile_launches, needs_no_gpu
from tests.support.aot import TARGETS

pytestmark = needs_no_gpu


# Another dtype is for one target of each vendor, to save time.
@pytest.mark.parametrize("arch, name, dtype, activation", [
    (arch, name, dtype, activation) for arch in TARGETS for name, dtype, activation in (
        ("product", BF16, None), ("product", BF16, "swiglu"), ("product", BF16, "swiglu_interleaved"),
        ("swiglu", BF16, "swiglu"), ("swiglu", FP16, "swiglu_interleaved"), ("gradient of x", BF16, None),
        ("gradient of w", BF16, None), ("product", FP32, "swiglu"), ("gradient of x", FP32, None),
        ("gradient of w", FP32, None), ("product", FP16, "swiglu_interleaved"),
    ) if name == "swiglu" or dtype == BF16 or arch in ("sm_80", "gfx942")
], ids=str)
def test_grouped_products_compile(arch, name, dtype, activation):
    compile_grouped(name, arch, dtype, activation)


@pytest.mark.parametrize("arch, sizes, activation", [
    ("sm_90", (1, 1, 1), None), ("sm_90", (3, 10, 5), "swiglu"), ("gfx942", (1, 2, 1), "swiglu_interleaved"),
])
def test_grouped_products_of_odd_sizes_compile(arch, sizes, activation):
    compile_launches(grouped_launches(arch, BF16, activation, sizes).values(), arch)


@pytest.mark.parametrize("name, activation", [
    ("product", None), ("product", "swiglu"), ("product", "swiglu_interleaved"), ("gradient of x", None),
    ("gradient of w", None),
])
def test_grouped_products_on_hopper_use_wgmma_and_tma(name, activation):
    ptx = compile_grouped(name, "sm_90", BF16, activation).asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "mma.sync" not in ptx


@pytest.mark.parametrize("arch", TARGETS)
def test_routing_of_sliced_experts_compiles(arch):
    for name in SLICED_ROUTE:
        compile_sliced(name, arch)


# Another dtype is for one target of each vendor, to save time.
@pytest.mark.parametrize("arch, name, dtype", [
    (arch, name, dtype) for arch in TARGETS for name in SLICED_ROWS + SLICED_SUMS for dtype in (BF16, FP16, FP32)
    if dtype == BF16 or arch in ("sm_80", "gfx942") and (name in ("rows, swiglu", "gradient of sums", "sums"))
], ids=str)
def test_products_of_sliced_experts_compile(arch, name, dtype):
    compile_sliced(name, arch, dtype)


@pytest.mark.parametrize("arch, sizes, ranks", [("sm_90", (1, 1, 1, 1, 1), 1), ("gfx942", (3, 5, 7, 13, 9), 3)])
def test_sliced_experts_of_odd_sizes_compile(arch, sizes, ranks):
    for name in (*SLICED_ROUTE, "rows, swiglu", "gradient of sums", "sums", "gradient of rows"):
        compile_sliced(name, arch, sizes=sizes, ranks=ranks)


@pytest.mark.parametrize("name", SLICED_ROWS + SLICED_SUMS)
def test_sliced_experts_on_hopper_use_wgmma_and_tma(name):
    ptx = compile_sliced(name, "sm_90").asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "mma.sync" not in ptx
    assert not re.search(r"(?:ld|st)\.global\.[bu]16\b", ptx), "single elements"
    assert "st.release.sys.global.b64" in ptx and "ld.acquire.sys.global.b64" in ptx
    assert "atom.global.gpu.release.add.u64" in ptx  # pieces that are done, told to programs of this rank
    if name in SLICED_ROWS:
        # Rows that other programs have copied are read by TMA, whose proxy has to be fenced after the wait.
        fence = ptx.index("fence.proxy.async.global", ptx.index("ld.acquire.sys"))
        assert ptx.find("cp.async.bulk.tensor", fence) > fence


# The others are for one target of each vendor, to save time.
@pytest.mark.parametrize("arch, name, dtype", [
    (arch, name, dtype) for arch in TARGETS for name in EXPERT_LAYER for dtype in (BF16, FP32)
    if dtype == BF16 and (name in ("order", "rows, swiglu", "sums") or arch in ("sm_90", "gfx942"))
    or dtype == FP32 and name in ("gradient of sums", "gradient of rows") and arch == "sm_80"
], ids=str)
def test_overlapping_expert_layer_compiles(arch, name, dtype):
    compile_expert_layer(name, arch, dtype)


@pytest.mark.parametrize("arch, sizes, ranks", [("sm_90", (1, 1, 1, 1, 1), 1), ("gfx942", (3, 5, 7, 13, 9), 3)])
def test_overlapping_expert_layer_of_odd_sizes_compiles(arch, sizes, ranks):
    for name in ("order", "rows, swiglu", "gradient of sums", "sums", "gradient of rows"):
        compile_expert_layer(name, arch, sizes=sizes, ranks=ranks)


@pytest.mark.parametrize("name", EXPERT_LAYER[1:])
def test_overlapping_expert_layer_on_hopper_uses_wgmma_and_tma(name):
    ptx = compile_expert_layer(name, "sm_90").asm["ptx"]
    assert "wgmma.mma_async" in ptx and "mma.sync" not in ptx
    assert not re.search(r"(?:ld|st)\.global\.[bu]16\b", ptx), "single elements"
    assert "st.release.sys.global.b64" in ptx and "ld.acquire.sys.global.b64" in ptx
    if name in ("rows, swiglu", "rows, interleaved", "gradient of sums"):
        # Rows that other ranks have stored are read by TMA, whose proxy has to be fenced after the wait.
        fence = ptx.index("fence.proxy.async.global", ptx.index("ld.acquire.sys"))
        assert ptx.find("cp.async.bulk.tensor", fence) > fence
