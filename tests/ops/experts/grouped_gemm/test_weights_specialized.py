"""The warp-specialized kernel of the weight gradient of group_gemm, on Hopper; its config on other devices."""

import pytest
import torch

from tdkernels import GroupGemmConfig
from tdkernels.ops.common.tile_config import LARGE
from tdkernels.ops.experts.grouped_gemm import launch_weights
from tdkernels.runtime import gpu
from tests.ops.dense.specialized_protocol import source_of
from tests.ops.dense.specialized_support import ON_HOPPER, on_hopper
from tests.ops.dense.test_specialized_protocol import EARLY, OF_ALL, SEEDS
from tests.ops.experts.grouped_gemm import weights_specialized_cases as cases
from tests.ops.experts.grouped_gemm.weights_specialized_run import WeightsRun
from tests.support.mutants import check_found
from tests.support.ranks import on_ranks

BF16, FP16 = torch.bfloat16, torch.float16


@on_hopper
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_values(dtype):
    on_ranks(1, cases.computes, dtype, [(272, 72), (512, 1024), (16, 8), (784, 200)])


@on_hopper
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_other_groups(value):
    on_ranks(1, cases.keeps_groups_apart, value)


@on_hopper
@pytest.mark.parametrize("splits", [[1], [300], [7, 0, 20], [64], [0, 1]], ids=str)
def test_few_rows(splits):
    on_ranks(1, cases.computes_few_rows, splits)


@on_hopper
@pytest.mark.parametrize("splits", [[200, 100, 3], [-5, 70, 0, 71], [1 << 40, 1], [0, 0]], ids=str)
def test_invalid_splits(splits):
    on_ranks(1, cases.cuts_off_splits, splits)


@on_hopper
def test_graph():
    on_ranks(1, cases.replays_in_a_graph)


@on_hopper
@pytest.mark.parametrize("n, k", [(132, 64), (64, 132)])
def test_unsupported_operands(n, k):
    on_ranks(1, cases.falls_back, n, k, BF16)


@on_hopper
def test_default():
    on_ranks(1, cases.is_the_default)


@pytest.mark.parametrize("rows, n, k, experts, dtype, specialized", [
    (32768, 8192, 4096, 32, BF16, True), (12288, 1408, 2048, 64, FP16, True), (8192, 8192, 8192, 1, BF16, True),
    (12288, 1408, 2048, 64, torch.float32, False), (12288, 1400, 2048, 64, BF16, False),  # N % 16 > 0
    (12288, 512, 512, 16, BF16, False), (64, 1408, 2048, 65, BF16, True),  # 128 tiles; groups without rows
])
def test_default_config(monkeypatch, rows, n, k, experts, dtype, specialized):
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu, "has_tma", lambda device: True)
    problem = rows, n, k, experts, dtype, torch.device("cuda", 0)
    config = launch_weights.default_config(*problem)
    assert config.warp_specialize == specialized and (config.tiles == LARGE or not specialized)
    for flag in (False, True):
        config = launch_weights.completed(GroupGemmConfig(warp_specialize=flag), *problem)
        is_large = flag and specialized or rows // experts >= 4096
        assert config.warp_specialize == flag and (config.tiles == LARGE) == is_large
    assert launch_weights.completed(GroupGemmConfig(tiles=LARGE), *problem) == GroupGemmConfig(tiles=LARGE)


@pytest.mark.skipif(ON_HOPPER, reason="for other devices")
def test_other_devices():
    on_ranks(1, cases.falls_back, 24, 40, BF16)


# ---- the barriers, on the CPU and in random order ----


@pytest.mark.parametrize("items", [0, 1, 2, 5, 9])
def test_in_any_order(items):
    for seed in range(SEEDS):
        WeightsRun(seed, items)()


_ZERO = (
    "        fence_async_shared()\n        partition_barrier()\n"
    "        mbarrier.arrive(bars.index(FULL + stage), count=1)\n"
)
_AWAIT = "        mbarrier.wait(bars.index(LAST + stage), (phases >> stage) & 1)\n"
_ARRIVE = "    mbarrier.arrive(bars.index(OUT_FULL), count=1)\n    return"
MUTANTS = OF_ALL | {
    "a store is not fenced": ("    fence_async_shared()\n" + _ARRIVE, _ARRIVE),
    EARLY: ("            tma.store_wait(0)\n", ""),
    "the last rows are not waited for": (_AWAIT, ""),
    "a wait for the last rows is one of an earlier step": ("        phases ^= 1 << stage\n", ""),
    "all stages have the same phase": ("        phases ^= 1 << stage\n", "        phases ^= 15\n"),
    "zeros are not fenced": (_ZERO, _ZERO.replace("        fence_async_shared()\n", "")),
    "some rows are not set to zero": ("if (first + _ROWS > count) &", "if (first >= count) &"),
    "the last rows are not set to zero": ("& (first < multiplied):", "& (first < multiplied - _ROWS):"),
    "the number of rows is that of another tile": ("before, multiplied_before, phases)\n            before", (
        "before, multiplied, phases)\n            before"
    )),
    "rows of the group are not multiplied": ("gl.where(count <= 32, 32, STEP)", "gl.where(count <= 33, 32, STEP)"),
    "the first step is multiplied in parts": ("gl.where(steps > 1, few, STEP)", "few"),
    "the second step is multiplied twice": ("gl.minimum(steps - 1 if IN_PARTS else steps,", "gl.minimum(steps,"),
    "the last step is multiplied twice": ("range(EARLY_STEPS, steps - 1 if IN_PARTS else steps)", (
        "range(EARLY_STEPS, steps)"
    )),
    "x is not set to zero": ("                _keep_rows(memory[1].index(stage), first, count)\n", ""),
    "the last step arrives before its zeros": (_AWAIT, _AWAIT + _ZERO.splitlines(True)[2]),
    "the last step of all is not passed on": (
        "    _finish_step(memory, bars, turn + STAGES - 1, before, multiplied_before, phases)\n    end_items",
        "    end_items",
    ),
    "another step is finished": ("turn + STAGES - 1, before, multiplied_before, phases)\n            before", (
        "turn, before, multiplied_before, phases)\n            before"
    )),
    "a group without rows has no step": ("gl.maximum((end - begin + STEP - 1) // STEP, 1)", "(end - begin) // STEP"),
    "whole groups have a further step": ("(end - begin + STEP - 1) // STEP", "(end - begin) // STEP + 1"),
}

@pytest.mark.parametrize("mutant", MUTANTS)
def test_errors_are_found(mutant):
    check_found(lambda seed, source: WeightsRun(seed, 6, source), source_of(*WeightsRun.partitions), MUTANTS[mutant])
