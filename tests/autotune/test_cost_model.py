"""Cost model: estimates respect the hardware floors and order the candidates correctly."""

from dataclasses import replace

import pytest
import torch

from tdkernels import Tiles
from tdkernels.autotune.hardware import _MEASURED, Hardware
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable
from tests.support.dense_oracle import OPERATORS

H200 = Hardware(*_MEASURED["NVIDIA H200"], num_sms=132, measured=True)
GPU = torch.device("cuda", 0)
SHAPES = [(2, 64, 64, 64), (4, 8192, 57344, 8192), (8, 512, 8192, 28672), (3, 99, 51, 303)]
# M and N are not divisible by the number of ranks; only operators that shard K alone accept it.
EXTRA_SHAPES = {"gemm_ar": [(4, 1, 8191, 28672)]}


def configs_of(op, problem):
    return [*op.space(problem, GPU), op.default(problem, GPU), op.plain()]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_no_estimate_is_below_the_floors_and_a_slower_link_never_helps(fake_h200, operator, dtype):
    op = tunable(operator)
    slower = replace(H200, link=H200.link / 4)
    for world_size, *shape in SHAPES + EXTRA_SHAPES.get(operator, []):
        problem = Problem(operator, "NVIDIA H200", world_size, world_size, dtype, "nk", tuple(shape))
        assert op.why_not(problem) is None
        floors = op.floors(problem)
        floor_ms = max(floors.flops / H200.flops, floors.wire_bytes / H200.link) * 1e3
        configs = configs_of(op, problem)
        assert len(configs) > 5 and all(op.illegal(config, problem, GPU) is None for config in configs)
        for config in configs:
            estimate = op.estimate_ms(config, problem, H200)
            assert floor_ms <= estimate < 1e6, f"{config} for {problem}"
            assert estimate <= op.estimate_ms(config, problem, slower), f"{config} for {problem}"


@pytest.mark.parametrize("operator", OPERATORS)
def test_communication_bound_problem_takes_longer_with_a_slower_link(fake_h200, operator):
    op = tunable(operator)
    shape = (8192, 512, 8192) if operator == "ag_gemm" else (8192, 8192, 512)
    problem = Problem(operator, "NVIDIA H200", 4, 4, "bfloat16", "nk", shape)
    for config in configs_of(op, problem):
        slow_ms = op.estimate_ms(config, problem, replace(H200, link=H200.link / 2))
        assert 1.3 < slow_ms / op.estimate_ms(config, problem, H200) <= 2.0, config


@pytest.mark.parametrize("operator", OPERATORS)
def test_doubling_a_size_takes_longer(fake_h200, operator):
    op = tunable(operator)
    shape = (8192, 8192, 8192)
    small = Problem(operator, "NVIDIA H200", 4, 4, "bfloat16", "nk", shape)
    for number in range(3):
        large = replace(small, shape=tuple(size * (1 + (i == number)) for i, size in enumerate(shape)))
        for config in configs_of(op, small):
            assert op.estimate_ms(config, large, H200) > op.estimate_ms(config, small, H200), config


def test_one_shot_is_faster_for_small_m(fake_h200):
    """One-shot sends more bytes than two-shot but synchronizes once instead of twice."""
    op = tunable("gemm_ar")
    faster = {}
    for m in (1, 8192):
        problem = Problem("gemm_ar", "NVIDIA H200", 8, 8, "bfloat16", "nk", (m, 8192, 8192))
        default = op.default(problem, GPU)
        faster[m] = min(
            ("one_shot", "two_shot"),
            key=lambda exchange: op.estimate_ms(replace(default, exchange=exchange), problem, H200),
        )
    assert faster == {1: "one_shot", 8192: "two_shot"}


@pytest.mark.parametrize("operator, world_size, shape, columns, suits", [
    ("gemm_rs", 2, (512, 10240, 8192), 256, False),  # 160 tiles for 132 SMs; the default has 320
    ("gemm_ar", 2, (512, 10240, 8192), 256, False), ("gemm_rs", 2, (512, 8192, 8192), 256, True),
    ("gemm_rs", 2, (128, 10240, 8192), 256, True), ("ag_gemm", 4, (8192, 4096, 12288), 128, True),
    ("ag_gemm", 2, (512, 8192, 28672), 256, False),
])
def test_suits_rejects_tiles_that_underfill_the_gpu(fake_h200, operator, world_size, shape, columns, suits):
    op = tunable(operator)
    problem = Problem(operator, "NVIDIA H200", world_size, world_size, "bfloat16", "nk", shape)
    default = op.default(problem, GPU)
    config = replace(default, tiles=Tiles(128, columns, 64), warp_specialize=False)
    assert op.suits(config, problem, GPU) == suits
    assert op.suits(op.plain(), problem, GPU) and op.suits(default, problem, GPU)
