"""The compilation in stages gives what ``triton.compile`` gives, and does not run more stages than needed."""

import torch
import triton
from triton.compiler import ASTSource

from tdkernels.trace import clocks
from tests.compiled.targets import needs_no_gpu
from tests.support import aot
from tests.support.stages import Compilation

pytestmark = needs_no_gpu


def compiled_by(compile_source, arch):
    """Compile a small kernel with a function of (source, target, options)."""
    launch = [aot.pointer(torch.int64), 3_000_000], {"num_warps": 1}
    options, *specialization = aot.specialised(clocks.meet_kernel, *launch, arch)
    return compile_source(ASTSource(clocks.meet_kernel, *specialization), aot.TARGETS[arch], options)


def test_results_are_those_of_triton():
    for arch, code in (("sm_90", "ptx"), ("gfx942", "amdgcn")):
        expected, found = compiled_by(triton.compile, arch), compiled_by(Compilation, arch)
        assert found.asm[code] == expected.asm[code]
        for name in ("shared", "name", "num_warps"):
            assert getattr(found.metadata, name) == getattr(expected.metadata, name)


def test_later_stages_run_on_demand():
    compiled = compiled_by(Compilation, "sm_90")
    assert compiled.metadata.num_warps == 1 and not compiled._results
    assert compiled.metadata.shared >= 0 and [*compiled._results] == ["ttir", "ttgir", "llir"]
    assert compiled.inline_assembly() and [*compiled._results][-1] == "llir"
    assert isinstance(compiled.asm["cubin"], bytes) and compiled.asm.get("hsaco") is None
    assert not hasattr(compiled.metadata, "absent")


def test_only_new_inline_assembly_is_assembled(monkeypatch):
    monkeypatch.setattr(aot, "_assembled", set())
    compiled = compiled_by(Compilation, "sm_90")
    assert aot._is_new(clocks.meet_kernel, "sm_90", compiled) and not aot._is_new(clocks.meet_kernel, "sm_90", compiled)
    assert aot._is_new(clocks.clocks_kernel, "sm_90", compiled), "another kernel"
    monkeypatch.setattr(compiled, "inline_assembly", lambda: {"trap;"})
    assert aot._is_new(clocks.meet_kernel, "sm_90", compiled), "new inline assembly"
