"""Every kernel of the package is compiled by some test of this folder."""

import inspect
import pkgutil
from importlib import import_module

import tdkernels.ops
from tdkernels.lang.gluon_kernel import GluonKernel
from tdkernels.lang.kernel import Kernel
from tests.compiled.all_reduce_norm import EXCHANGES, norm_launch
from tests.compiled.attention import attention_launches
from tests.compiled.collectives import COLLECTIVES
from tests.compiled.dense import GEMM_KERNELS, MULTINODE_KERNELS, ONE_SHOT_KERNELS
from tests.compiled.dispatch import dispatch_launches
from tests.compiled.expert_gemm import ep_moe_launches, grouped_launches, tp_moe_launches
from tests.compiled.flash_decode import decode_launch, split_launches
from tests.compiled.gemm_ar_norm import gemm_ar_norm_kernel
from tests.compiled.gluon_kernels import gluon_launches
from tests.compiled.helper_kernels import helper_launches, multinode_helper_launches
from tests.compiled.quantize import quantize_launches
from tests.compiled.targets import BF16, needs_no_gpu
from tests.compiled.ulysses import ulysses_launches
from tests.compiled.wire import wire_launches

pytestmark = needs_no_gpu


def test_every_kernel_is_compiled():
    """If this fails, add a launch of the new kernel. Device functions are covered by the kernels that call them."""
    dispatch_kernels = {
        kernel for local in (None, 4) for launches in dispatch_launches(local=local).values() for kernel, *_ in launches
    }
    grouped_kernels = {kernel for kernel, *_ in grouped_launches("sm_90", BF16, "swiglu").values()}
    tp_moe_kernels = {kernel for kernel, *_ in tp_moe_launches("sm_90", BF16).values()}
    compiled = {*GEMM_KERNELS, *MULTINODE_KERNELS, *ONE_SHOT_KERNELS, *COLLECTIVES.values(), *helper_launches()}
    compiled |= {*multinode_helper_launches(), gemm_ar_norm_kernel}
    ulysses_kernels = {kernel for kernel, *_ in ulysses_launches("sm_90", BF16).values()}
    ep_moe_kernels = {kernel for kernel, *_ in ep_moe_launches("sm_90", BF16).values()}
    compiled |= dispatch_kernels | grouped_kernels | tp_moe_kernels | ulysses_kernels | ep_moe_kernels
    for nodes in (1, 2):
        compiled |= {kernel for kernel, *_ in decode_launch("one token", "sm_90", nodes=nodes)}
    compiled |= {kernel for kernel, *_ in split_launches("dense latent", "sm_90")}
    compiled |= {kernel for kernel, *_ in attention_launches("sm_90", BF16).values()}
    compiled |= {kernel for kernel, *_ in quantize_launches("sm_90").values()}
    compiled |= {kernel for kernel, *_ in wire_launches("sm_90", BF16, 8192)}
    compiled |= {norm_launch("sm_90", BF16, 4096, exchange)[0] for exchange in EXCHANGES}
    gluon_kernels = {kernel for kernel, *_ in gluon_launches()}
    found = set()
    for module in pkgutil.walk_packages(tdkernels.ops.__path__, "tdkernels.ops."):
        members = inspect.getmembers(import_module(module.name))
        kernels = {value for name, value in members if name.endswith("_kernel")}
        found |= {value for value in kernels if isinstance(value, (Kernel, GluonKernel))}
    assert {kernel for kernel in found if isinstance(kernel, GluonKernel)} == gluon_kernels
    assert found == compiled | gluon_kernels
