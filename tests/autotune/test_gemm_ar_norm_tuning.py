"""Tuning of gemm_ar_rms_norm and gemm_ar_layer_norm: problems, configs, search space and cost model."""

from dataclasses import replace

import pytest
import torch

from tdkernels import GemmArNormConfig, Tiles
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable
from tdkernels.ops.dense.gemm_ar_norm.config import completed, default_config, registers_hold
from tests.autotune.test_cost_model import GPU, H200

OPERATORS = "gemm_ar_rms_norm", "gemm_ar_layer_norm"
BF16 = torch.bfloat16
each_operator = pytest.mark.parametrize("operator", OPERATORS)


def problem_of(operator, m, n=4096, k=4096, ranks=8, layout="rows", dtype="bfloat16"):
    return Problem(operator, "NVIDIA H200", ranks, ranks, dtype, layout, (m, n, k))


@each_operator
def test_problems(operator):
    tuned = tunable(operator)
    assert tuned.sizes_of((2, 3, 16), (40, 16), (2, 3, 40), (40,), world_size=2) == (6, 40, 32)
    with pytest.raises(ValueError, match=rf"{operator}: x \[3, 16\] and weight \[40, 15\] do not fit"):
        tuned.sizes_of((3, 16), (40, 15), world_size=2)
    assert "K = 4097 is not divisible by 8 ranks" in tuned.why_not(problem_of(operator, 4, k=4097))
    assert "layout must be one of rows, fp8" in tuned.why_not(problem_of(operator, 4, layout="nk"))
    nodes = replace(problem_of(operator, 4), local_world_size=4)
    assert 'on several nodes it supports only method "torch"' in tuned.why_not(nodes)
    assert tuned.why_not(problem_of(operator, 4, layout="fp8")) is None


@each_operator
def test_floors_count_the_operands_once(operator):
    tuned, nbytes = tunable(operator), 2 * 4 * 4096
    floors = tuned.floors(problem_of(operator, 4))
    assert floors.flops == 2 * 4 * 4096 * 512 and floors.wire_bytes == 2 * 7 * nbytes // 8
    assert floors.memory_bytes == 2 * (4 * 512 + 4096 * 512) + 3 * nbytes
    in_fp8 = tuned.floors(problem_of(operator, 4, layout="fp8"))
    assert in_fp8.memory_bytes == floors.memory_bytes - nbytes // 2


@each_operator
def test_configs_as_json(operator):
    tuned = tunable(operator)
    tiles = Tiles(16, 64, 128, num_warps=8, num_stages=4)
    for config in (GemmArNormConfig(tiles=tiles, row_programs=2), GemmArNormConfig("separate"), tuned.plain()):
        values = tuned.config_to_dict(config)
        assert tuned.config_from_dict(values) == config and ("tiles" in values) == (config.method == "fused")
    for values in ({"method": "separate", "split_k": 2}, {"method": "fused"}, {"method": "fused", "tiles": {"m": 1}}):
        with pytest.raises((TypeError, ValueError)):
            tuned.config_from_dict(values)


@pytest.mark.parametrize("layout", ["rows", "fp8"])
@each_operator
def test_configs_are_legal_and_estimates_respect_the_floors(fake_h200, operator, layout):
    tuned = tunable(operator)
    for m, n, k, ranks in ((1, 4096, 4096, 8), (64, 8192, 28672, 4), (300, 8192, 8192, 2), (7, 1000, 333, 3)):
        problem = problem_of(operator, m, n, k, ranks, layout)
        assert tuned.why_not(problem) is None
        configs = [*tuned.space(problem, GPU), tuned.default(problem, GPU), tuned.invariant(problem, GPU)]
        configs.append(tuned.plain())
        floors = tuned.floors(problem)
        assert len(set(configs)) > 10
        for config in configs:
            assert tuned.illegal(config, problem, GPU) is None, config
            assert tuned.config_from_dict(tuned.config_to_dict(config)) == config
            estimate = tuned.estimate_ms(config, problem, H200)
            assert floors.computation_ms(H200) <= estimate and floors.wire_bytes / H200.link * 1e3 <= estimate < 1e4
            assert estimate <= tuned.estimate_ms(config, problem, replace(H200, link=H200.link / 4)), config


@each_operator
def test_space_covers_every_field(fake_h200, operator):
    tuned = tunable(operator)
    for m, n, shared in ((16, 4096, True), (64, 8192, True), (16, 16384, False)):
        configs = tuned.space(problem_of(operator, m, n), GPU)
        assert len(configs) == len(set(configs)) < 400
        fused = [config for config in configs if config.method == "fused"]
        assert [config for config in configs if config.method != "fused"] == [GemmArNormConfig("separate")]
        assert {config.split_k for config in fused} == {1, 2, 4, 8}
        assert {config.tiles.num_warps for config in fused} == {4, 8} and len({config.tiles for config in fused}) > 5
        assert {config.row_programs for config in fused} == ({1, 2, 4, 8} if shared else {1})
        long = [config for config in fused if n > registers_hold(config.tiles.num_warps, BF16)]
        assert {config.row_programs for config in long} <= {1}, "a long row is stored by one program"
    assert tuned.space(problem_of(operator, 4096), GPU) == [GemmArNormConfig("separate")]
    for m in (5, 50):
        on_cpu = tuned.space(problem_of(operator, m, 48, 64), torch.device("cpu"))
        assert 2 <= len(on_cpu) <= 3 and {config.method for config in on_cpu} == {"fused", "separate"}


def test_defaults_can_run(fake_h200):
    for device, most in ((torch.device("cpu"), 16), (GPU, 64)):
        for rows in (1, 3, most, most + 1, 1000):
            for n in (1, 40, 4096, 20000):
                config = default_config(rows, n, 512, BF16, device)
                assert config.illegal(device, BF16) is None
                assert config.method == ("fused" if rows <= most else "separate")


def test_default_tiles_keep_a_row_in_registers(fake_h200):
    """Up to 8192 columns of 16 bits."""
    for n, dtype, num_warps in (
        (4096, BF16, 4), (4100, BF16, 8), (8192, BF16, 8), (8200, BF16, 4), (4096, torch.float32, 4),
    ):
        for rows in (1, 64):
            config = default_config(rows, n, 4096, dtype, GPU)
            assert config.tiles.num_warps == num_warps, (rows, n, dtype)
            assert completed(GemmArNormConfig(), rows, n, 4096, dtype, GPU).tiles == config.tiles


@each_operator
def test_invariant_config_does_not_depend_on_the_rows(fake_h200, operator):
    tuned = tunable(operator)
    found = {tuned.invariant(problem_of(operator, m), GPU) for m in (1, 64, 4096)}
    assert len(found) == 1 and all(config.variant_reason() is None for config in found)
    assert GemmArNormConfig("separate").variant_reason() and tuned.plain().variant_reason()


@each_operator
def test_cost_model_orders_the_methods(fake_h200, operator):
    """The fused kernel wins for one row, torch's GEMM for many; more rows and a longer K take longer."""
    tuned = tunable(operator)
    fused = GemmArNormConfig(tiles=Tiles(16, 64, 128, num_warps=8, num_stages=6), split_k=2, row_programs=4)
    configs = fused, GemmArNormConfig("separate"), tuned.plain()

    def estimates(m, **sizes):
        problem = problem_of(operator, m, **sizes)
        return [tuned.estimate_ms(config, problem, H200) for config in configs]

    one, many = estimates(1), estimates(2048)
    assert one[0] < one[1] < one[2] and many[1] < many[0]
    for m in (1, 64):
        assert all(small < large for small, large in zip(estimates(m), estimates(4 * m, k=4 * 4096), strict=True))
    assert len({tuned.compiled(config) for config in configs}) == 3
