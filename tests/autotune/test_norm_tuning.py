"""Tuning of all_reduce_rms_norm and all_reduce_layer_norm: search space and cost model."""

from dataclasses import replace

import pytest
import torch

from tdkernels import AllReduceNormConfig
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable
from tests.autotune.test_cost_model import GPU, H200

OPERATORS = "all_reduce_rms_norm", "all_reduce_layer_norm"


def problem_of(operator, rows, hidden, world_size=4, layout="rows", dtype="bfloat16"):
    return Problem(operator, "NVIDIA H200", world_size, world_size, dtype, layout, (rows, hidden))


def configs_of(op, problem):
    return [*op.space(problem, GPU), op.default(problem, GPU), op.invariant(problem, GPU), op.plain()]


@pytest.mark.parametrize("layout", ["rows", "fp8"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_configs_are_legal_and_estimates_respect_the_floors(fake_h200, operator, layout):
    op = tunable(operator)
    for rows, hidden, ranks in ((1, 4096, 8), (64, 8192, 4), (2048, 16384, 2), (7, 1000, 3), (3, 1, 2), (8, 40000, 8)):
        problem = problem_of(operator, rows, hidden, ranks, layout)
        assert op.why_not(problem) is None
        configs, floors = configs_of(op, problem), op.floors(problem)
        assert len(set(configs)) > 5 and all(op.illegal(config, problem, GPU) is None for config in configs)
        for config in configs:
            assert op.config_from_dict(op.config_to_dict(config)) == config
            estimate = op.estimate_ms(config, problem, H200)
            assert floors.computation_ms(H200) <= estimate and floors.wire_bytes / H200.link * 1e3 <= estimate < 1e4
            assert estimate <= op.estimate_ms(config, problem, replace(H200, link=H200.link / 4)), config


def test_floors_count_the_bytes_of_the_two_shot_exchange_and_of_the_operands():
    floors = tunable("all_reduce_rms_norm").floors(problem_of("all_reduce_rms_norm", 16, 8192))
    nbytes = 2 * 16 * 8192
    assert floors.wire_bytes == 2 * 3 * nbytes // 4 and floors.memory_bytes == 4 * nbytes
    in_fp8 = tunable("all_reduce_rms_norm").floors(problem_of("all_reduce_rms_norm", 16, 8192, layout="fp8"))
    assert in_fp8.wire_bytes == floors.wire_bytes and in_fp8.memory_bytes == 3.5 * nbytes


@pytest.mark.parametrize("operator", OPERATORS)
def test_space_covers_every_field(fake_h200, operator):
    configs = tunable(operator).space(problem_of(operator, 512, 8192), GPU)
    assert {config.exchange for config in configs} == {"one_shot", "two_shot"}
    for field in ("row_programs", "send_columns", "piece_rows", "num_programs", "num_warps"):
        assert len({getattr(config, field) for config in configs}) > 2, field
    assert len(configs) == len(set(configs)) < 400
    on_cpu = tunable(operator).space(problem_of(operator, 5, 48), torch.device("cpu"))
    assert 2 <= len(on_cpu) <= 4


def test_exchange_of_the_cheapest_config_depends_on_the_rows(fake_h200):
    op, cheapest = tunable("all_reduce_rms_norm"), {}
    for rows in (1, 4096):
        problem = problem_of("all_reduce_rms_norm", rows, 8192, world_size=8)
        cheapest[rows] = min(op.space(problem, GPU), key=lambda config: op.estimate_ms(config, problem, H200)).exchange
        assert op.default(problem, GPU).exchange == cheapest[rows]
    assert cheapest == {1: "one_shot", 4096: "two_shot"}


def test_invariant_config_does_not_depend_on_the_rows(fake_h200):
    op = tunable("all_reduce_rms_norm")
    for ranks, exchange in ((2, "one_shot"), (8, "two_shot")):
        for hidden, num_warps in ((8192, 16), (16384, 32)):
            problems = [problem_of("all_reduce_rms_norm", rows, hidden, ranks) for rows in (1, 64, 128, 4096)]
            found = {op.invariant(problem, GPU) for problem in problems}
            assert {(config.exchange, config.num_warps) for config in found} == {(exchange, num_warps)}


def test_default_of_two_ranks_depends_on_the_rows(fake_h200):
    def found(rows, hidden, ranks=2):
        config = tunable("all_reduce_rms_norm").default(problem_of("all_reduce_rms_norm", rows, hidden, ranks), GPU)
        return config.exchange, config.num_warps

    assert found(132, 8192) == ("one_shot", 16) and found(133, 8192) == ("two_shot", 16)
    assert found(1, 8192, ranks=4) == ("one_shot", 16) and found(256, 8192, ranks=4) == ("two_shot", 16)
    assert found(127, 16384) == ("one_shot", 32) and found(128, 16384) == ("one_shot", 16)
    assert found(256, 20000) == ("one_shot", 32), "the row is read again anyway"


def test_default_sends_16_bytes_per_thread(fake_h200):
    for hidden, dtype in ((4096, "bfloat16"), (16384, "bfloat16"), (16384, "float32")):
        problem = problem_of("all_reduce_rms_norm", 4, hidden, dtype=dtype)
        config = tunable("all_reduce_rms_norm").default(problem, GPU)
        assert config.send_columns * problem.torch_dtype.itemsize == 16 * 32 * config.num_warps


def test_sizes_of_operands():
    op = tunable("all_reduce_layer_norm")
    assert op.sizes_of((2, 3, 48), (2, 3, 48), (48,), world_size=4) == (6, 48)
    assert op.sizes_of((48,), world_size=4) == (1, 48)
    with pytest.raises(ValueError, match=r"all_reduce_layer_norm: the first operand is x \[\.\.\., hidden\]"):
        op.sizes_of((), world_size=4)


def test_too_many_warps_are_illegal(fake_h200, monkeypatch):
    """64 threads per warp, as on AMD's gfx9."""
    from tdkernels.runtime import gpu

    properties = gpu._properties(0)
    monkeypatch.setattr(properties, "warp_size", 64)
    assert AllReduceNormConfig(num_warps=16).illegal(GPU, torch.bfloat16) is None
    assert AllReduceNormConfig(num_warps=32).illegal(GPU, torch.bfloat16) == (
        "num_warps must be at most 16 on this device, not 32"
    )
    problem = problem_of("all_reduce_rms_norm", 4, 16384)
    assert max(config.num_warps for config in tunable("all_reduce_rms_norm").space(problem, GPU)) == 16
