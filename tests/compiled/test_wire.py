"""Compile the kernels of wire compression."""

import re

import pytest

from tests.compiled.targets import BF16, FP16, FP32, needs_no_gpu
from tests.compiled.wire import CONVERTING, wire_launches
from tests.support.aot import SHARED_MEMORY, TARGETS, compile_for, narrow

pytestmark = needs_no_gpu


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("dtype, k", [(BF16, 8192), (FP16, 384), (FP32, 1001)], ids=str)
def test_wire_kernels_compile(dtype, k, arch):
    for kernel, args, kwargs in wire_launches(arch, dtype, k):
        compiled = compile_for(kernel, args, kwargs, arch)
        assert compiled.metadata.shared <= SHARED_MEMORY[arch]
        if arch.startswith("sm"):
            assert (re.search(r"cvt\.\S*e4m3x2", compiled.asm["ptx"]) is not None) == (arch in CONVERTING)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_wire_kernels_use_16_byte_accesses(arch):
    """Elements and codes are moved 16 or 8 bytes at a time; only scales, one for 128 elements, are moved one by one."""
    # Triton 3.6 loads the scales of four parts twice in the last one.
    most = {
        "pack_rows_kernel": 1, "unpack_rows_kernel": 2, "add_quantized_parts_kernel": 4,
        "all_reduce_quantized_kernel": 14,
    }
    for kernel, args, kwargs in wire_launches(arch, BF16, 8192):
        ptx = compile_for(kernel, args, kwargs, arch).asm["ptx"]
        assert re.search(r"(?:ld|st)\.global\.v4\.b32|(?:ld|st)\.global\.v2\.b64", ptx), kernel
        assert not re.search(r"(?:ld|st)\.global\.[bu](?:8|16)\b", ptx), kernel
        assert len(narrow(ptx)) <= most[kernel.fn.__name__], narrow(ptx)
