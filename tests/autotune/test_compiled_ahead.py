"""Ahead-of-time compilation in the tuner produces the kernels that a call launches.

Otherwise a call would compile again while the peers wait. tests/compiled checks that the launches compile.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable
from tdkernels.ops.attention.ag_attention import launch as ag_attention_launch
from tdkernels.ops.attention.ag_attention.vendor_attention import KERNELS
from tdkernels.ops.attention.flash_decode import launch as flash_decode_launch
from tdkernels.ops.attention.flash_decode import launch_split as flash_decode_launch_split
from tdkernels.ops.attention.ulysses import launch_out as ulysses_launch_out
from tdkernels.ops.common import gemm_operands
from tdkernels.runtime import gpu
from tests.autotune.attention_support import LAUNCHERS, OPERATORS
from tests.support.aot import SHARED_MEMORY, recorded_launches, specialised

ARCH, GPU, CPU = "sm_90", torch.device("cuda", 0), torch.device("cpu")
# (ranks, nodes, layout, sizes), with and without the alignment that TMA needs.
PROBLEMS = {
    "ag_attention": [
        (4, 1, "causal zigzag", (1, 512, 4, 2, 64, 32)), (2, 1, "full", (2, 66, 2, 1, 33, 17)),
    ],
    "flash_decode": [
        (1, 1, "dense", (3, 1, 4, 2, 64, 64, 64)), (2, 1, "paged", (2, 1, 4, 2, 48, 16, 40)),
        (4, 2, "dense latent fp8", (2, 3, 4, 1, 96, 64, 33)), (2, 1, "paged fp8", (1, 1, 4, 2, 64, 64, 32)),
    ],
    "ulysses_out": [(4, 1, "nk", (512, 64, 512)), (2, 1, "kn", (66, 34, 30))],
    "ulysses_qkv": [(4, 1, "nk", (512, 512, 64)), (2, 1, "kn", (66, 34, 30))],
}


@contextlib.contextmanager
def simulated_gpu(operator, ranks, nodes):
    """Make the launcher of an operator treat CPU tensors as GPU tensors, and record its launches."""
    gathered = {module: name for module, name in (
        (ag_attention_launch, "gathered_descriptor"), (ulysses_launch_out, "_gathered_descriptor")
    )}

    def without_workspace(real):
        """There is no symmetric memory here: build the descriptor without a workspace."""
        return lambda workspace, *args: real(None, *args)

    modules = LAUNCHERS[operator], flash_decode_launch_split
    with pytest.MonkeyPatch.context() as patch, recorded_launches(modules, ranks, nodes) as launches:
        for module in (gpu, gemm_operands):
            patch.setattr(module, "has_tma", lambda device: True)
        patch.setattr(gpu, "capability", lambda device: (9, 0))
        patch.setattr(gpu, "num_sms", lambda device: 132)
        patch.setattr(gpu, "resident_programs", lambda device, tiles, dtype, registers=1: 132)
        patch.setattr(gpu, "shared_memory_bytes", lambda device: SHARED_MEMORY[ARCH])
        patch.setattr(ulysses_launch_out, "_push_bytes", lambda device: 32 << 10)
        patch.setattr(flash_decode_launch_split, "supports", lambda *call: True)
        patch.setattr(flash_decode_launch, "fp8_kind", lambda cache: int(cache.dtype == torch.float8_e4m3fn))
        for module, name in gathered.items():
            patch.setattr(module, name, without_workspace(getattr(module, name)))
        yield launches


def triton_configs(op, problem):
    """Return the configs of the space that launch a Triton kernel; ag_attention also has vendor kernels."""
    space = op.space(problem, GPU)
    assert {config.method for config in space if op.compiled(config) is None} <= set(KERNELS)
    return [config for config in space if op.compiled(config) is not None]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_call_launches_the_precompiled_kernel(operator, dtype):
    op = tunable(operator)
    for ranks, nodes, layout, sizes in PROBLEMS[operator]:
        problem = Problem(operator, "NVIDIA H200", ranks, ranks // nodes, dtype, layout, sizes)
        group = SimpleNamespace(size=lambda ranks=ranks: ranks, rank=lambda: 1)
        with simulated_gpu(operator, ranks, nodes) as launches, torch.no_grad():
            assert op.why_not(problem) is None
            operands = op.operands(problem, CPU, torch.Generator().manual_seed(1))
            kernels = {op.compiled(config): config for config in triton_configs(op, problem)}
            assert len(kernels) > 2
            for config in kernels.values():
                launches.clear()
                op.compile(operands, problem, config)
                op.run(operands, problem, group, config)
                if (operator, config.method) == ("flash_decode", "split"):
                    launches.pop()  # the second launch of a call, which is not compiled ahead
                ahead, launched = (specialised(*launch, ARCH) for launch in launches)
                assert launches[0][0] is launches[1][0] and ahead == launched, f"{config} for {problem}"


@pytest.mark.parametrize("operator", OPERATORS)
def test_each_kernel_is_compiled_once(operator):
    """Configs with equal ``op.compiled`` share a specialization; others do not."""
    op = tunable(operator)
    ranks, _, layout, sizes = PROBLEMS[operator][0]
    problem = Problem(operator, "NVIDIA H200", ranks, ranks, "bfloat16", layout, sizes)
    with simulated_gpu(operator, ranks, 1) as launches:
        operands = op.operands(problem, CPU, torch.Generator().manual_seed(1))
        compiled = {}
        for config in triton_configs(op, problem):
            launches.clear()
            op.compile(operands, problem, config)
            compiled.setdefault(op.compiled(config), []).append(specialised(*launches[0], ARCH))
    for same in compiled.values():
        assert all(each == same[0] for each in same)
    representatives = [same[0] for same in compiled.values()]
    assert all(one != other for number, one in enumerate(representatives) for other in representatives[:number])
