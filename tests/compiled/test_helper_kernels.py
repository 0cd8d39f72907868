"""Compile the helper kernels: begin a call, push, wait, sum partials, merge."""

import pytest

from tests.compiled.helper_kernels import helper_launches, multinode_helper_launches
from tests.compiled.targets import needs_no_gpu
from tests.support.aot import SHARED_MEMORY, TARGETS, compile_for

pytestmark = needs_no_gpu


@pytest.mark.parametrize("arch", TARGETS)
def test_helper_kernels_compile(arch):
    for kernel, launches in helper_launches().items():
        for args, kwargs in launches:
            assert compile_for(kernel, args, kwargs, arch).metadata.shared <= SHARED_MEMORY[arch]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942", "gfx950"])
def test_helper_kernels_compile_for_several_nodes(arch):
    for kernel, (args, kwargs) in multinode_helper_launches().items():
        assert compile_for(kernel, args, kwargs, arch).metadata.shared <= 4096
