"""Compile the multi-node kernels of the dense operators."""

import re

import pytest

from tdkernels.ops.dense.ag_gemm.kernel_multinode import ag_gemm_nodes_kernel
from tdkernels.ops.dense.gemm_ar.kernel_multinode import gemm_ar_nodes_kernel
from tests.compiled.dense import MULTINODE_KERNELS, compile_gemm
from tests.compiled.targets import BF16, FP16, FP32, needs_no_gpu
from tests.support.aot import assemble, narrow, product_loops, without_machine_code

pytestmark = needs_no_gpu

each_multinode_kernel = pytest.mark.parametrize("kernel", MULTINODE_KERNELS, ids=lambda k: k.__name__)


# These two NVIDIA targets take all code paths.
@pytest.mark.parametrize("arch, dtype, local", [
    ("sm_80", FP32, 2), ("sm_90", BF16, 1), ("gfx942", BF16, 2), ("gfx950", FP16, 1),
], ids=str)
@each_multinode_kernel
def test_multinode_gemm_kernels_compile(kernel, arch, dtype, local):
    compile_gemm(kernel, arch, dtype, bias=local == 1, w_is_kn=local == 1, nodes=3, local=local)
    if arch == "sm_90":
        with without_machine_code():
            compile_gemm(kernel, arch, dtype, shape=(1, 1, 1), local=local)


@pytest.mark.parametrize("kernel, nodes", [
    *((kernel, 2) for kernel in MULTINODE_KERNELS), (gemm_ar_nodes_kernel, 3),
], ids=lambda value: getattr(value, "__name__", str(value)))
def test_multinode_gemm_kernels_on_hopper(kernel, nodes):
    ptx = compile_gemm(kernel, "sm_90", BF16, nodes=nodes).asm["ptx"]
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx and "mma.sync" not in ptx
    assert not narrow(ptx)
    assert "ld.global.v2.b64" in ptx and "st.global.v2.b64" in ptx  # the copies to peers
    # All threads have stored their data before the network reads it.
    put = ptx.index("call.uni nvshmemx_putmem_signal_nbi_block")
    published = ptx.rindex("fence.acq_rel.sys", 0, put)
    assert re.search(r"st\.global\.v2\.b64|st\.global\.v4\.b32", ptx[:published]) and "bar.sync" in ptx[published:put]
    # Received data is read after NVSHMEM's wait. TMA reads it after a fence that follows the wait.
    wait = ptx.rindex("call.uni nvshmem_signal_wait_until")
    if kernel is ag_gemm_nodes_kernel:
        fence = ptx.index("fence.proxy.async.global", wait)
        assert "cp.async.bulk.tensor" not in ptx[wait:fence] and "cp.async.bulk.tensor" in ptx[fence:]
    else:
        assert re.search(r"ld\.global\.v2\.b64|ld\.global\.v4\.b32", ptx[wait:])
    ptxas_log, code = assemble(ptx)
    assert "serialized" not in ptxas_log, "the wgmma instructions are serialized"
    main_loop = min(product_loops(code), key=len)
    assert not any(re.search(r"\b(LDL|STL)\b", text) for text in main_loop), ptxas_log


def test_multinode_ag_gemm_with_fixed_half_compiles():
    compile_gemm(ag_gemm_nodes_kernel, "sm_80", BF16, FIXED_HALF=True)
