"""The tuner and explain() for problems with scaled fp8 operands."""

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import autotune
from tdkernels.autotune import disk_cache, tune
from tdkernels.autotune.problem import gpu_name
from tdkernels.autotune.tunable import tunable
from tdkernels.ops.common.scaling import LAYOUTS
from tests.autotune.entries import cache_in
from tests.autotune.support import equal_on_ranks
from tests.ops.dense.scaled_cases import CONFIG_CLASSES, E4M3, ScaledCase
from tests.support.dense_oracle import OPERATORS
from tests.support.ranks import device, on_ranks
from tests.support.subset import MAYBE_ON_GPUS, pairs

SHAPE = (96, 64, 320)  # M, N, K
OF_A_RANK = {"ag_gemm": (48, 32, 320), "gemm_rs": (96, 64, 160), "gemm_ar": (96, 64, 160)}  # rows, n, k


def check_tune(folder, operator, layout):
    """Tune a problem, and check that a call without a config then runs the tuned one and is right."""
    with cache_in(folder / f"rank{dist.get_rank()}"):
        result = tune(operator, *SHAPE, dtype=E4M3, layout=layout)
        entry, op = result.entry, tunable(operator)
        assert (entry.problem.dtype, entry.problem.layout) == ("float8_e4m3fn", layout)
        config = op.config_from_dict(entry.config)
        assert op.illegal(config, entry.problem, device()) is None
        trials = {trial.config: trial for trial in result.trials}
        assert len(trials) == len(result.trials) > 2
        assert {op.plain(), op.default(entry.problem, device()), config} <= trials.keys()
        assert [trial.reason for trial in result.trials] == [None] * len(trials)
        if layout == LAYOUTS[2]:
            assert all(config.tiles.block_k <= 128 for config in trials if getattr(config, "tiles", None) is not None)
        # Only rank 0 writes its cache, so only there is the entry found again; choices are made by all ranks.
        disk_cache.forget()
        kept = disk_cache.user_entries(operator, gpu_name(device()))
        assert len(kept) == (dist.get_rank() == 0)
    with cache_in(folder / "rank0"), autotune.mode("cached"):
        dist.barrier()
        explained = tdkernels.explain(operator, *SHAPE, dtype=E4M3, layout=layout)
        assert (explained.source, explained.config) == ("cache", config)
        scaling = "block" if layout == LAYOUTS[2] else "row"
        case = ScaledCase(operator, *OF_A_RANK[operator], (scaling, scaling))
        case.check(case.run(use_fast_accum=layout == LAYOUTS[1]))
        case.check(case.run(config, use_fast_accum=layout == LAYOUTS[1]))
    return entry


@pytest.mark.parametrize("operator, layout", pairs(OPERATORS, LAYOUTS) if MAYBE_ON_GPUS else [
    (operator, LAYOUTS[number]) for number, operator in enumerate(OPERATORS)
])
def test_all_ranks_find_the_same_entry(tmp_path, operator, layout):
    equal_on_ranks(on_ranks(2, check_tune, tmp_path, operator, layout))


def calls_in_mode_on(folder):
    """In the mode "on" the first call with scales tunes its own layout, not that of 16-bit operands."""
    with cache_in(folder), autotune.mode("on"):
        case = ScaledCase("gemm_ar", 17, 16, 144, ("block", "block"))
        for _ in range(2):
            case.check(case.run())
        disk_cache.forget()
        entries = disk_cache.user_entries("gemm_ar", gpu_name(device()))
        return [(entry.problem.layout, entry.problem.dtype, entry.problem.shape) for entry in entries]


def test_mode_on_tunes_scaled_calls(tmp_path):
    expected = [(LAYOUTS[2], "float8_e4m3fn", (17, 16, 288))]
    assert on_ranks(2, calls_in_mode_on, tmp_path)[0] == expected


@pytest.mark.parametrize("operator", OPERATORS)
def test_explain(operator):
    result = tdkernels.explain(operator, *SHAPE, dtype=E4M3, layout=LAYOUTS[0], world_size=2)
    assert str(result.problem).startswith(f"{operator} 96x64x320 float8_e4m3fn scaled on 2 x ")
    assert isinstance(result.config, CONFIG_CLASSES[operator])
    with pytest.raises(ValueError, match=f"{operator}: .*scaled"):
        tdkernels.explain(operator, *SHAPE, dtype=torch.bfloat16, layout=LAYOUTS[0], world_size=2)
    with pytest.raises(ValueError, match=f"{operator}: .*float8"):
        tdkernels.explain(operator, *SHAPE, dtype=E4M3, layout="nk", world_size=2)


@pytest.mark.parametrize("operator, k", [("ag_gemm", 40), ("gemm_rs", 80), ("gemm_ar", 80)])
def test_k_of_a_rank_must_be_a_multiple_of_16(operator, k):
    """A call rejects such operands."""
    with pytest.raises(ValueError, match=f"{operator}: .*16"):
        tdkernels.explain(operator, 96, 64, k, dtype=E4M3, layout=LAYOUTS[0], world_size=2)


def explains_operands():
    """Tensors in fp8 are a problem with scales; a layout can be given with them."""
    case = ScaledCase("ag_gemm", 24, 16, 144)
    one = tdkernels.explain(tdkernels.ag_gemm, case.x, case.weight)
    by_block = tdkernels.explain(tdkernels.ag_gemm, case.x, case.weight, layout=LAYOUTS[2])
    return [(result.problem.layout, result.problem.shape, result.problem.dtype) for result in (one, by_block)]


def test_explain_of_tensors():
    results = on_ranks(2, explains_operands)[0]
    assert results == [(layout, (48, 32, 144), "float8_e4m3fn") for layout in (LAYOUTS[0], LAYOUTS[2])]
