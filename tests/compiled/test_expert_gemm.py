"""Compile the grouped GEMMs of experts: group_gemm, tp_moe, and the fused ep_moe."""

import re

import pytest
import torch

from tdkernels.ops.common.tile_config import Tiles
from tests.compiled.expert_gemm import (
    EP_MOE,
    TP_MOE_GRADIENTS,
    TP_MOE_ROUTE,
    TP_MOE_ROWS,
    TP_MOE_SCALED,
    TP_MOE_SUMS,
    TP_MOE_UNFUSED,
    compile_ep_moe,
    compile_grouped,
    compile_scaled,
    compile_scaled_tp_moe,
    compile_tp_moe,
    grouped_launches,
)
from tests.compiled.targets import BF16, FP16, FP32, compile_launches, needs_no_gpu
from tests.support.aot import TARGETS, assemble, product_loops, unwritten, without_machine_code
from tests.support.subset import THOROUGH, pairs

pytestmark = needs_no_gpu


# Other dtypes are compiled for one target of each vendor, to save time.
@pytest.mark.parametrize("arch, name, dtype, activation", [
    (arch, name, dtype, activation) for arch in TARGETS for name, dtype, activation in (
        ("forward", BF16, None), ("forward", BF16, "swiglu"), ("forward", BF16, "swiglu_interleaved"),
        ("gradient of swiglu", BF16, "swiglu"), ("gradient of swiglu", FP16, "swiglu_interleaved"),
        ("swiglu", BF16, "swiglu"), ("swiglu", FP16, "swiglu_interleaved"), ("gradient of x", BF16, None),
        ("gradient of w", BF16, None), ("forward", FP32, "swiglu"), ("gradient of x", FP32, None),
        ("gradient of w", FP32, None), ("forward", FP16, "swiglu_interleaved"),
    ) if "swiglu" in name or dtype == BF16 or arch in ("sm_80", "gfx942")
], ids=str)
def test_grouped_gemm_compiles(arch, name, dtype, activation):
    compile_grouped(name, arch, dtype, activation)


@pytest.mark.parametrize("arch, sizes, activation", [
    ("sm_90", (1, 1, 1), None), ("sm_90", (3, 10, 5), "swiglu"), ("gfx942", (1, 2, 1), "swiglu_interleaved"),
])
def test_grouped_gemm_with_odd_sizes_compiles(arch, sizes, activation):
    launches = grouped_launches(arch, BF16, activation, sizes)
    for name, launch in launches.items():
        with without_machine_code(name != "forward"):
            compile_launches([launch], arch)


@pytest.mark.parametrize("name, activation", [
    ("forward", None), ("forward", "swiglu"), ("forward", "swiglu_interleaved"), ("gradient of x", None),
    ("gradient of w", None),
])
def test_grouped_gemm_on_hopper_uses_wgmma_and_tma(name, activation):
    ptx = compile_grouped(name, "sm_90", BF16, activation).asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "mma.sync" not in ptx


E4M3, E5M2, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz
FP8_TARGETS = [("sm_89", E4M3), ("sm_90", E4M3), ("sm_100", E4M3), ("gfx942", FNUZ), ("gfx950", E4M3)]
SCALINGS = [("row", True), ("row", False), ("block", False)]  # with fast accumulation or without
# The instructions that multiply fp8 matrices.
MULTIPLIES = {
    "sm_89": re.compile(r"mma\.sync\S*\.e4m3\.e4m3"), "sm_90": re.compile(r"wgmma\.mma_async\S*\.e4m3\.e4m3"),
    "sm_100": re.compile(r"tcgen05\.mma\S*f8f6f4"), "gfx942": re.compile(r"mfma_f32_\w+_fp8_fp8"),
    "gfx950": re.compile(r"mfma_\w+f8f6f4"),
}


@pytest.mark.parametrize(
    "scaling, activation, target",
    pairs(SCALINGS, (None, "swiglu", "swiglu_interleaved"), FP8_TARGETS, everything=THOROUGH), ids=str,
)
def test_scaled_grouped_gemm_compiles(scaling, activation, target):
    (kind, fast), (arch, dtype) = scaling, target
    compiled = compile_scaled(arch, dtype, kind, activation, fast=fast)
    assert MULTIPLIES[arch].search(compiled.asm["ptx" if arch.startswith("sm") else "amdgcn"])


@pytest.mark.parametrize("activation", [None, "swiglu", "swiglu_interleaved"], ids=str)
@pytest.mark.parametrize("kind, fast", SCALINGS)
def test_scaled_grouped_gemm_on_hopper_uses_wgmma_and_tma(kind, fast, activation):
    ptx = compile_scaled("sm_90", E4M3, kind, activation, fast=fast).asm["ptx"]
    assert "cp.async.bulk.tensor" in ptx and "mma.sync" not in ptx
    report, code = assemble(ptx)
    assert " 0 bytes spill stores" in report and "serialized" not in report
    assert not unwritten(code)
    main_loop = min(product_loops(code), key=len)
    assert not any("LDSM" in text for text in main_loop), "operands are in registers"
    # Products of "row" are added to the accumulator in fp32 unless accumulation is fast, scaled products always.
    assert any("FADD" in text or "FFMA" in text for text in main_loop) == (not fast)
    # A tile inside a block of the weight loads one scale of the weight, not one for each column.
    assert sum("LDG" in text for text in main_loop) < 8


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100", "gfx950"])
@pytest.mark.parametrize("dtype, w_dtype", [(E5M2, E5M2), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
def test_scaled_grouped_gemm_of_e5m2_compiles(dtype, w_dtype, arch):
    compile_scaled(arch, dtype, "row", w_dtype=w_dtype)


@pytest.mark.parametrize("arch, dtype", FP8_TARGETS, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 16), (3, 10, 48), (100, 130, 272)], ids=str)
def test_scaled_grouped_gemm_with_odd_sizes_compiles(sizes, arch, dtype):
    for kind, activation in (("row", None), ("block", "swiglu" if sizes[1] % 2 == 0 else None)):
        compile_scaled(arch, dtype, kind, activation, sizes=sizes)


@pytest.mark.parametrize("arch, dtype", FP8_TARGETS, ids=str)
@pytest.mark.parametrize("kind", ["row", "block"])
def test_scaled_grouped_gemm_with_the_smallest_tile_compiles(kind, arch, dtype):
    compile_scaled(arch, dtype, kind, tiles=Tiles(16, 16, 32, num_warps=4, num_stages=2))


# They differ from "rows, swiglu" and "sums" by an activation, or by the operands of the same GEMM.
_ON_ONE_VENDOR = ("rows, interleaved", "gradient of rows")


@pytest.mark.parametrize("arch", TARGETS)
def test_tp_moe_without_gemms_compiles(arch):
    for name in TP_MOE_ROUTE + TP_MOE_UNFUSED + TP_MOE_GRADIENTS:
        compile_tp_moe(name, arch)


@pytest.mark.parametrize("name", [*TP_MOE_UNFUSED, "gradients", "gradients, swiglu", "gathered rows"])
def test_tp_moe_without_gemms_accesses_16_bytes(name):
    ptx = compile_tp_moe(name, "sm_90", sizes=(256, 2, 4, 512, 1024)).asm["ptx"]
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx


# Other dtypes are compiled for one target of each vendor, to save time.
@pytest.mark.parametrize("arch, name, dtype", [
    (arch, name, dtype) for arch in TARGETS for name in TP_MOE_ROWS + TP_MOE_SUMS for dtype in (BF16, FP16, FP32)
    if dtype == BF16 and (THOROUGH or arch != "gfx942" or name not in _ON_ONE_VENDOR)
    or dtype != BF16 and arch in ("sm_80", "gfx942") and name in ("rows, swiglu", "gradient of sums", "sums")
], ids=str)
def test_tp_moe_gemms_compile(arch, name, dtype):
    compile_tp_moe(name, arch, dtype)


@pytest.mark.parametrize("arch, sizes, ranks", [("sm_90", (1, 1, 1, 1, 1), 1), ("gfx942", (3, 5, 7, 13, 9), 3)])
def test_tp_moe_with_odd_sizes_compiles(arch, sizes, ranks):
    for name in (*TP_MOE_ROUTE, "rows, swiglu", "gradient of sums", "sums", "gradient of rows", *TP_MOE_UNFUSED,
                 *TP_MOE_GRADIENTS):
        with without_machine_code(name != "sums"):
            compile_tp_moe(name, arch, sizes=sizes, ranks=ranks)


@pytest.mark.parametrize("name", TP_MOE_ROWS + TP_MOE_SUMS)
def test_tp_moe_on_hopper_uses_wgmma_and_tma(name):
    ptx = compile_tp_moe(name, "sm_90").asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "mma.sync" not in ptx
    assert not re.search(r"(?:ld|st)\.global\.[bu]16\b", ptx), "accesses single elements"
    assert "st.release.sys.global.b64" in ptx and "ld.acquire.sys.global.b64" in ptx
    # Counts finished chunks for programs of this rank. From Triton 3.9 on, it is a reduction: nothing reads the result.
    assert re.search(r"(?:atom|red)\.global\.gpu\.release\.add\.u64", ptx)
    if name in TP_MOE_ROWS:
        # TMA reads rows that other programs have copied, so its proxy must be fenced after the wait.
        fence = ptx.index("fence.proxy.async.global", ptx.index("ld.acquire.sys"))
        assert ptx.find("cp.async.bulk.tensor", fence) > fence


@pytest.mark.parametrize("arch, dtype", FP8_TARGETS, ids=str)
@pytest.mark.parametrize("name", TP_MOE_SCALED)
def test_scaled_tp_moe_compiles(name, arch, dtype):
    compiled = compile_scaled_tp_moe(name, arch, dtype)
    assert MULTIPLIES[arch].search(compiled.asm["ptx" if arch.startswith("sm") else "amdgcn"])
    compile_scaled_tp_moe(name, arch, dtype, sizes=(3, 5, 7, 48, 16), ranks=3)
    compile_scaled_tp_moe(name, arch, dtype, kind="row")


@pytest.mark.parametrize("name", TP_MOE_SCALED)
def test_scaled_tp_moe_on_hopper_uses_tma(name):
    ptx = compile_scaled_tp_moe(name, "sm_90", E4M3).asm["ptx"]
    assert "cp.async.bulk.tensor" in ptx and "mma.sync" not in ptx
    assert not re.search(r"(?:ld|st)\.global\.[bu](?:8|16)\b", ptx), "accesses single elements"


# Other launches and dtypes are compiled for one target of each vendor, to save time.
@pytest.mark.parametrize("arch, name, dtype", [
    (arch, name, dtype) for arch in TARGETS for name in EP_MOE for dtype in (BF16, FP32)
    if dtype == BF16 and (
        name in ("order", "rows, swiglu", "sums") or arch == "sm_90"
        or arch == "gfx942" and (THOROUGH or name not in _ON_ONE_VENDOR)
    )
    or dtype == FP32 and name in ("gradient of sums", "gradient of rows") and arch == "sm_80"
], ids=str)
def test_fused_ep_moe_compiles(arch, name, dtype):
    compile_ep_moe(name, arch, dtype)


@pytest.mark.parametrize("arch, sizes, ranks", [("sm_90", (1, 1, 1, 1, 1), 1), ("gfx942", (3, 5, 7, 13, 9), 3)])
def test_fused_ep_moe_with_odd_sizes_compiles(arch, sizes, ranks):
    for name in ("order", "rows, swiglu", "gradient of sums", "sums", "gradient of rows"):
        with without_machine_code(name != "sums"):
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
