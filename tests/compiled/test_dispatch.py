"""Dispatches and combines: where tokens go, and how they travel."""

import re

import pytest

from tests.compiled.dispatch import DIRECT, EVERYWHERE, MOVES, ROUTES, expert_launches
from tests.compiled.targets import FP16, FP32, compile_launches, needs_no_gpu
from tests.support.aot import TARGETS

pytestmark = needs_no_gpu


@pytest.mark.parametrize("name, arch", [
    (name, arch) for name in ROUTES + MOVES + DIRECT for arch in TARGETS if name in EVERYWHERE or arch == "sm_90"
])
def test_expert_parallel_compiles(name, arch):
    compile_launches(expert_launches()[name], arch)


@pytest.mark.parametrize("arch, sizes", [
    ("sm_90", dict(tokens=1, k=1, experts=1, ranks=1, width=1, dtype=FP16)),
    ("gfx942", dict(tokens=3, k=5, experts=6, ranks=3, width=13, dtype=FP32)),
], ids=["one", "odd"])
def test_expert_parallel_of_odd_sizes_compiles(arch, sizes):
    launches = expert_launches(**sizes)
    for name in EVERYWHERE:
        compile_launches(launches[name], arch)


# Between them these hold every function of the kernels.
@pytest.mark.parametrize("name, arch", [
    ("route", "sm_90"), ("route of many tokens", "sm_80"), ("dispatch, quantized", "sm_90"),
    ("dispatch again, with scales", "sm_80"), ("gradient of a combine", "sm_90"), ("combine per rank", "sm_90"),
    ("gradient of a dispatch", "sm_80"), ("combine per expert", "sm_90"),
    ("route of many tokens", "gfx942"), ("dispatch, quantized", "gfx950"), ("combine per expert", "gfx942"),
])
def test_expert_parallel_across_nodes_compiles(name, arch):
    *_, moves = compile_launches(expert_launches(local=4)[name], arch)
    if name in MOVES and arch.startswith("sm"):
        ptx = moves.asm["ptx"]
        for move in ("ld", "st"):
            assert len(re.findall(rf"{move}\.global\.v2\.b64|{move}\.global\.v4\.b32", ptx)) >= 6
            assert not re.search(rf"{move}\.global\.[bu]16\b", ptx), "single elements"
        for word in ("nvshmemx_putmem_signal_nbi_block", "nvshmemx_signal_op", "nvshmem_signal_wait_until"):
            assert re.search(rf"call\.uni[^;]*\b{word}\b", ptx), word


def test_expert_parallel_of_one_rank_a_node_compiles():
    launches = expert_launches(tokens=1, k=1, experts=3, ranks=3, width=1, dtype=FP16, local=1)
    for name in set(EVERYWHERE) - set(DIRECT):
        compile_launches(launches[name], "sm_90")


@pytest.mark.parametrize("name", MOVES + DIRECT)
def test_tokens_are_moved_sixteen_bytes_at_a_time(name):
    """What is narrower are ids, places and weights, of which there are few."""
    (compiled,) = compile_launches(expert_launches()[name], "sm_90")
    ptx = compiled.asm["ptx"]
    # finish stores six words. One that is direct has two places to store to, and two notes of five words to leave.
    least, words = (4, 14) if name in DIRECT else (6, 9)
    for move in ("ld", "st"):  # of a block each thread has four, or two of codes, wherever it is moved
        assert len(re.findall(rf"{move}\.global\.v2\.b64|{move}\.global\.v4\.b32", ptx)) >= least
        assert not re.search(rf"{move}\.global\.[bu]16\b", ptx), "single elements"
    assert len(re.findall(r"st\.global\.b64", ptx)) <= words, "single words"
    assert "ld.acquire.sys.global.b64" in ptx and "st.release.sys.global.b64" in ptx
