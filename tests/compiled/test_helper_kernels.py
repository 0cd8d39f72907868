"""Small kernels: they begin a call, push, wait, add parts or merge."""

import pytest

from tests.compiled.helper_kernels import small_launches, small_launches_across_nodes
from tests.compiled.targets import needs_no_gpu
from tests.support.aot import SHARED_MEMORY, TARGETS, compile_for

pytestmark = needs_no_gpu


@pytest.mark.parametrize("arch", TARGETS)
def test_small_kernels_compile(arch):
    for kernel, launches in small_launches().items():
        for args, kwargs in launches:
            assert compile_for(kernel, args, kwargs, arch).metadata.shared <= SHARED_MEMORY[arch]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942", "gfx950"])
def test_small_kernels_across_nodes_compile(arch):
    for kernel, (args, kwargs) in small_launches_across_nodes().items():
        assert compile_for(kernel, args, kwargs, arch).metadata.shared <= 4096
