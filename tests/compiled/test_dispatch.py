"""Compile routing, dispatch and combine."""

import re

import pytest

from tests.compiled.dispatch import ALL_TARGETS, LOW_LATENCY, ROUTES, TRANSFERS, dispatch_launches
from tests.compiled.targets import FP16, FP32, compile_launches, needs_no_gpu
from tests.support.aot import TARGETS, without_machine_code

pytestmark = needs_no_gpu


@pytest.mark.parametrize("name, arch", [
    (name, arch) for name in ROUTES + TRANSFERS + LOW_LATENCY for arch in TARGETS
    if name in ALL_TARGETS or arch == "sm_90"
])
def test_dispatch_compiles(name, arch):
    compile_launches(dispatch_launches()[name], arch)


@pytest.mark.parametrize("arch, sizes", [
    ("sm_90", dict(tokens=1, k=1, experts=1, ranks=1, width=1, dtype=FP16)),
    ("gfx942", dict(tokens=3, k=5, experts=6, ranks=3, width=13, dtype=FP32)),
], ids=["one", "odd"])
def test_dispatch_with_odd_sizes_compiles(arch, sizes):
    launches = dispatch_launches(**sizes)
    for name in ALL_TARGETS:
        compile_launches(launches[name], arch)


# Together these use every function of the kernels.
@pytest.mark.parametrize("name, arch", [
    ("route", "sm_90"), ("route of many tokens", "sm_80"), ("dispatch, quantized", "sm_90"),
    ("dispatch again, with scales", "sm_80"), ("gradient of a combine", "sm_90"), ("combine per rank", "sm_90"),
    ("gradient of a dispatch", "sm_80"), ("combine per expert", "sm_90"),
    ("route of many tokens", "gfx942"), ("dispatch, quantized", "gfx950"), ("combine per expert", "gfx942"),
])
def test_multinode_dispatch_compiles(name, arch):
    *_, moves = compile_launches(dispatch_launches(local=4)[name], arch)
    if name in TRANSFERS and arch.startswith("sm"):
        ptx = moves.asm["ptx"]
        for access in ("ld", "st"):
            assert len(re.findall(rf"{access}\.global\.v2\.b64|{access}\.global\.v4\.b32", ptx)) >= 6
            assert not re.search(rf"{access}\.global\.[bu]16\b", ptx), "accesses single elements"
        for function in ("nvshmemx_putmem_signal_nbi_block", "nvshmemx_signal_op", "nvshmem_signal_wait_until"):
            assert re.search(rf"call\.uni[^;]*\b{function}\b", ptx), function


def test_multinode_dispatch_with_one_rank_per_node_compiles():
    launches = dispatch_launches(tokens=1, k=1, experts=3, ranks=3, width=1, dtype=FP16, local=1)
    for name in sorted(set(ALL_TARGETS) - set(LOW_LATENCY)):
        with without_machine_code(name not in TRANSFERS):
            compile_launches(launches[name], "sm_90")


@pytest.mark.parametrize("name", TRANSFERS + LOW_LATENCY)
def test_dispatch_uses_16_byte_accesses(name):
    """Only ids, destination rows and weights use narrower accesses; there are few of them."""
    (compiled,) = compile_launches(dispatch_launches()[name], "sm_90")
    ptx = compiled.asm["ptx"]
    # `finish` stores six words. A low-latency dispatch stores to two places and has two host errors of five words.
    min_wide, max_single = (4, 14) if name in LOW_LATENCY else (6, 9)
    for access in ("ld", "st"):  # per copy of a block, four a thread; two if quantized
        assert len(re.findall(rf"{access}\.global\.v2\.b64|{access}\.global\.v4\.b32", ptx)) >= min_wide
        assert not re.search(rf"{access}\.global\.[bu]16\b", ptx), "accesses single elements"
    assert len(re.findall(r"st\.global\.b64", ptx)) <= max_single, "single words"
    assert "ld.acquire.sys.global.b64" in ptx and "st.release.sys.global.b64" in ptx
