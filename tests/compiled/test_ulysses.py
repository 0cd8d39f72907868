"""Compile the Ulysses projections and their gradients."""

import re

import pytest

from tdkernels.ops.common.tile_config import Tiles
from tests.compiled.targets import BF16, FP32, needs_no_gpu
from tests.compiled.ulysses import ULYSSES, compile_ulysses
from tests.support.aot import TARGETS, narrow

pytestmark = needs_no_gpu


# Other dtypes are compiled for one target of each vendor, to save time.
@pytest.mark.parametrize("arch, name, dtype", [
    (arch, name, dtype) for arch in TARGETS for name in ULYSSES for dtype in (BF16, FP32)
    if dtype == BF16 and name in ("qkv", "gradient of x")
    or name in ("qkv", "out") and dtype == FP32 and arch in ("sm_80", "gfx942")
], ids=str)
def test_ulysses_compiles(arch, name, dtype):
    compile_ulysses(name, arch, dtype, bias=dtype == FP32)


@pytest.mark.parametrize("arch, sizes, ranks", [("sm_90", (1, 1, 1, 1), 2), ("gfx942", (3, 7, 13, 9), 3)])
def test_ulysses_with_odd_sizes_compiles(arch, sizes, ranks):
    for name in ("qkv", "gradient of x"):
        # Large tiles with single-element accesses compile slowly.
        compile_ulysses(name, arch, sizes=sizes, ranks=ranks, tiles=Tiles(64, 64, 64, num_warps=4, num_stages=2))


@pytest.mark.parametrize("name", ULYSSES)
def test_ulysses_on_hopper_uses_wgmma_and_tma(name):
    ptx = compile_ulysses(name, "sm_90").asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "mma.sync" not in ptx
    assert not narrow(ptx)
    assert "ld.global.v4.b32" in ptx or "ld.global.v2.b64" in ptx  # the copies to peers
    assert "st.release.sys.global.b64" in ptx and "ld.acquire.sys.global.b64" in ptx
    if name in ("out", "gradient of x"):
        # TMA reads rows that peers have pushed, so its proxy must be fenced after the waits.
        for acquire in re.finditer("ld.acquire.sys", ptx):
            following = ptx.find("cp.async.bulk.tensor", acquire.end())
            assert following < 0 or "fence.proxy.async.global" in ptx[acquire.end() : following]
