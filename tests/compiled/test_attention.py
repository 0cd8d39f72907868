"""ag_attention and its gradients."""

import re

import pytest

from tests.compiled.attention import ATTENTION, ODD_ATTENTION, compile_attention
from tests.compiled.targets import BF16, FP32, needs_no_gpu
from tests.support.aot import TARGETS, assemble, product_loops, unwritten

pytestmark = needs_no_gpu

# Another dtype is for one target of each vendor, sm_90 is asked more below, and of two targets that are compiled by
# the same ways each gets one of the gradients: to save time.
_ELSEWHERE = [("sm_80", ATTENTION[3]), ("sm_89", ATTENTION[2]), ("gfx942", ATTENTION[2]), ("gfx950", ATTENTION[3])]


@pytest.mark.parametrize("arch, name, dtype", [
    (arch, name, dtype) for arch in TARGETS for name in ATTENTION for dtype in (BF16, FP32)
    if dtype == BF16 and (arch != "sm_90" or name == "statistics") and (arch, name) not in _ELSEWHERE
    or dtype == FP32 and (arch, name) in (("sm_80", "gradients of k and v"), ("gfx942", "attention"))
], ids=str)
def test_attention_compiles(arch, name, dtype):
    compile_attention(name, arch, dtype)


@pytest.mark.parametrize("arch, name, sizes", ODD_ATTENTION, ids=str)
def test_attention_of_odd_sizes_compiles(arch, name, sizes):
    compile_attention(name, arch, **sizes)


@pytest.mark.parametrize("name", [name for name in ATTENTION if name != "statistics"])
def test_attention_on_hopper_uses_wgmma_and_tma(name):
    ptx = compile_attention(name, "sm_90", d=128, dv=128, rows=512).asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "mma.sync" not in ptx
    assert not re.search(r"(?:ld|st)\.global\.[bu]16\b", ptx), "single elements"
    assert "st.release.sys.global.b64" in ptx
    # Rows that peers have pushed are read by TMA, whose proxy has to be fenced after the wait.
    fence = ptx.index("fence.proxy.async.global", ptx.index("ld.acquire.sys"))
    assert ptx.find("cp.async.bulk.tensor", fence) > fence
    told, code = assemble(ptx)
    assert "serialized" not in told, "products would wait for each other"
    assert not unwritten(code)
    loops = product_loops(code)
    assert loops
    for loop in loops:
        # A tile that is too large shows here; how much is spilled elsewhere differs between compilers.
        spills = sum(re.search(r"\b(LDL|STL)\b", text) is not None for text in loop)
        assert spills < len(loop) / 8, f"{spills} of {len(loop)} instructions of a loop are spills\n{told}"


@pytest.mark.parametrize("d, dv", [(32, 16), (128, 32)])
def test_attention_on_hopper_knows_where_narrow_values_are(d, dv):
    """See ``widths_of`` in launch.py. The product of two of 16 rows each had the second from elsewhere."""
    _, code = assemble(compile_attention("attention", "sm_90", d=d, dv=dv, rows=37).asm["ptx"])
    assert any("HGMMA" in text for _, text in code)
    assert not unwritten(code)


def test_registers_that_nothing_has_written_are_found():
    code = [
        (0x00, "@P0 BRA 0x30 "), (0x10, "UMOV UR5, URZ "), (0x20, "UIADD3 UR4, UP0, UR5, 0x20, URZ "),
        (0x30, "R2UR UR6, R7 "), (0x40, "HGMMA.64x16x16.F32 R8, R4, gdesc[UR4].tnspB, R8 "),
        (0x50, "HGMMA.64x16x16.F32 R8, gdesc[UR4], R8 "), (0x60, "@!P1 BRA 0x30 "), (0x70, "EXIT "),
        (0x80, "UIADD3 UR9, UR9, 0x1, URZ "),
    ]
    # Only one way to the products goes through what writes UR4; UR7 has no way at all, and 0x80 is never reached.
    assert [address for address, _ in unwritten(code)] == [0x40, 0x50]
    assert [address for address, _ in unwritten([(0x00, "R2UR UR7, R7 "), *code[1:]])] == []
    # ELECT writes its second operand, and URZ is none.
    for written, found in (("UR62", []), ("URZ", [0x10])):
        elected = [(0x00, f"ELECT P0, {written}, PT "), (0x10, "MOV R4, UR62 "), (0x20, "EXIT ")]
        assert [address for address, _ in unwritten(elected)] == found
