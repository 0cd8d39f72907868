"""What the signals and waits of kernels become: releases, acquires, fences and where threads meet."""

import re

from tdkernels.ops.dense.ag_gemm.kernel import ag_gemm_kernel
from tests.compiled.attention import ODD_ATTENTION, compile_attention
from tests.compiled.dense import ONE_SHOT, PRODUCTS, compile_gemm, compile_one_shot
from tests.compiled.targets import BF16, needs_no_gpu

pytestmark = needs_no_gpu


def test_a_wait_before_tma_loads_fences_their_proxy():
    ptx = compile_gemm(ag_gemm_kernel, "sm_90", BF16).asm["ptx"]
    acquire = ptx.index("ld.acquire.sys")
    fence = ptx.index("fence.proxy.async.global", acquire)
    assert ptx.find("cp.async.bulk.tensor", fence) > fence


def test_signals_are_released_and_acquired_at_system_scope():
    for kernel in PRODUCTS:
        ptx = compile_gemm(kernel, "sm_90", BF16).asm["ptx"]
        release = ptx.index("@first st.release.sys.global.b64")
        stores = re.finditer(r"\bst\.global\.|bulk\.tensor\S*\.global", ptx[:release])
        stored = max((match.end() for match in stores), default=0)
        assert "bar.sync" in ptx[stored:release], "all threads' stores come first"
        assert "ld.acquire.sys.global.b64" in ptx


def test_threads_come_together_after_a_spin():
    """Else those of a warp may go on one by one, and wgmma, which the warp does as one, reads anywhere."""
    spinning = [compile_gemm(kernel, "sm_90", BF16) for kernel in PRODUCTS]
    spinning += [compile_one_shot(kernel, "sm_90", BF16, split=2) for kernel in ONE_SHOT]
    spinning += [compile_attention(name, arch, **sizes) for arch, name, sizes in ODD_ATTENTION if arch == "sm_90"]
    for compiled in spinning:
        ptx = re.sub(r"\n\s*\.loc\b.*", "", compiled.asm["ptx"])  # triton 3.8 writes these into inline assembly as well
        assert len(re.findall(r"REACHED:\s*bar\.warp\.sync 0xffffffff", ptx)) == ptx.count("nanosleep") > 0
        assert "wgmma" in ptx
