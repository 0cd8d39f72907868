"""Compile the warp-specialized kernel of gemm_rs for Hopper."""

import re

import pytest

from tests.compiled.specialized import specialized_launch
from tests.compiled.targets import BF16, FP16, needs_no_gpu
from tests.support.aot import SHARED_MEMORY, assemble, compile_for, unwritten
from tests.support.simulated_nodes import thorough

pytestmark = needs_no_gpu


def compiled_for(*which):
    return compile_for(*specialized_launch(*which), "sm_90")


@pytest.mark.parametrize("ranks, dtype, w_is_kn, bias", [
    (8, BF16, False, False), (2, FP16, True, True), (4, BF16, False, True),
    pytest.param(3, FP16, False, False, marks=thorough), pytest.param(8, BF16, True, True, marks=thorough),
], ids=str)
def test_kernel_on_hopper(ranks, dtype, w_is_kn, bias):
    compiled = compiled_for(ranks, dtype, w_is_kn, bias)
    assert compiled.metadata.shared <= SHARED_MEMORY["sm_90"]
    ptx = compiled.asm["ptx"]
    report, code = assemble(ptx)
    assert "stack size" not in report  # no registers are spilled
    assert not unwritten(code)
    machine_code = "\n".join(instruction for _, instruction in code)
    # Per step and partition: four products of 16 columns of K, and one wait, which leaves the last step in flight.
    assert machine_code.count("HGMMA.64x256x16") == 8 and machine_code.count("WARPGROUP.DEPBAR.LE gsb0, 0x1") == 2
    assert "ldmatrix" not in ptx and "mma.sync" not in ptx


def test_signals_follow_their_tiles():
    """A signal is released after the wait for all TMA stores of the same warp, and a fence of the async proxy."""
    ptx = compiled_for(2, BF16).asm["ptx"]
    stores = re.findall(r"cp\.async\.bulk\.tensor\.3d\.global\.shared", ptx)
    assert len(stores) == 2 * 8  # eighths of a tile, for each rank
    (wait,) = re.finditer(r"cp\.async\.bulk\.wait_group 0; fence\.proxy\.async\.global;", ptx)
    (signal,) = re.finditer(r"bar\.warp\.sync 0xffffffff;[^{}]*@first st\.release\.sys\.global\.b64", ptx)
    assert wait.end() < signal.start() and not re.search("bra|BB", ptx[wait.end() : signal.start()])


def test_barriers_are_those_of_a_partition():
    """A barrier of all threads would wait for warps that never reach it."""
    ptx = compiled_for(2, BF16).asm["ptx"]
    first, last = ptx.index("setmaxnreg"), ptx.rindex("setmaxnreg")
    barriers = re.findall(r"bar\.sync\s+([^;]*);", ptx[first:last])
    assert barriers and all("," in barrier or barrier.strip() == "1" for barrier in barriers)
