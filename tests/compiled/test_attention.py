"""Compile ag_attention and its gradients."""

import re

import pytest

from tests.compiled.attention import ATTENTION, ODD_ATTENTION, compile_attention
from tests.compiled.targets import BF16, FP32, needs_no_gpu
from tests.support.aot import TARGETS, assemble, machine_code, product_loops, unwritten

pytestmark = needs_no_gpu

# To save time, other dtypes are compiled for one target of each vendor, and two targets that take the same code paths
# compile one of the gradients each. There are more tests of sm_90 below.
_ELSEWHERE = [("sm_80", ATTENTION[3]), ("sm_89", ATTENTION[2]), ("gfx942", ATTENTION[2]), ("gfx950", ATTENTION[3])]


@pytest.mark.parametrize("arch, name, dtype", [
    (arch, name, dtype) for arch in TARGETS for name in ATTENTION for dtype in (BF16, FP32)
    if dtype == BF16 and (arch != "sm_90" or name == "statistics") and (arch, name) not in _ELSEWHERE
    or dtype == FP32 and (arch, name) in (("sm_80", "gradients of k and v"), ("gfx942", "attention"))
], ids=str)
def test_attention_compiles(arch, name, dtype):
    compile_attention(name, arch, dtype)


@pytest.mark.parametrize("arch, name, sizes", ODD_ATTENTION, ids=str)
def test_attention_with_odd_sizes_compiles(arch, name, sizes):
    compile_attention(name, arch, **sizes)


@pytest.mark.parametrize("name", [name for name in ATTENTION if name != "statistics"])
def test_attention_on_hopper_uses_wgmma_and_tma(name):
    ptx = compile_attention(name, "sm_90", d=128, dv=128, rows=512).asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "mma.sync" not in ptx
    assert not re.search(r"(?:ld|st)\.global\.[bu]16\b", ptx), "accesses single elements"
    assert "st.release.sys.global.b64" in ptx
    # TMA reads rows that peers have pushed, so its proxy must be fenced after the wait.
    fence = ptx.index("fence.proxy.async.global", ptx.index("ld.acquire.sys"))
    assert ptx.find("cp.async.bulk.tensor", fence) > fence
    ptxas_log, code = assemble(ptx)
    assert "serialized" not in ptxas_log, "the wgmma instructions are serialized"
    assert not unwritten(code)
    loops = product_loops(code)
    assert loops
    for loop in loops:
        # Too large a tile spills in the loop. Spills elsewhere differ between compiler versions.
        spills = sum(re.search(r"\b(LDL|STL)\b", text) is not None for text in loop)
        assert spills < len(loop) / 8, f"{spills} of {len(loop)} instructions of a loop are spills\n{ptxas_log}"


@pytest.mark.parametrize("d, dv", [(32, 16), (128, 32)])
def test_attention_with_narrow_values_reads_no_unwritten_registers(d, dv):
    """See ``widths_of`` in launch.py: ptxas took the address of the second 16 value rows from an unwritten register."""
    _, code = machine_code(compile_attention("attention", "sm_90", d=d, dv=dv, rows=37))
    assert any("HGMMA" in text for _, text in code)
    assert not unwritten(code)


def test_unwritten_registers_are_found():
    code = [
        (0x00, "@P0 BRA 0x30 "), (0x10, "UMOV UR5, URZ "), (0x20, "UIADD3 UR4, UP0, UR5, 0x20, URZ "),
        (0x30, "R2UR UR6, R7 "), (0x40, "HGMMA.64x16x16.F32 R8, R4, gdesc[UR4].tnspB, R8 "),
        (0x50, "HGMMA.64x16x16.F32 R8, gdesc[UR4], R8 "), (0x60, "@!P1 BRA 0x30 "), (0x70, "EXIT "),
        (0x80, "UIADD3 UR9, UR9, 0x1, URZ "),
    ]
    # UR4 is written on only one of the paths to the HGMMAs. UR7 is written on none, and 0x80 is unreachable.
    assert [address for address, _ in unwritten(code)] == [0x40, 0x50]
    assert [address for address, _ in unwritten([(0x00, "R2UR UR7, R7 "), *code[1:]])] == []
    # ELECT writes its second operand unless that is URZ.
    for written, expected in (("UR62", []), ("URZ", [0x10])):
        elected = [(0x00, f"ELECT P0, {written}, PT "), (0x10, "MOV R4, UR62 "), (0x20, "EXIT ")]
        assert [address for address, _ in unwritten(elected)] == expected
