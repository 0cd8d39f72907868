"""Machine code of signals and waits: releases, acquires, fences and warp reconvergence."""

import re

from tdkernels.ops.dense.ag_gemm.kernel import ag_gemm_kernel
from tests.compiled.attention import ODD_ATTENTION, compile_attention
from tests.compiled.dense import GEMM_KERNELS, ONE_SHOT_KERNELS, compile_gemm, compile_one_shot
from tests.compiled.targets import BF16, needs_no_gpu
from tests.support.subset import THOROUGH

pytestmark = needs_no_gpu


def test_wait_before_tma_loads_fences_the_async_proxy():
    ptx = compile_gemm(ag_gemm_kernel, "sm_90", BF16).asm["ptx"]
    acquire = ptx.index("ld.acquire.sys")
    fence = ptx.index("fence.proxy.async.global", acquire)
    assert ptx.find("cp.async.bulk.tensor", fence) > fence


def test_signals_are_released_and_acquired_at_system_scope():
    for kernel in GEMM_KERNELS:
        ptx = compile_gemm(kernel, "sm_90", BF16).asm["ptx"]
        release = ptx.index("@first st.release.sys.global.b64")
        stores = re.finditer(r"\bst\.global\.|bulk\.tensor\S*\.global", ptx[:release])
        stored = max((match.end() for match in stores), default=0)
        assert "bar.sync" in ptx[stored:release], "a thread may store after the signal"
        assert "ld.acquire.sys.global.b64" in ptx


def test_warps_reconverge_after_a_spin():
    """If a warp stays diverged, wgmma, which the whole warp must execute together, reads from wrong addresses."""
    waiting = [compile_gemm(kernel, "sm_90", BF16) for kernel in GEMM_KERNELS]
    waiting += [compile_one_shot(kernel, "sm_90", BF16, split=2) for kernel in ONE_SHOT_KERNELS]
    odd = [(name, sizes) for arch, name, sizes in ODD_ATTENTION if arch == "sm_90"]
    waiting += [compile_attention(name, "sm_90", **sizes) for name, sizes in (odd if THOROUGH else odd[:1])]
    for compiled in waiting:
        ptx = re.sub(r"\n\s*\.loc\b.*", "", compiled.asm["ptx"])  # Triton 3.8 also puts .loc into inline assembly
        assert len(re.findall(r"REACHED:\s*bar\.warp\.sync 0xffffffff", ptx)) == ptx.count("nanosleep") > 0
        assert "wgmma" in ptx
