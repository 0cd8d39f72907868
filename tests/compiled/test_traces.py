"""Compile kernels with and without a trace, and the clock synchronization kernels."""

import re

import pytest
import torch

from tdkernels.ops.attention.ag_attention import kernel as ag_attention_kernel
from tdkernels.ops.attention.flash_decode.kernel import flash_decode_kernel
from tdkernels.ops.attention.ulysses import kernel_out, kernel_qkv
from tdkernels.ops.experts.tp_moe import kernel_ag_gemm, kernel_gemm_rs
from tdkernels.trace import clocks
from tests.compiled.attention import attention_launches
from tests.compiled.dense import GEMM_KERNELS, ONE_SHOT_KERNELS, compile_gemm, compile_one_shot
from tests.compiled.expert_gemm import tp_moe_launches
from tests.compiled.flash_decode import decode_launch
from tests.compiled.targets import BF16, compile_launches, needs_no_gpu
from tests.compiled.ulysses import ulysses_launches
from tests.support.aot import TARGETS, compile_for, pointer
from tests.support.simulated_nodes import thorough

pytestmark = needs_no_gpu

TRACED_LAUNCHES = {
    ag_attention_kernel.ag_attention_kernel: lambda arch: attention_launches(arch, BF16)["attention"],
    flash_decode_kernel: lambda arch: decode_launch("one token", arch)[0],
    kernel_ag_gemm.moe_ag_gemm_kernel: lambda arch: tp_moe_launches(arch, BF16)["rows, swiglu"],
    kernel_gemm_rs.moe_gemm_rs_kernel: lambda arch: tp_moe_launches(arch, BF16)["sums"],
    kernel_out.ulysses_out_kernel: lambda arch: ulysses_launches(arch, BF16)["out"],
    kernel_qkv.ulysses_qkv_kernel: lambda arch: ulysses_launches(arch, BF16)["qkv"],
}
each_traced_kernel = pytest.mark.parametrize(
    "kernel", [*GEMM_KERNELS, *ONE_SHOT_KERNELS, *TRACED_LAUNCHES], ids=lambda k: k.__name__
)


def compile_any(kernel, arch, **constants):
    if kernel in ONE_SHOT_KERNELS:
        return compile_one_shot(kernel, arch, BF16, split=2, **constants)
    if kernel in TRACED_LAUNCHES:
        _, args, options = TRACED_LAUNCHES[kernel](arch)
        (compiled,) = compile_launches([(kernel, args, {**options, **constants})], arch)
        return compiled
    return compile_gemm(kernel, arch, BF16, **constants)


# The code of a trace is the same for all targets of a vendor.
@each_traced_kernel
@pytest.mark.parametrize("arch", [
    "sm_90", "gfx942", *(pytest.param(arch, marks=thorough) for arch in ("sm_80", "sm_100", "gfx950")),
])
def test_traced_kernels_compile(kernel, arch):
    compile_any(kernel, arch, trace_ptr=pointer(torch.int64))


@each_traced_kernel
def test_untraced_kernels_contain_no_trace_code(kernel):
    """Without a trace only waits read the clock, twice each, and the SM id is never read."""
    ptx = compile_any(kernel, "sm_90").asm["ptx"]
    assert ptx.count("globaltimer") == 2 * ptx.count("nanosleep") > 0
    assert "%smid" not in ptx
    traced = compile_any(kernel, "sm_90", trace_ptr=pointer(torch.int64)).asm["ptx"]
    marks = traced.count("%smid")
    assert marks >= 6 and traced.count("globaltimer") == 2 * traced.count("nanosleep") + marks
    assert traced.count("nanosleep") > 0


@pytest.mark.parametrize("kernel", GEMM_KERNELS, ids=lambda k: k.__name__)
def test_clock_is_read_after_the_gemm_is_done(kernel):
    ptx = compile_gemm(kernel, "sm_90", BF16, trace_ptr=pointer(torch.int64)).asm["ptx"]
    waits = [done.end() for done in re.finditer(r"wgmma\.wait_group\.sync\.aligned 0;", ptx)]
    # A pipelined loop may end with a wait that finds nothing to wait for, and control leaves.
    next_of_interest = re.compile(r"bar\.sync|globaltimer|bra\.uni|\n\$L__BB")
    following = [found.group() for end in waits if (found := next_of_interest.search(ptx, end))]
    assert "bar.sync" in following and "globaltimer" not in following


@pytest.mark.parametrize("arch", TARGETS)
def test_clock_kernels_compile(arch):
    ctx = pointer(torch.int64)
    compile_for(clocks.meet_kernel, [ctx, 3_000_000], {"num_warps": 1}, arch)
    compile_for(clocks.clocks_kernel, [ctx, pointer(torch.int64), 32], {"num_warps": 1}, arch)
