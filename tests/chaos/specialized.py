"""The warp-specialized kernels in the fault campaign: configs, shapes, expected results, and which kernels ran.

These kernels need Hopper GPUs and tiles of 128 x 256. So the operands are larger than those of the other problems, and
the GPU computes the expected results.
"""

import contextlib
import ctypes

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import MoeTpConfig
from tdkernels.lang.gluon_kernel import GluonKernel
from tdkernels.ops.common.tile_config import LARGE
from tdkernels.ops.dense.launch_direct import DIRECT_LARGE
from tests.support.dense_oracle import DIVIDED, GRADIENTS, SIZES, Case, _unsharded, whole_shape
from tests.support.ranks import DEVICE, device

_DIRECT = {"transport": "direct", "tiles": DIRECT_LARGE, "warp_specialize": True}
_GATHERED = {"tiles": LARGE, "chunk_tiles": 2, "warp_specialize": True}
# The problems of dense operators: operator, changes to the config, whether the last tiles are split along K.
DENSE = {
    "ag_gemm specialized push": ("ag_gemm", {**_GATHERED, "transport": "push"}, False),
    "ag_gemm specialized copy_engine": ("ag_gemm", {**_GATHERED, "transport": "copy_engine"}, False),
    "gemm_rs specialized": ("gemm_rs", _DIRECT, False),
    "gemm_rs specialized, split K": ("gemm_rs", _DIRECT, True),
    "gemm_ar specialized": ("gemm_ar", {**_DIRECT, "exchange": "two_shot"}, False),
    "gemm_ar specialized, split K": ("gemm_ar", {**_DIRECT, "exchange": "two_shot"}, True),
}
# M of the whole problem, rounded down to a multiple of the ranks; n and k of a rank. The last one has more than a wave
# of tiles on a GPU with 132 SMs, and with ag_gemm several slices of K.
SHAPES = [(260, 272, 200), (390, 272, 200), (200, 528, 72), (1040, 3600, 2056)]
# The last wave of these is split along K with 2, 3, 4 and 8 ranks. With the last shape that is the second wave.
SPLIT_SHAPES = [(260, 272, 3200), (390, 272, 3200), (200, 528, 4104), (1500, 3072, 4096)]
EXPERTS_CONFIG = MoeTpConfig(tiles=LARGE, num_comm_sms=5, chunk_rows=32, stages=2, warp_specialize=True)
EXPERTS_SHAPES = [(70, 264, 136), (75, 264, 136), (40, 512, 72), (200, 1032, 264)]  # tokens, width, hidden of a rank
_STANDARD_DEVIATION = 24.0  # of results: a bf16 represents integers up to 256


def on_hopper():
    """Return whether the kernels run on a Hopper GPU. Do not initialize CUDA, so that the process can be forked."""
    if DEVICE != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return False
    major, minor, handle = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        failed = (
            nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
            or nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
        )
    except (OSError, AttributeError):
        failed = True
    return torch.cuda.get_device_capability() == (9, 0) if failed else (major.value, minor.value) == (9, 0)


def shape_of(operator, split, number, world_size):
    """Return rows, n and k of a rank, as ``Case`` takes them."""
    m, n, k = (SPLIT_SHAPES if split else SHAPES)[number]
    return m if operator == "gemm_ar" else m // world_size, n, k


@contextlib.contextmanager
def gluon_launches():
    """Return a list of (name, number of splits of K) of the kernels in Gluon that are launched in a ``with`` block."""
    found, launch_bound = [], GluonKernel.launch_bound

    def launch(kernel, bound_launch, values, *args):
        named = dict(zip(kernel.arg_names, bound_launch.filled(values), strict=False))
        found.append((kernel.__name__, named.get("num_splits", 1)))
        return launch_bound(kernel, bound_launch, values, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GluonKernel, "launch_bound", launch)
        yield found


class SparseCase(Case):
    """A Case with long sums that are exact in bf16: the longer they are, the more elements of the operands are 0.

    The device computes the expected results, and compares them.
    """

    def __init__(self, operator, rows, n, k, seed):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.operator, self.dtype, self.divided = operator, torch.bfloat16, DIVIDED[operator]
        self.title = f"{operator} rows={rows} n={n} k={k} rank {self.rank} of {self.world_size}"
        sizes = dict(zip("MNK", whole_shape(operator, rows, n, k, self.world_size), strict=True))
        share = min(2 / 3, _STANDARD_DEVIATION / max(sizes.values()) ** 0.5)  # of the elements that are not 0
        generator = torch.Generator(device()).manual_seed(seed)

        def draw(name):
            shape = [sizes[size] for size in SIZES[name]]
            uniform = torch.rand(shape, generator=generator, device=device())
            return (uniform < share / 2).float() - (uniform >= 1 - share / 2).float()

        operands, dy = {name: draw(name) for name in GRADIENTS}, draw("output")
        results = _unsharded(operands, dy)
        largest = max(result.abs().max().item() for result in results.values())
        assert largest <= 256, f"{self.title}: {largest} may not be exact in bf16"
        own = {name: part.to(self.dtype).clone(memory_format=torch.contiguous_format)
               for name, part in self.own_parts({**operands, **results, "dy": dy}).items()}
        self.x, self.weight, self.bias = (own[name].requires_grad_() for name in GRADIENTS)
        self.dy, self.expected = own["dy"], {name: own[name].detach() for name in results}

    def check(self, results):
        tdkernels.synchronize()  # raises the error of a kernel before its result is compared
        for name, got in results.items():
            wrong = (got != self.expected[name]).sum().item()  # a NaN is unequal, too
            assert wrong == 0, f"{wrong} of {got.numel()} elements of {name} of {self.title} are wrong"
