"""No kernel is forgotten."""

import inspect
import pkgutil
from importlib import import_module

import tdkernels.ops
from tdkernels.lang.kernel import Kernel
from tests.compiled.attention import attention_launches
from tests.compiled.collectives import COLLECTIVES
from tests.compiled.dense import ACROSS_NODES, ONE_SHOT, PRODUCTS
from tests.compiled.dispatch import expert_launches
from tests.compiled.expert_gemm import expert_layer_launches, grouped_launches, sliced_launches
from tests.compiled.flash_decode import decode_launch
from tests.compiled.helper_kernels import small_launches, small_launches_across_nodes
from tests.compiled.targets import BF16, needs_no_gpu
from tests.compiled.ulysses import ulysses_launches

pytestmark = needs_no_gpu


def test_every_kernel_is_compiled_here():
    """Whoever adds a kernel adds its launch beside this. Device functions count through the kernels that call them."""
    of_experts = {
        kernel for local in (None, 4) for launches in expert_launches(local=local).values() for kernel, *_ in launches
    }
    of_groups = {kernel for kernel, *_ in grouped_launches("sm_90", BF16, "swiglu").values()}
    of_sliced = {kernel for kernel, *_ in sliced_launches("sm_90", BF16).values()}
    compiled = {*PRODUCTS, *ACROSS_NODES, *ONE_SHOT, *COLLECTIVES.values(), *small_launches()}
    compiled |= set(small_launches_across_nodes())
    of_ulysses = {kernel for kernel, *_ in ulysses_launches("sm_90", BF16).values()}
    of_layer = {kernel for kernel, *_ in expert_layer_launches("sm_90", BF16).values()}
    compiled |= of_experts | of_groups | of_sliced | of_ulysses | of_layer
    for nodes in (1, 2):
        compiled |= {kernel for kernel, *_ in decode_launch("one token", "sm_90", nodes=nodes)}
    compiled |= {kernel for kernel, *_ in attention_launches("sm_90", BF16).values()}
    found = set()
    for module in pkgutil.walk_packages(tdkernels.ops.__path__, "tdkernels.ops."):
        members = inspect.getmembers(import_module(module.name))
        found |= {value for name, value in members if isinstance(value, Kernel) and name.endswith("_kernel")}
    assert found == compiled
